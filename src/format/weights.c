// Opening a checkpoint: which container, which files, and the tables that both readers fill.
// An mx_weights owns its mappings and tables; nothing is shared. Does not convert or move weights.
//
// Nothing is trusted: a reader checks each range against the file, then this file checks the whole
// set (names once, no two tensors on the same bytes). After opening, code that uses a tensor needs
// no check of its own.
#include "format/format_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { MAX_CONFIG_BYTES = 16 << 20, MAX_SHARDS = 4096 };

void *format_grow(void *array, int32_t n, size_t elem_bytes) {
    if (n == 0) return mx_alloc(16 * elem_bytes);
    if (n < 16 || (n & (n - 1)) != 0) return array;
    return mx_realloc(array, 2 * (size_t)n * elem_bytes);
}

const char *format_show(mx_str name, char buf[FORMAT_NAME_TEXT]) {
    size_t n = MX_MIN(name.n, (size_t)FORMAT_NAME_TEXT - 4);
    for (size_t i = 0; i < n; i++) {
        buf[i] = name.p[i] >= 0x20 && name.p[i] < 0x7f ? name.p[i] : '?';
    }
    buf[n] = 0;
    if (n < name.n) memcpy(buf + n, "...", 4);
    return buf;
}

bool weights_shape_bytes(mx_dtype t, const int64_t *dim, int n_dim, size_t *out) {
    const mx_dtype_info *d = mx_dtype_get(t);
    size_t n = (size_t)d->block_bytes;
    bool zero = false;
    for (int i = 0; i < n_dim; i++) {
        size_t k = (size_t)dim[i];
        if (i == n_dim - 1) {
            if (k % (size_t)d->block_elems != 0) return false;
            k /= (size_t)d->block_elems;
        }
        zero = zero || k == 0;
        // a zero must not hide that the other dimensions overflow
        if (!mx_mul_size(n, k ? k : 1, &n) || n > INT64_MAX) return false;
    }
    if (n_dim == 0 && d->block_elems != 1) return false;
    *out = zero ? 0 : n;
    return true;
}

mx_status weights_add(mx_weights *w, const mx_wtensor *t, mx_err *err) {
    char buf[FORMAT_NAME_TEXT];
    const char *path = t->file < 0 ? w->path : w->files[t->file].path;
    int32_t old;
    if (mx_map_get(&w->by_name, t->name, &old)) {
        return mx_err_set(err, MX_FORMAT, "%s: tensor %s: defined twice, also in %s", path,
                          format_show(t->name, buf), w->files[w->tensors[old].file].path);
    }
    if (w->n_tensors == FORMAT_MAX_TENSORS) {
        return mx_err_set(err, MX_TOOLARGE, "%s: more than %d tensors", path, FORMAT_MAX_TENSORS);
    }
    w->tensors = format_grow(w->tensors, w->n_tensors, sizeof *w->tensors);
    w->tensors[w->n_tensors] = *t;
    mx_map_put(&w->by_name, t->name, w->n_tensors);
    w->n_tensors++;
    return MX_OK;
}

