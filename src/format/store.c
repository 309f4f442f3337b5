// Names to paths: the model store of this program, and, read-only, the Hugging Face cache.
// No state. Does not download, and does not open a checkpoint.
//
//   <models>/<owner>/<name>/…                                   ours
//   <hub>/models--<owner>--<name>/snapshots/<commit>/… -> blobs the Hugging Face cache; newest wins
//
// A name from the user becomes part of a path only after check_id: two parts of plain characters,
// neither "." nor "..". Removal walks by directory descriptors that never follow a link, so that
// nothing outside the store can be reached, whatever lies in it.
#include "format/store.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "format/weights.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TREE_DEPTH = 24, MAX_PART_BYTES = 200 };

// ---- Folders ----

static char *join3(const char *a, const char *b, const char *c) {
    char *ab = mx_path_join(a, b), *abc = mx_path_join(ab, c);
    mx_free(ab);
    return abc;
}

char *mx_cache_dir(void) {
    if (mx_knob_is_set(MX_KNOB_CACHE_DIR)) return mx_strdup(mx_knob_text(MX_KNOB_CACHE_DIR));
    if (!mx_knob_is_set(MX_KNOB_HOME)) return NULL;
    return mx_path_join(mx_knob_text(MX_KNOB_HOME), ".cache/mlxcel");
}

char *mx_models_dir(void) {
    if (mx_knob_is_set(MX_KNOB_MODELS_DIR)) return mx_strdup(mx_knob_text(MX_KNOB_MODELS_DIR));
    char *cache = mx_cache_dir();
    if (!cache) return NULL;
    char *models = mx_path_join(cache, "models");
    mx_free(cache);
    return models;
}

static char *hub_dir(void) {
    if (mx_knob_is_set(MX_KNOB_HF_HUB_CACHE)) return mx_strdup(mx_knob_text(MX_KNOB_HF_HUB_CACHE));
    if (mx_knob_is_set(MX_KNOB_HF_HOME)) return mx_path_join(mx_knob_text(MX_KNOB_HF_HOME), "hub");
    if (!mx_knob_is_set(MX_KNOB_HOME)) return NULL;
    return mx_path_join(mx_knob_text(MX_KNOB_HOME), ".cache/huggingface/hub");
}

// ---- What a folder holds ----

typedef struct folder_facts {
    bool config, safetensors;
    size_t n_gguf;
    char *gguf; // one of them, a path
} folder_facts;

static folder_facts look_at(const char *path) {
    folder_facts f = {0};
    char **names;
    size_t n;
    mx_err err = {0};
    if (mx_list_dir(path, &names, &n, &err) != MX_OK) return f;
    for (size_t i = 0; i < n; i++) {
        mx_str s = mx_str_of(names[i]);
        if (s.p[0] == '.') continue;
        f.config = f.config || mx_str_is(s, "config.json");
        f.safetensors = f.safetensors || mx_str_ends(s, mx_str_of(".safetensors"));
        // mmproj-*.gguf is the image tower that lies beside a language model
        if (mx_str_ends(s, mx_str_of(".gguf")) && !mx_str_starts(s, mx_str_of("mmproj"))) {
            if (f.n_gguf++ == 0) f.gguf = mx_path_join(path, names[i]);
        }
    }
    mx_free(names);
    return f;
}

static bool is_model_folder(const char *path) {
    folder_facts f = look_at(path);
    mx_free(f.gguf);
    return f.config || f.n_gguf > 0;
}

// The path to open for a model's folder: the folder, or its only GGUF file.
static mx_status model_in_folder(const char *path, char **out, mx_err *err) {
    folder_facts f = look_at(path);
    mx_status st = MX_OK;
    if (!f.safetensors && f.n_gguf == 1) {
        *out = f.gguf;
        return MX_OK;
    }
    if (!f.safetensors && f.n_gguf > 1) {
        st = mx_err_set(err, MX_INVALID, "%s: holds %zu .gguf files; name one, such as %s", path,
                        f.n_gguf, f.gguf);
    } else if (!f.config) {
        st = mx_err_set(err, MX_NOTFOUND, "%s: holds neither config.json nor a .gguf file", path);
    } else {
        *out = mx_strdup(path);
    }
    mx_free(f.gguf);
    return st;
}

// ---- Names ----

static bool valid_part(mx_str s) {
    if (s.n == 0 || s.n > MAX_PART_BYTES || s.p[0] == '.' || s.p[0] == '-') return false;
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        bool alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!alnum && c != '.' && c != '_' && c != '-') return false;
    }
    return true;
}

static mx_status check_id(const char *id, mx_err *err) {
    const char *slash = strchr(id, '/');
    bool ok;
    if (strstr(id, "://")) {
        return mx_err_set(err, MX_INVALID, "%s: a URL is not a model name; use owner/name", id);
    }
    if (slash) {
        ok = valid_part((mx_str){id, (size_t)(slash - id)}) && valid_part(mx_str_of(slash + 1));
    } else {
        ok = valid_part(mx_str_of(id));
    }
    if (ok) return MX_OK;
    return mx_err_set(err, MX_INVALID,
                      "%.300s: not a model name (owner/name, of letters, digits, '.', '_', '-')",
                      id);
}

// Of a checked name, "owner/name": a bare one gets the default owner, which comes from outside too
// and is checked as well. mx_free it.
static mx_status full_id(const char *model, char **id, mx_err *err) {
    *id = NULL;
    if (strchr(model, '/')) {
        *id = mx_strdup(model);
        return MX_OK;
    }
    const char *owner = mx_knob_text(MX_KNOB_DEFAULT_ORG);
    if (!valid_part(mx_str_of(owner))) {
        return mx_err_set(err, MX_INVALID, "MLXCEL_DEFAULT_ORG=%.300s: not the name of an owner",
                          owner);
    }
    *id = mx_path_join(owner, model);
    return MX_OK;
}

// ---- The Hugging Face cache ----

static double modified_at(const char *path) {
    struct stat s;
    if (stat(path, &s) != 0) return 0;
    return (double)s.st_mtim.tv_sec + 1e-9 * (double)s.st_mtim.tv_nsec;
}

// The newest snapshot of <hub>/<folder> that holds a model, or NULL.
static char *newest_snapshot(const char *hub, const char *folder) {
    char *snapshots = join3(hub, folder, "snapshots"), *best = NULL, **names;
    double best_time = -1;
    size_t n;
    mx_err err = {0};
    if (mx_list_dir(snapshots, &names, &n, &err) == MX_OK) {
        for (size_t i = 0; i < n; i++) {
            char *path = mx_path_join(snapshots, names[i]);
            double t = modified_at(path);
            if (t > best_time && is_model_folder(path)) {
                mx_free(best);
                best = path;
                best_time = t;
            } else {
                mx_free(path);
            }
        }
        mx_free(names);
    }
    mx_free(snapshots);
    return best;
}

// "owner/name" -> "models--owner--name". mx_free it.
static char *hub_folder(const char *id) {
    mx_buf b;
    const char *slash = strchr(id, '/');
    mx_buf_init(&b, 0);
    mx_buf_printf(&b, "models--%.*s--%s", (int)(slash - id), id, slash + 1);
    return mx_buf_take(&b);
}

static char *find_in_hub(const char *id, mx_buf *searched) {
    char *hub = hub_dir();
    if (!hub) return NULL;
    char *folder = hub_folder(id), *path = newest_snapshot(hub, folder);
    mx_buf_printf(searched, ", %s/%s", hub, folder);
    mx_free(folder);
    mx_free(hub);
    return path;
}

// ---- Resolving ----