static int by_address(const void *a, const void *b) {
    const mx_wtensor *x = *(const mx_wtensor *const *)a, *y = *(const mx_wtensor *const *)b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p < q ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

mx_status weights_check_ranges(const mx_weights *w, int32_t file, int32_t first,
                               const unsigned char *data, size_t n_bytes, bool tight, mx_err *err) {
    const mx_wtensor **order = mx_calloc((size_t)(w->n_tensors - first), sizeof *order);
    size_t n = 0, end = 0;
    for (int32_t i = first; i < w->n_tensors; i++) {
        const mx_wtensor *t = &w->tensors[i];
        if (t->file == file && t->n_bytes > 0) order[n++] = t;
    }
    if (n > 1) qsort(order, n, sizeof *order, by_address);
    mx_status st = MX_OK;
    char a[FORMAT_NAME_TEXT], b[FORMAT_NAME_TEXT];
    const char *path = w->files[file].path;
    for (size_t i = 0; i < n && st == MX_OK; i++) {
        size_t begin = (size_t)((const unsigned char *)order[i]->data - data);
        if (begin < end) {
            st = mx_err_set(err, MX_FORMAT, "%s: tensors %s and %s share bytes of the file", path,
                            format_show(order[i - 1]->name, a), format_show(order[i]->name, b));
        } else if (tight && begin > end) {
            st = mx_err_set(err, MX_FORMAT, "%s: bytes %zu to %zu before tensor %s belong to none",
                            path, end, begin, format_show(order[i]->name, a));
        }
        end = begin + order[i]->n_bytes;
    }
    if (st == MX_OK && tight && end != n_bytes) {
        st = mx_err_set(err, MX_FORMAT, "%s: the tensors end at byte %zu of %zu bytes of data",
                        path, end, n_bytes);
    }
    mx_free(order);
    return st;
}

void weights_free_tables(mx_weights *w) {
    mx_free(w->tensors);
    mx_map_free(&w->by_name);
    mx_free(w->kv);
    mx_map_free(&w->kv_by_name);
    json_decref(w->config);
    json_decref(w->generation_config);
    mx_arena_free(&w->arena);
}

void mx_weights_close(mx_weights *w) {
    weights_free_tables(w);
    synthetic_unmap(w);
    for (int32_t i = 0; i < w->n_files; i++) mx_file_close(&w->files[i]);
    mx_free(w->files);
    mx_free(w->path);
    *w = (mx_weights){0};
}

static mx_status add_file(mx_weights *w, const char *path, mx_err *err) {
    mx_file f;
    MX_TRY(mx_file_open(&f, path, err));
    if (f.n_bytes == 0) {
        mx_file_close(&f);
        return mx_err_set(err, MX_FORMAT, "%s: the file is empty", path);
    }
    w->files = format_grow(w->files, w->n_files, sizeof *w->files);
    w->files[w->n_files++] = f;
    return MX_OK;
}

static mx_status load_object(const char *folder, const char *name, bool required, json_t **out,
                             mx_err *err) {
    char *path = mx_path_join(folder, name);
    mx_status st = MX_OK;
    if (required || mx_path_exists(path)) {
        mx_err e = {0};
        *out = mx_json_load(path, MAX_CONFIG_BYTES, MX_JSON_CONFIG, &e);
        if (!*out) {
            st = mx_err_set(err, e.status, "%s", e.msg);
        } else if (!json_is_object(*out)) {
            st = mx_err_set(err, MX_FORMAT, "%s: not a JSON object", path);
        }
    }
    mx_free(path);
    return st;
}

static mx_status load_configs(mx_weights *w, const char *folder, mx_err *err) {
    MX_TRY(load_object(folder, "config.json", true, &w->config, err));
    return load_object(folder, "generation_config.json", false, &w->generation_config, err);
}

// "…-00002-of-00005.safetensors": k = 2, n = 5; *at = where the 00002 is.
static bool shard_number(const char *name, unsigned *k, unsigned *n, size_t *at) {
    size_t len = strlen(name), tail = strlen("-00002-of-00005.safetensors");
    if (len < tail) return false;
    *at = len - tail + 1;
    int used = 0;
    return sscanf(name + *at, "%5u-of-%5u.safetensors%n", k, n, &used) == 2 &&
           (size_t)used == tail - 1;
}

// Every numbered shard has its neighbours, so that no set has a hole: a missing shard is an
// unfinished download.
static mx_status check_shard_set(const char *folder, char *const *names, size_t n, mx_err *err) {
    mx_map have = {0};
    mx_status st = MX_OK;
    for (size_t i = 0; i < n; i++) mx_map_set(&have, mx_str_of(names[i]), (int32_t)i);
    for (size_t i = 0; i < n && st == MX_OK; i++) {
        unsigned k, total;
        size_t at;
        if (!shard_number(names[i], &k, &total, &at)) continue;
        char *other = mx_strdup(names[i]);
        for (unsigned next = k - 1; next <= k + 1 && st == MX_OK; next += 2) {
            if (next < 1 || next > total) continue;
            char digits[16];
            snprintf(digits, sizeof digits, "%05u", next);
            memcpy(other + at, digits, 5);
            if (!mx_map_get(&have, mx_str_of(other), NULL)) {
                st = mx_err_set(err, MX_NOTFOUND, "%s: shard %s is missing (%s is there)", folder,
                                other, names[i]);
            }
        }
        mx_free(other);
    }
    mx_map_free(&have);
    return st;
}

static bool is_shard(const char *name) {
    return name[0] != '.' && mx_str_ends(mx_str_of(name), mx_str_of(".safetensors"));
}

// Keeps, in place, model*.safetensors when there are any, else every *.safetensors.
static size_t choose_shards(char **names, size_t n) {
    size_t all = 0, model = 0;
    for (size_t i = 0; i < n; i++) {
        if (is_shard(names[i])) names[all++] = names[i];
    }
    for (size_t i = 0; i < all; i++) model += strncmp(names[i], "model", 5) == 0;
    if (model == 0) return all;
    size_t kept = 0;
    for (size_t i = 0; i < all; i++) {
        if (strncmp(names[i], "model", 5) == 0) names[kept++] = names[i];
    }
    return kept;
}

// An index is not trusted, only compared: a tensor that it names and no shard holds is reported.
static void report_stale_index(const mx_weights *w, const char *folder) {
    char *path = mx_path_join(folder, "model.safetensors.index.json");
    if (mx_log_get_level() >= MX_LOG_DEBUG && mx_path_exists(path)) {
        mx_err e = {0};
        json_t *index = mx_json_load(path, 256u << 20, MX_JSON_CONFIG, &e);
        if (!index) mx_log(MX_LOG_DEBUG, "%s; the shards of the folder are used", e.msg);
        const char *name;
        json_t *value;
        size_t absent = 0;
        json_object_foreach(json_object_get(index, "weight_map"), name, value) {
            absent += !mx_weights_find(w, mx_str_of(name));
        }
        if (absent) {
            mx_log(MX_LOG_DEBUG, "%s: %zu tensors are in no shard; the index is not used", path,
                   absent);
        }
        json_decref(index);
    }
    mx_free(path);
}

static mx_status open_folder(mx_weights *w, const char *path, mx_err *err) {
    w->container = MX_CONTAINER_SAFETENSORS;
    char **names;
    size_t n;
    MX_TRY(mx_list_dir(path, &names, &n, err));
    mx_status st = MX_OK;
    n = choose_shards(names, n);
    if (n == 0) {
        st = mx_err_set(err, MX_NOTFOUND, "%s: no *.safetensors file in this folder", path);
        goto out;
    }
    if (n > MAX_SHARDS) {
        st = mx_err_set(err, MX_TOOLARGE, "%s: %zu shards, at most %d are read", path, n,
                        MAX_SHARDS);
        goto out;
    }
    if ((st = load_configs(w, path, err)) != MX_OK) goto out;
    if ((st = check_shard_set(path, names, n, err)) != MX_OK) goto out;
    for (size_t i = 0; i < n && st == MX_OK; i++) {
        char *file = mx_path_join(path, names[i]);
        st = add_file(w, file, err);
        if (st == MX_OK) st = safetensors_read(w, w->n_files - 1, err);
        mx_free(file);
    }
    if (st == MX_OK) report_stale_index(w, path);
out:
    mx_free(names);
    return st;
}

static mx_status open_file(mx_weights *w, const char *path, mx_err *err) {
    MX_TRY(add_file(w, path, err));
    const mx_file *f = &w->files[0];
    if (f->n_bytes >= 4 && memcmp(f->data, "GGUF", 4) == 0) {
        w->container = MX_CONTAINER_GGUF;
        return gguf_read(w, 0, err);
    }
    if (mx_str_ends(mx_str_of(path), mx_str_of(".gguf"))) {
        return mx_err_set(err, MX_FORMAT, "%s: not a GGUF file: it does not begin with GGUF", path);
    }
    w->container = MX_CONTAINER_SAFETENSORS;
    MX_TRY(safetensors_read(w, 0, err));
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    char *folder = mx_arena_strndup(&w->arena, n ? path : "./", n ? n : 2);
    return load_configs(w, folder, err);
}

mx_status mx_weights_open(mx_weights *w, const char *path, mx_err *err) {
    *w = (mx_weights){0};
    w->path = mx_strdup(path);
    mx_str whole = mx_str_of(path), mark = mx_str_of(MX_SYNTHETIC);
    mx_status st;
    if (mx_str_starts(whole, mark))
        st = synthetic_open(w, (mx_str){whole.p + mark.n, whole.n - mark.n}, err);
    else
        st = mx_path_is_dir(path) ? open_folder(w, path, err) : open_file(w, path, err);
    if (st == MX_OK) st = mx_weights_check_files(w, err);
    if (st != MX_OK) mx_weights_close(w);
    return st;
}

mx_status mx_weights_check_files(const mx_weights *w, mx_err *err) {
    for (int32_t i = 0; i < w->n_files; i++) {
        const mx_file *f = &w->files[i];
        struct stat s;
        // a removed file stays whole behind its mapping; a shorter one would end in SIGBUS
        if (stat(f->path, &s) == 0 && (size_t)s.st_size < f->n_bytes) {
            return mx_err_set(err, MX_IO, "%s: became shorter while in use: %lld bytes, was %zu",
                              f->path, (long long)s.st_size, f->n_bytes);
        }
    }
    return MX_OK;
}

void mx_weights_release(const mx_weights *w, const void *data, size_t n_bytes) {
    for (int32_t i = 0; i < w->n_files; i++) {
        const mx_file *f = &w->files[i];
        size_t offset = (size_t)((uintptr_t)data - (uintptr_t)f->data);
        if (f->data && offset < f->n_bytes) mx_file_release(f, offset, n_bytes);
    }
}

const mx_wtensor *mx_weights_find(const mx_weights *w, mx_str name) {
    int32_t i;
    return mx_map_get(&w->by_name, name, &i) ? &w->tensors[i] : NULL;
}