// The id of the store's only model whose last part is `name`: MX_OK with *id NULL when there is
// none, INVALID when there are several.
static mx_status find_by_last_part(const char *models, const char *name, char **id, mx_err *err) {
    char **owners;
    size_t n;
    mx_status st = MX_OK;
    mx_err ignored = {0};
    *id = NULL;
    if (mx_list_dir(models, &owners, &n, &ignored) != MX_OK) return MX_OK;
    for (size_t i = 0; i < n && st == MX_OK; i++) {
        char *path = join3(models, owners[i], name);
        if (valid_part(mx_str_of(owners[i])) && is_model_folder(path)) {
            char *found = mx_path_join(owners[i], name);
            if (*id) {
                st = mx_err_set(err, MX_INVALID, "%s: ambiguous: %s or %s", name, *id, found);
                mx_free(found);
            } else {
                *id = found;
            }
        }
        mx_free(path);
    }
    mx_free(owners);
    if (st != MX_OK) {
        mx_free(*id);
        *id = NULL;
    }
    return st;
}

// A model's folder in the store: as named, or under the only owner that has the bare name.
static mx_status find_in_store(const char *models, const char *model, char **folder,
                               mx_buf *searched, mx_err *err) {
    char *id, *path;
    mx_status st = MX_OK;
    *folder = NULL;
    MX_TRY(full_id(model, &id, err));
    path = mx_path_join(models, id);
    mx_buf_printf(searched, ", %s", path);
    if (is_model_folder(path)) {
        *folder = path;
        path = NULL;
    } else if (!strchr(model, '/')) {
        char *other;
        st = find_by_last_part(models, model, &other, err);
        if (other) *folder = mx_path_join(models, other);
        mx_free(other);
        mx_buf_printf(searched, ", %s/*/%s", models, model);
    }
    mx_free(path);
    mx_free(id);
    return st;
}

static mx_status resolve_name(const char *model, const char *models, char **path, mx_err *err) {
    mx_buf searched;
    mx_buf_init(&searched, 0);
    mx_buf_printf(&searched, "%s, ./models/%s", model, model);
    char *folder = mx_path_join("models", model);
    mx_status st = MX_OK;
    if (!mx_path_exists(folder)) {
        mx_free(folder);
        folder = NULL;
        if (models) st = find_in_store(models, model, &folder, &searched, err);
    }
    char *id = NULL;
    if (st == MX_OK && !folder) st = full_id(model, &id, err);
    if (st == MX_OK && !folder) folder = find_in_hub(id, &searched);
    mx_free(id);
    if (st == MX_OK && !folder) {
        st = mx_err_set(err, MX_NOTFOUND, "%s: no such model; searched %s", model, searched.data);
    } else if (st == MX_OK && mx_path_is_dir(folder)) {
        st = model_in_folder(folder, path, err);
    } else if (st == MX_OK) {
        *path = mx_strdup(folder);
    }
    mx_free(folder);
    mx_buf_free(&searched);
    return st;
}

// Things that can only be meant as a path.
static bool looks_like_path(const char *s) {
    const char *slash = strchr(s, '/');
    mx_str v = mx_str_of(s);
    return s[0] == '/' || s[0] == '.' || s[0] == '~' || (slash && strchr(slash + 1, '/')) ||
           mx_str_ends(v, mx_str_of(".gguf")) || mx_str_ends(v, mx_str_of(".safetensors"));
}

mx_status mx_store_resolve(const char *model, const char *models_dir, char **path, mx_err *err) {
    *path = NULL;
    if (!model[0]) return mx_err_set(err, MX_INVALID, "the model's name is empty");
    if (mx_str_starts(mx_str_of(model), mx_str_of(MX_SYNTHETIC))) {
        *path = mx_strdup(model);
        return MX_OK;
    }
    if (mx_path_exists(model)) {
        if (mx_path_is_dir(model)) return model_in_folder(model, path, err);
        *path = mx_strdup(model);
        return MX_OK;
    }
    if (looks_like_path(model) && !strstr(model, "://")) {
        return mx_err_set(err, MX_NOTFOUND, "%s: no such file or folder", model);
    }
    MX_TRY(check_id(model, err));
    char *own = models_dir ? NULL : mx_models_dir();
    mx_status st = resolve_name(model, models_dir ? models_dir : own, path, err);
    mx_free(own);
    return st;
}

// ---- Listing ----

// Adds up the files below path; links to files count as their targets, links to folders as none.
static void measure(const char *path, int depth, mx_store_entry *e) {
    char **names;
    size_t n;
    mx_err err = {0};
    if (depth > MAX_TREE_DEPTH || mx_list_dir(path, &names, &n, &err) != MX_OK) return;
    for (size_t i = 0; i < n; i++) {
        char *p = mx_path_join(path, names[i]);
        struct stat s;
        if (lstat(p, &s) == 0 && S_ISDIR(s.st_mode)) {
            measure(p, depth + 1, e);
        } else if (stat(p, &s) == 0 && S_ISREG(s.st_mode)) {
            double t = modified_at(p);
            e->size_bytes += (uint64_t)s.st_size;
            if (t > e->modified) e->modified = t;
        }
        mx_free(p);
    }
    mx_free(names);
}

typedef struct entry_list {
    mx_store_entry *entries;
    size_t n;
} entry_list;

// Takes id and path.
static void add_entry(entry_list *l, char *id, char *path, bool read_only) {
    l->entries = mx_realloc(l->entries, (l->n + 1) * sizeof *l->entries);
    mx_store_entry *e = &l->entries[l->n++];
    *e = (mx_store_entry){.repo_id = id, .path = realpath(path, NULL), .read_only = read_only};
    if (e->path) {
        mx_free(path);
    } else {
        e->path = path;
    }
    measure(e->path, 0, e);
}

static mx_status list_store(const char *models, entry_list *l, mx_err *err) {
    char **owners, **names;
    size_t n_owners, n_names;
    if (!mx_path_exists(models)) return MX_OK;
    MX_TRY(mx_list_dir(models, &owners, &n_owners, err));
    for (size_t i = 0; i < n_owners; i++) {
        mx_err ignored = {0};
        char *owner = mx_path_join(models, owners[i]);
        if (valid_part(mx_str_of(owners[i])) &&
            mx_list_dir(owner, &names, &n_names, &ignored) == MX_OK) {
            for (size_t k = 0; k < n_names; k++) {
                char *path = mx_path_join(owner, names[k]);
                if (valid_part(mx_str_of(names[k])) && is_model_folder(path)) {
                    add_entry(l, mx_path_join(owners[i], names[k]), path, false);
                } else {
                    mx_free(path);
                }
            }
            mx_free(names);
        }
        mx_free(owner);
    }
    mx_free(owners);
    return MX_OK;
}

// "models--owner--name" -> "owner/name", or NULL. mx_free it.
static char *id_of_hub_folder(const char *folder) {
    if (strncmp(folder, "models--", 8) != 0) return NULL;
    const char *sep = strstr(folder + 8, "--");
    if (!sep) return NULL;
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b, "%.*s/%s", (int)(sep - folder - 8), folder + 8, sep + 2);
    return mx_buf_take(&b);
}

static void list_hub(entry_list *l) {
    char *hub = hub_dir(), **names;
    size_t n;
    mx_err ignored = {0};
    if (hub && mx_list_dir(hub, &names, &n, &ignored) == MX_OK) {
        for (size_t i = 0; i < n; i++) {
            char *id = id_of_hub_folder(names[i]), *path = id ? newest_snapshot(hub, names[i]) : 0;
            if (path) {
                add_entry(l, id, path, true);
            } else {
                mx_free(id);
            }
        }
        mx_free(names);
    }
    mx_free(hub);
}

static int by_id(const void *a, const void *b) {
    const mx_store_entry *x = a, *y = b;
    int c = strcmp(x->repo_id, y->repo_id);
    return c ? c : x->read_only - y->read_only;
}

mx_status mx_store_list(const char *models_dir, mx_store_entry **entries, size_t *n, mx_err *err) {
    char *own = models_dir ? NULL : mx_models_dir();
    const char *models = models_dir ? models_dir : own;
    entry_list l = {0};
    mx_status st = models ? list_store(models, &l, err) : MX_OK;
    if (st == MX_OK) {
        list_hub(&l);
        if (l.n) qsort(l.entries, l.n, sizeof *l.entries, by_id);
    }
    mx_free(own);
    *entries = l.entries;
    *n = l.n;
    return st;
}

void mx_store_free(mx_store_entry *entries, size_t n) {
    for (size_t i = 0; i < n; i++) {
        mx_free(entries[i].repo_id);
        mx_free(entries[i].path);
    }
    mx_free(entries);
}

// ---- Removing ----

enum { OPEN_FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

// Removes `name` in the folder `at`, with all below it when it is a folder. 0 or an errno.
static int remove_tree(int at, const char *name, int depth) {
    if (depth > MAX_TREE_DEPTH) return ENAMETOOLONG;
    int fd = openat(at, name, OPEN_FOLDER);
    if (fd < 0) { // a file, or a link, which goes without its target
        if (errno != ENOTDIR && errno != ELOOP) return errno;
        return unlinkat(at, name, 0) == 0 ? 0 : errno;
    }
    DIR *d = fdopendir(fd);
    if (!d) {
        int e = errno;
        close(fd);
        return e;
    }
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        rc = remove_tree(fd, e->d_name, depth + 1);
    }
    closedir(d);
    if (rc == 0 && unlinkat(at, name, AT_REMOVEDIR) != 0) rc = errno;
    return rc;
}

static mx_status remove_error(const char *models, const char *id, int e, mx_err *err) {
    if (e == ENOENT) {
        return mx_err_set(err, MX_NOTFOUND, "%s: not in the store %s", id, models);
    }
    if (e == ENOTDIR || e == ELOOP) {
        return mx_err_set(err, MX_DENIED, "%s: its owner's folder in %s is not a plain folder", id,
                          models);
    }
    mx_status st = e == EACCES || e == EPERM || e == EROFS ? MX_DENIED : MX_IO;
    return mx_err_set(err, st, "%s: remove from %s: %s", id, models, strerror(e));
}

static mx_status remove_id(const char *models, const char *id, mx_err *err) {
    const char *slash = strchr(id, '/');
    char owner[MAX_PART_BYTES + 1];
    snprintf(owner, sizeof owner, "%.*s", (int)(slash - id), id);
    int root = open(models, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int folder = root < 0 ? -1 : openat(root, owner, OPEN_FOLDER);
    int e = folder < 0 ? errno : remove_tree(folder, slash + 1, 0);
    // an owner without models goes too; one that still has some stays, and that is no error
    if (e == 0) unlinkat(root, owner, AT_REMOVEDIR);
    if (folder >= 0) close(folder);
    if (root >= 0) close(root);
    return e ? remove_error(models, id, e, err) : MX_OK;
}

static mx_status remove_named(const char *models, const char *repo_id, mx_err *err) {
    char *id;
    MX_TRY(full_id(repo_id, &id, err));
    mx_status st = remove_id(models, id, err);
    if (st == MX_NOTFOUND && !strchr(repo_id, '/')) {
        char *other;
        st = find_by_last_part(models, repo_id, &other, err);
        if (other) st = remove_id(models, other, err);
        if (st == MX_OK && !other) st = MX_NOTFOUND;
        mx_free(other);
    }
    if (st == MX_NOTFOUND) {
        mx_buf searched;
        mx_buf_init(&searched, 0);
        char *cached = find_in_hub(id, &searched);
        if (cached) {
            st = mx_err_set(err, MX_DENIED,
                            "%s: belongs to the Hugging Face cache (%s), which is "
                            "only read",
                            id, cached);
        }
        mx_free(cached);
        mx_buf_free(&searched);
    }
    mx_free(id);
    return st;
}

mx_status mx_store_remove(const char *models_dir, const char *repo_id, mx_err *err) {
    MX_TRY(check_id(repo_id, err));
    char *own = models_dir ? NULL : mx_models_dir();
    const char *models = models_dir ? models_dir : own;
    mx_status st =
        models ? remove_named(models, repo_id, err)
               : mx_err_set(err, MX_NOTFOUND, "%s: there is no store: HOME is not set", repo_id);
    mx_free(own);
    return st;
}
