// gguf: a valid file read back, and every kind of damage. Each damaged file must give an error that
// names the place, quickly and in little memory; none may crash.
#include "format/weights.h"

#include "support/ckpt_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
// cmocka.h needs the two above
#include <cmocka.h>

// memory that reading a refused file may take; sanitizers need some of their own
#define ROOM_BYTES ((MX_TEST_SLOW > 1 ? 128u : 1u) << 20)

static char *folder;

static int set_up(void **state) {
    (void)state;
    folder = ckpt_temp_dir();
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    ckpt_remove_dir(folder);
    return 0;
}

// ---- A small valid file, and its parts ----

static void fill_valid(ckpt *c) {
    static const char *const tokens[] = {"<s>", "a", "", "b"};
    static const float scores[] = {0, -1, -2.5f, -3};
    static const int32_t types[] = {3, 1, 1, 1};
    ckpt_init(c);
    ckpt_kv_str(c, "general.architecture", "llama");
    ckpt_kv_u32(c, "llama.block_count", 2);
    ckpt_kv_f32(c, "llama.rope.freq_base", 10000.0f);
    ckpt_kv_bool(c, "tokenizer.ggml.add_bos_token", true);
    ckpt_kv_strs(c, "tokenizer.ggml.tokens", tokens, 4);
    ckpt_kv_array(c, "tokenizer.ggml.scores", CKPT_F32, scores, 4, 4);
    ckpt_kv_array(c, "tokenizer.ggml.token_type", CKPT_I32, types, 4, 4);
    ckpt_add_hash(c, "token_embd.weight", MX_Q4_0, 2, (int64_t[]){3, 64}, 1.0f);
    ckpt_add_hash(c, "output_norm.weight", MX_F32, 1, (int64_t[]){5}, 1.0f);
    ckpt_add_hash(c, "blk.0.attn_q.weight", MX_Q6_K, 2, (int64_t[]){2, 256}, 1.0f);
    ckpt_add(c, "empty", MX_F16, 2, (int64_t[]){0, 8}, NULL);
    ckpt_add(c, "positions", MX_I32, 1, (int64_t[]){3}, (int32_t[]){7, 8, 9});
}

static mx_buf valid_bytes(void) {
    ckpt c;
    mx_buf b;
    fill_valid(&c);
    ckpt_build_gguf(&c, &b);
    ckpt_free(&c);
    return b;
}

static char *write_bytes(const void *p, size_t n) {
    char *path = mx_path_join(folder, "m.gguf");
    ckpt_write_file(path, p, n);
    return path;
}

static mx_status open_bytes(const void *p, size_t n, mx_err *err) {
    char *path = write_bytes(p, n);
    mx_weights w;
    *err = (mx_err){0};
    mx_status st = mx_weights_open(&w, path, err);
    if (st == MX_OK) mx_weights_close(&w);
    mx_free(path);
    return st;
}

// The file is refused with `want`, the message names the file and holds `part`; quickly.
static void refuse(const void *p, size_t n, mx_status want, const char *part) {
    mx_err err;
    double t = ckpt_cpu_s();
    mx_status st = open_bytes(p, n, &err);
    if (st != want || !strstr(err.msg, part) || !strstr(err.msg, "m.gguf: ")) {
        fail_msg("expected %s with \"%s\", got %s: %s", mx_status_name(want), part,
                 mx_status_name(st), err.msg);
    }
    assert_true(ckpt_cpu_s() - t < MX_TEST_SLOW);
}

static void refuse_buf(mx_buf *b, mx_status want, const char *part) {
    assert_false(b->full);
    refuse(b->data, b->n, want, part);
    mx_buf_free(b);
}

// Raw parts, for files that the writer would not make.
static void put32(mx_buf *b, uint32_t v) {
    mx_buf_add(b, &v, 4);
}
static void put64(mx_buf *b, uint64_t v) {
    mx_buf_add(b, &v, 8);
}
static mx_buf header(uint32_t version, uint64_t n_tensors, uint64_t n_kv) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "GGUF");
    put32(&b, version);
    put64(&b, n_tensors);
    put64(&b, n_kv);
    return b;
}
static void put_key(mx_buf *b, const char *key, uint32_t type) {
    ckpt_put_str(b, key);
    put32(b, type);
}
static void put_tensor(mx_buf *b, const char *name, int n_dim, const uint64_t *dim, uint32_t type,
                       uint64_t offset) {
    ckpt_put_str(b, name);
    put32(b, (uint32_t)n_dim);
    for (int i = 0; i < n_dim; i++) put64(b, dim[i]);
    put32(b, type);
    put64(b, offset);
}
static void put_data(mx_buf *b, size_t n) {
    ckpt_pad(b, 32);
    for (size_t i = 0; i < n; i++) mx_buf_putc(b, 'd');
}

// ---- Reading ----

static void check_metadata(const mx_weights *w) {
    int64_t i;
    double d;
    bool flag;
    mx_str s;
    assert_int_equal(w->n_kv, 7);
    assert_int_equal(w->gguf_version, 3);
    assert_int_equal(w->alignment, 32);
    assert_true(mx_gguf_get_str(w, "general.architecture", &s) && mx_str_is(s, "llama"));
    assert_true(mx_gguf_get_i64(w, "llama.block_count", &i) && i == 2);
    assert_true(mx_gguf_get_f64(w, "llama.block_count", &d) && d == 2);
    assert_true(mx_gguf_get_f64(w, "llama.rope.freq_base", &d) && d == 10000);
    assert_true(mx_gguf_get_bool(w, "tokenizer.ggml.add_bos_token", &flag) && flag);
    assert_false(mx_gguf_get_i64(w, "tokenizer.ggml.add_bos_token", &i));
    assert_false(mx_gguf_get_i64(w, "llama.rope.freq_base", &i));
    assert_false(mx_gguf_get_str(w, "llama.block_count", &s));
    assert_false(mx_gguf_get_bool(w, "absent", &flag));
    const mx_gguf_kv *kv = mx_gguf_find(w, "tokenizer.ggml.tokens");
    assert_int_equal(kv->n_elems, 4);
    assert_true(mx_str_is(kv->strings[0], "<s>") && kv->strings[2].n == 0);
    kv = mx_gguf_find(w, "tokenizer.ggml.scores");
    assert_true(mx_gguf_array_f64(kv, 2) == -2.5);
    kv = mx_gguf_find(w, "tokenizer.ggml.token_type");
    assert_true(mx_gguf_array_i64(kv, 0) == 3 && mx_gguf_array_f64(kv, 1) == 1);
}

static void a_valid_file_reads_back(void **state) {
    (void)state;
    ckpt c;
    mx_weights w;
    mx_err err = {0};
    fill_valid(&c);
    char *path = mx_path_join(folder, "m.gguf");
    ckpt_write_gguf(&c, path);
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    assert_int_equal(w.container, MX_CONTAINER_GGUF);
    check_metadata(&w);
    assert_int_equal(w.n_tensors, c.n_tensors);
    for (size_t i = 0; i < c.n_tensors; i++) {
        const ckpt_tensor *x = &c.tensors[i];
        const mx_wtensor *t = mx_weights_find(&w, mx_str_of(x->name));
        assert_non_null(t);
        assert_true(t->dtype == x->dtype && t->n_dim == x->n_dim && t->n_bytes == x->n_bytes);
        assert_memory_equal(t->dim, x->dim, (size_t)x->n_dim * sizeof *x->dim);
        if (t->n_bytes) assert_memory_equal(t->data, x->data, x->n_bytes);
        assert_int_equal((uintptr_t)t->data % 8, 0);
    }
    assert_null(mx_weights_find(&w, mx_str_of("absent")));
    mx_weights_close(&w);
    ckpt_free(&c);
    mx_free(path);
}

static void every_scalar_type_is_widened(void **state) {
    (void)state;
    static const uint8_t bytes[8] = {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const struct {
        uint32_t type;
        size_t n;
        int64_t want;
    } rows[] = {{0, 1, 254}, {1, 1, -2},         {2, 2, 65534}, {3, 2, -2},
                {5, 4, -2},  {4, 4, 4294967294}, {11, 8, -2}};
    ckpt c;
    ckpt_init(&c);
    char key[16];
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        snprintf(key, sizeof key, "s%zu", i);
        ckpt_kv(&c, key, rows[i].type, bytes, rows[i].n);
        snprintf(key, sizeof key, "a%zu", i);
        ckpt_kv_array(&c, key, rows[i].type, bytes, 1, rows[i].n);
    }
    ckpt_kv(&c, "huge", 10, bytes, 8);
    ckpt_kv(&c, "double", 12, &(double){0.1}, 8);
    char *path = mx_path_join(folder, "m.gguf");
    ckpt_write_gguf(&c, path);
    mx_weights w;
    mx_err err = {0};
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    int64_t v;
    double d;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        snprintf(key, sizeof key, "s%zu", i);
        assert_true(mx_gguf_get_i64(&w, key, &v));
        assert_int_equal(v, rows[i].want);
        snprintf(key, sizeof key, "a%zu", i);
        assert_int_equal(mx_gguf_array_i64(mx_gguf_find(&w, key), 0), rows[i].want);
        assert_true(mx_gguf_array_f64(mx_gguf_find(&w, key), 0) == (double)rows[i].want);
    }
    assert_false(mx_gguf_get_i64(&w, "huge", &v));
    assert_true(mx_gguf_get_f64(&w, "huge", &d) && d == 18446744073709551614.0);
    assert_true(mx_gguf_get_f64(&w, "double", &d) && d == 0.1);
    mx_weights_close(&w);
    ckpt_free(&c);
    mx_free(path);
}

static void version_2_and_symlinks_open(void **state) {
    (void)state;
    mx_buf b = valid_bytes();
    b.data[4] = 2;
    char *path = write_bytes(b.data, b.n), *link = mx_path_join(folder, "link");
    assert_int_equal(symlink("m.gguf", link), 0);
    mx_weights w;
    mx_err err = {0};
    assert_int_equal(mx_weights_open(&w, link, &err), MX_OK);
    assert_int_equal(w.gguf_version, 2);
    mx_weights_close(&w);
    mx_free(link);
    mx_free(path);
    mx_buf_free(&b);
}

// ---- Damage: counts and lengths ----

static void huge_counts_allocate_nothing(void **state) {
    (void)state;
    static const uint64_t counts[] = {1ull << 32, 1ull << 60, UINT64_MAX, 1000};
    mx_buf b = valid_bytes();
    uint64_t rss = mx_mem_peak_rss_bytes();
    for (size_t i = 0; i < MX_COUNT(counts); i++) {
        mx_buf d = valid_bytes();
        memcpy(d.data + 8, &counts[i], 8);
        refuse_buf(&d, MX_FORMAT, "tensor_count");
        d = valid_bytes();
        memcpy(d.data + 16, &counts[i], 8);
        refuse_buf(&d, MX_FORMAT, "metadata_kv_count");
    }
    // counts that the size of the file allows, on a large file of zeros
    static const size_t size = (size_t)1 << 36;
    char *path = write_bytes(b.data, b.n);
    for (int field = 8; field <= 16; field += 8) {
        mx_buf d = header(3, 0, 0);
        uint64_t n = 1u << 16;
        memcpy(d.data + field, &n, 8);
        mx_free(write_bytes(d.data, d.n));
        mx_buf_free(&d);
        mx_weights w;
        mx_err err = {0};
        if (truncate(path, (off_t)size) == 0) {
            assert_int_equal(mx_weights_open(&w, path, &err), MX_FORMAT);
            assert_non_null(strstr(err.msg, "empty name"));
        }
    }
    assert_true(mx_mem_peak_rss_bytes() < MX_MAX(rss, 64u << 20) + ROOM_BYTES);
    mx_free(path);
    mx_buf_free(&b);
}

// Counts beyond the documented limits, in files of zeros that are large enough for them.
static void limits_are_their_own_error(void **state) {
    (void)state;
    static const struct {
        uint64_t n_tensors, n_kv;
        uint32_t elem_type;
        uint64_t n_elems;
        mx_status want;
        const char *part;
    } rows[] = {
        {0, 65537, 0, 0, MX_TOOLARGE, "metadata_kv_count: 65537 entries, at most 65536"},
        {(1u << 21) + 1, 0, 0, 0, MX_TOOLARGE, "tensor_count: 2097153 entries, at most 2097152"},
        {0, 1, CKPT_STR, (1u << 21) + 1, MX_TOOLARGE, "2097153 strings"},
        {0, 1, CKPT_BOOL, (1u << 20) + 1, MX_TOOLARGE, "1048577 bools"},
        {0, 2, CKPT_STR, 1u << 20, MX_FORMAT, "metadata key 1: empty name"}, // the first is fine
        {0, 2, 0, 1u << 26, MX_FORMAT, "metadata key 1: empty name"},
    };
    uint64_t rss = mx_mem_peak_rss_bytes();
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        mx_buf b = header(3, rows[i].n_tensors, rows[i].n_kv);
        put_key(&b, "k", CKPT_ARR);
        put32(&b, rows[i].elem_type);
        put64(&b, rows[i].n_elems);
        char *path = write_bytes(b.data, b.n);
        mx_weights w;
        mx_err err = {0};
        assert_int_equal(truncate(path, 1 << 28), 0);
        mx_status st = mx_weights_open(&w, path, &err);
        if (st != rows[i].want || !strstr(err.msg, rows[i].part)) {
            fail_msg("expected \"%s\", got %s", rows[i].part, err.msg);
        }
        mx_free(path);
        mx_buf_free(&b);
    }
    assert_true(mx_mem_peak_rss_bytes() < MX_MAX(rss, 64u << 20) + ROOM_BYTES);
}

static void a_file_cut_anywhere_is_refused(void **state) {
    (void)state;
    mx_buf b = valid_bytes();
    mx_err err;
    for (size_t n = 0; n < b.n; n++) {
        if (open_bytes(b.data, n, &err) == MX_OK) fail_msg("cut at %zu of %zu: accepted", n, b.n);
        assert_non_null(strstr(err.msg, "m.gguf"));
    }
    assert_int_equal(open_bytes(b.data, b.n, &err), MX_OK);
    mx_buf_free(&b);
}

static void truncation_names_tensor_and_bytes(void **state) {
    (void)state;
    ckpt c;
    mx_buf b;
    ckpt_init(&c);
    ckpt_add_hash(&c, "first", MX_F32, 1, (int64_t[]){8192}, 1);
    ckpt_add_hash(&c, "last", MX_F32, 1, (int64_t[]){8192}, 1);
    ckpt_build_gguf(&c, &b);
    refuse(b.data, b.n - 1, MX_FORMAT,
           "tensor last: needs 32768 bytes at offset 32768 of the data, which has 65535 bytes");
    refuse(b.data, b.n - 4096, MX_FORMAT, "tensor last: needs");
    refuse(b.data, b.n - 40000, MX_FORMAT, "tensor first: needs");
    refuse(b.data, b.n / 2, MX_FORMAT, "needs 32768 bytes");
    mx_buf_free(&b);
    ckpt_free(&c);
}

static void array_and_string_lengths(void **state) {
    (void)state;
    static const uint64_t lengths[] = {1ull << 60, UINT64_MAX, UINT64_MAX - 7, 65};
    mx_buf b = header(3, 0, 1);
    put_key(&b, "k.unknown_array", CKPT_ARR);
    put32(&b, 77);
    put64(&b, 1ull << 60);
    refuse_buf(&b, MX_FORMAT, "k.unknown_array: array of unknown element type 77");
    for (size_t i = 0; i < MX_COUNT(lengths); i++) {
        for (uint32_t type = 0; type <= 12; type++) {
            if (type == CKPT_ARR) continue;
            b = header(3, 0, 1);
            put_key(&b, "k.array", CKPT_ARR);
            put32(&b, type);
            put64(&b, lengths[i]);
            mx_buf_add(&b, "0123456789012345678901234567890123456789012345678901234567890123", 64);
            refuse_buf(&b, MX_FORMAT, "k.array: array of");
        }
        b = header(3, 0, 1);
        put_key(&b, "k.string", CKPT_STR);
        put64(&b, lengths[i]);
        mx_buf_puts(&b, "past the end");
        refuse_buf(&b, MX_FORMAT, "k.string: a string of");
        b = header(3, 0, 1);
        put64(&b, lengths[i]);
        mx_buf_puts(&b, "key past the end");
        refuse_buf(&b, MX_FORMAT, "metadata key 0: a string of");
    }
    b = header(3, 0, 1); // the second string of an array runs past the end
    put_key(&b, "k.strings", CKPT_ARR);
    put32(&b, CKPT_STR);
    put64(&b, 2);
    ckpt_put_str(&b, "ok");
    put64(&b, UINT64_MAX);
    refuse_buf(&b, MX_FORMAT, "k.strings: a string of 18446744073709551615 bytes");
}

// ---- Damage: metadata ----

static void metadata_faults(void **state) {
    (void)state;
    mx_buf b = header(3, 0, 1);
    put_key(&b, "k", 13);
    put64(&b, 0);
    refuse_buf(&b, MX_FORMAT, "k: unknown value type 13");
    b = header(3, 0, 1);
    put_key(&b, "k", CKPT_BOOL);
    mx_buf_putc(&b, 2);
    refuse_buf(&b, MX_FORMAT, "k: bool of value 2");
    b = header(3, 0, 1);
    put_key(&b, "k", CKPT_ARR);
    put32(&b, CKPT_BOOL);
    put64(&b, 2);
    mx_buf_add(&b, "\1\377", 2);
    refuse_buf(&b, MX_FORMAT, "k: bool of value 255");
    b = header(3, 0, 1);
    put_key(&b, "k.nested", CKPT_ARR);
    put32(&b, CKPT_ARR);
    put64(&b, 1);
    put32(&b, 4);
    put64(&b, 1);
    put32(&b, 5);
    refuse_buf(&b, MX_UNSUPPORTED, "k.nested: array of arrays");
    b = header(3, 0, 2);
    for (int i = 0; i < 2; i++) {
        put_key(&b, "same.key", CKPT_U32);
        put32(&b, 1);
    }
    refuse_buf(&b, MX_FORMAT, "same.key: defined twice");
    ckpt c;
    ckpt_init(&c);
    ckpt_kv_u32(&c, "split.count", 3);
    ckpt_build_gguf(&c, &b);
    ckpt_free(&c);
    refuse_buf(&b, MX_UNSUPPORTED, "split.count: the file is one of 3 parts");
}

static void key_faults(void **state) {
    (void)state;
    mx_buf b = header(3, 0, 1);
    put_key(&b, "", CKPT_U32);
    put64(&b, 1);
    refuse_buf(&b, MX_FORMAT, "metadata key 0: empty name");
    b = header(3, 0, 1);
    put64(&b, 3);
    mx_buf_add(&b, "a\0b", 3);
    put64(&b, CKPT_U32);
    refuse_buf(&b, MX_FORMAT, "name with NUL");
    b = header(3, 0, 1);
    put_key(&b, "k\xff", CKPT_U32);
    put32(&b, 1);
    refuse_buf(&b, MX_FORMAT, "not UTF-8");
    b = header(3, 0, 1);
    put64(&b, 65536);
    for (int i = 0; i < 65536; i++) mx_buf_putc(&b, 'k');
    put64(&b, CKPT_U32);
    refuse_buf(&b, MX_FORMAT, "name of 65536 bytes");
    b = header(3, 0, 1); // control characters do not reach the terminal
    put_key(&b, "k\x1b[31m", 99);
    put32(&b, 1);
    refuse_buf(&b, MX_FORMAT, "k?[31m: unknown value type");
}

static void vocabulary_arrays_have_their_types(void **state) {
    (void)state;
    static const struct {
        const char *key;
        uint32_t type;
    } rows[] = {{"tokenizer.ggml.scores", 0},
                {"tokenizer.ggml.token_type", 0},
                {"tokenizer.ggml.token_type", CKPT_F32},
                {"tokenizer.ggml.tokens", CKPT_I32},
                {"tokenizer.ggml.merges", 0}};
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        ckpt c;
        mx_buf b;
        ckpt_init(&c);
        ckpt_kv_array(&c, rows[i].key, rows[i].type, "0123", 1, rows[i].type == 0 ? 1 : 4);
        ckpt_build_gguf(&c, &b);
        ckpt_free(&c);
        refuse_buf(&b, MX_FORMAT, rows[i].key);
    }
    mx_buf b = header(3, 0, 1);
    put_key(&b, "tokenizer.ggml.scores", CKPT_F32);
    put32(&b, 0);
    refuse_buf(&b, MX_FORMAT, "tokenizer.ggml.scores: type f32, expected an array");
}

static void alignment_faults(void **state) {
    (void)state;
    static const uint32_t bad[] = {0, 1, 3, 4, 24, 1u << 21, 1u << 30, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        mx_buf b = header(3, 0, 1);
        put_key(&b, "general.alignment", CKPT_U32);
        put32(&b, bad[i]);
        refuse_buf(&b, MX_FORMAT, "general.alignment");
    }
    static const uint32_t types[] = {0, 5, CKPT_F32, 10, CKPT_BOOL};
    for (size_t i = 0; i < MX_COUNT(types); i++) {
        mx_buf b = header(3, 0, 1);
        put_key(&b, "general.alignment", types[i]);
        put64(&b, 1);
        refuse_buf(&b, MX_FORMAT, "general.alignment: type");
    }
    mx_buf b = header(3, 1, 1); // a large one that is allowed
    put_key(&b, "general.alignment", CKPT_U32);
    put32(&b, 4096);
    put_tensor(&b, "t", 1, (uint64_t[]){8}, 0, 0);
    ckpt_pad(&b, 4096);
    put_data(&b, 32);
    mx_err err;
    if (open_bytes(b.data, b.n, &err) != MX_OK) fail_msg("%s", err.msg);
    mx_buf_free(&b);
}

// ---- Damage: tensors ----

static void one_tensor(const char *name, int n_dim, const uint64_t *dim, uint32_t type,
                       uint64_t offset, mx_status want, const char *part) {
    mx_buf b = header(3, 1, 0);
    put_tensor(&b, name, n_dim, dim, type, offset);
    put_data(&b, 64);
    refuse_buf(&b, want, part);
}

static void shape_faults(void **state) {
    (void)state;
    one_tensor("t", 2, (uint64_t[]){1, (1ull << 42) + 1}, 0, 0, MX_FORMAT, "tensor t: needs");
    one_tensor("t", 2, (uint64_t[]){1ull << 32, 1ull << 30}, 0, 0, MX_FORMAT, "overflows");
    one_tensor("t", 4, (uint64_t[]){1ull << 31, 1ull << 31, 1ull << 31, 1}, 0, 0, MX_FORMAT,
               "overflows");
    one_tensor("t", 3, (uint64_t[]){0, 1ull << 40, 1ull << 40}, 0, 0, MX_FORMAT, "overflows");
    one_tensor("t", 1, (uint64_t[]){UINT64_MAX}, 0, 0, MX_FORMAT, "dimension of");
    one_tensor("t", 1, (uint64_t[]){1ull << 63}, 0, 0, MX_FORMAT, "dimension of");
    one_tensor("t", 1, (uint64_t[]){INT64_MAX}, 0, 0, MX_FORMAT, "overflows");
    one_tensor("t", 2, (uint64_t[]){33, 1}, 2, 0, MX_FORMAT, "no whole blocks of Q4_0");
    one_tensor("t", 1, (uint64_t[]){128}, 14, 0, MX_FORMAT, "no whole blocks of Q6_K");
    one_tensor("t", 0, NULL, 12, 0, MX_FORMAT, "no whole blocks of Q4_K");
    static const uint32_t n_dims[] = {5, 9, 1000000, UINT32_MAX};
    for (size_t i = 0; i < MX_COUNT(n_dims); i++) {
        mx_buf b = header(3, 1, 0);
        ckpt_put_str(&b, "many");
        put32(&b, n_dims[i]);
        for (int k = 0; k < 9; k++) put64(&b, 1);
        put64(&b, 0);
        put_data(&b, 64);
        refuse_buf(&b, MX_FORMAT, "tensor many");
    }
}

static void offset_faults(void **state) {
    (void)state;
    static const uint64_t eight[] = {8};
    one_tensor("t", 1, eight, 0, 1, MX_FORMAT, "tensor t: offset 1 is not a multiple");
    one_tensor("t", 1, eight, 0, UINT64_MAX, MX_FORMAT, "not a multiple");
    one_tensor("t", 1, eight, 0, UINT64_MAX - 31, MX_FORMAT, "tensor t: needs 32 bytes at offset");
    one_tensor("t", 1, eight, 0, 64, MX_FORMAT, "tensor t: needs");
    one_tensor("t", 1, eight, 0, 1ull << 63, MX_FORMAT, "tensor t: needs");
    mx_buf b = header(3, 2, 0);
    put_tensor(&b, "a", 1, (uint64_t[]){16}, 0, 0);
    put_tensor(&b, "b", 1, eight, 0, 32);
    put_data(&b, 64);
    refuse_buf(&b, MX_FORMAT, "tensors a and b share bytes");
    b = header(3, 2, 0);
    put_tensor(&b, "a", 1, eight, 0, 0);
    put_tensor(&b, "b", 1, eight, 0, 0);
    put_data(&b, 64);
    refuse_buf(&b, MX_FORMAT, "share bytes");
    b = header(3, 2, 0);
    put_tensor(&b, "same", 1, eight, 0, 0);
    put_tensor(&b, "same", 1, eight, 0, 32);
    put_data(&b, 64);
    refuse_buf(&b, MX_FORMAT, "tensor same: defined twice");
}

static void tensor_name_faults(void **state) {
    (void)state;
    one_tensor("", 1, (uint64_t[]){8}, 0, 0, MX_FORMAT, "tensor 0: empty name");
    char longest[66];
    memset(longest, 'n', sizeof longest);
    longest[65] = 0;
    one_tensor(longest, 1, (uint64_t[]){8}, 0, 0, MX_FORMAT, "name of 65 bytes, at most 64");
    longest[64] = 0;
    mx_buf b = header(3, 1, 0);
    put_tensor(&b, longest, 1, (uint64_t[]){8}, 0, 0);
    put_data(&b, 32);
    mx_err err;
    if (open_bytes(b.data, b.n, &err) != MX_OK) fail_msg("%s", err.msg);
    mx_buf_free(&b);
}

// Data may lie in any order, with gaps between and bytes after it.
static void gaps_and_order_are_free(void **state) {
    (void)state;
    mx_buf b = header(3, 3, 0);
    put_tensor(&b, "late", 1, (uint64_t[]){8}, 0, 96);
    put_tensor(&b, "early", 1, (uint64_t[]){8}, 0, 0);
    put_tensor(&b, "scalar", 0, NULL, 0, 160);
    put_data(&b, 300);
    char *path = write_bytes(b.data, b.n);
    mx_weights w;
    mx_err err = {0};
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    assert_int_equal(mx_weights_find(&w, mx_str_of("scalar"))->n_bytes, 4);
    mx_weights_close(&w);
    mx_free(path);
    mx_buf_free(&b);
}

static void unsupported_types_have_their_names(void **state) {
    (void)state;
    static const struct {
        uint32_t type;
        const char *name;
    } rows[] = {
        {9, "Q8_1"},    {10, "Q2_K"},    {11, "Q3_K"},  {15, "Q8_K"},     {16, "IQ2_XXS"},
        {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"},   {21, "IQ3_S"},
        {22, "IQ2_S"},  {23, "IQ4_XS"},  {29, "IQ1_M"}, {34, "TQ1_0"},    {35, "TQ2_0"},
        {39, "MXFP4"},  {4, "Q4_2"},     {5, "Q4_3"},   {31, "Q4_0_4_4"}, {40, "NVFP4"},
    };
    char part[64];
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        snprintf(part, sizeof part, "tensor blk.0.w: tensor type %s is not supported",
                 rows[i].name);
        one_tensor("blk.0.w", 1, (uint64_t[]){256}, rows[i].type, 0, MX_UNSUPPORTED, part);
    }
    one_tensor("w", 1, (uint64_t[]){256}, 42, 0, MX_UNSUPPORTED, "unknown tensor type 42");
    one_tensor("w", 1, (uint64_t[]){256}, UINT32_MAX, 0, MX_UNSUPPORTED, "unknown tensor type");
}

// ---- The file itself ----

static void headers_of_other_files(void **state) {
    (void)state;
    mx_buf b = header(1, 0, 0);
    refuse_buf(&b, MX_UNSUPPORTED, "GGUF version 1");
    b = header(4, 0, 0);
    refuse_buf(&b, MX_UNSUPPORTED, "GGUF version 4");
    b = header(0, 0, 0);
    refuse_buf(&b, MX_UNSUPPORTED, "GGUF version 0");
    b = header(0x03000000, 0, 0);
    refuse_buf(&b, MX_UNSUPPORTED, "big-endian");
    refuse("", 0, MX_FORMAT, "empty");
    refuse("GGU", 3, MX_FORMAT, "not a GGUF file");
    refuse("ggjt0123456789", 14, MX_FORMAT, "not a GGUF file");
    refuse("version https://git-lfs.github.com/spec/v1", 42, MX_FORMAT, "not a GGUF file");
}

static void things_that_are_no_files(void **state) {
    (void)state;
    mx_weights w;
    mx_err err = {0};
    char *fifo = mx_path_join(folder, "fifo.gguf"), *dir = mx_path_join(folder, "dir.gguf");
    char *loop = mx_path_join(folder, "loop.gguf");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(symlink("loop.gguf", loop), 0);
    assert_int_equal(mx_weights_open(&w, fifo, &err), MX_INVALID);
    assert_non_null(strstr(err.msg, "fifo.gguf: not a regular file"));
    assert_int_equal(mx_weights_open(&w, dir, &err), MX_NOTFOUND);
    assert_int_equal(mx_weights_open(&w, loop, &err), MX_IO);
    assert_int_equal(mx_weights_open(&w, "/no/such/file.gguf", &err), MX_NOTFOUND);
    assert_int_equal(mx_weights_open(&w, "", &err), MX_NOTFOUND);
    mx_free(loop);
    mx_free(dir);
    mx_free(fifo);
}

static void an_unreadable_file_is_denied(void **state) {
    (void)state;
    mx_weights w;
    mx_err err = {0};
    mx_buf b = valid_bytes();
    char *path = write_bytes(b.data, b.n);
    bool root = geteuid() == 0; // who reads every file: become nobody for a moment
    assert_int_equal(chmod(folder, 0755) | chmod(path, 0), 0);
    if (root && seteuid(65534) != 0) {
        print_message("an unreadable file: skipped, root cannot become another user here\n");
    } else {
        assert_int_equal(mx_weights_open(&w, path, &err), MX_DENIED);
        assert_non_null(strstr(err.msg, "m.gguf: Permission denied"));
        if (root) assert_int_equal(seteuid(0), 0);
    }
    assert_int_equal(unlink(path), 0);
    mx_free(path);
    mx_buf_free(&b);
}

static void a_file_that_shrinks_is_noticed(void **state) {
    (void)state;
    mx_buf b = valid_bytes();
    char *path = write_bytes(b.data, b.n);
    mx_weights w;
    mx_err err = {0};
    assert_int_equal(mx_weights_open(&w, path, &err), MX_OK);
    assert_int_equal(mx_weights_check_files(&w, &err), MX_OK);
    assert_int_equal(truncate(path, (off_t)b.n - 1), 0);
    assert_int_equal(mx_weights_check_files(&w, &err), MX_IO);
    assert_non_null(strstr(err.msg, "became shorter"));
    assert_int_equal(unlink(path), 0); // the mapping keeps a removed file
    assert_int_equal(mx_weights_check_files(&w, &err), MX_OK);
    mx_weights_close(&w);
    mx_free(path);
    mx_buf_free(&b);
}

// Single bytes of a valid file changed: whatever the answer, no crash and no wild range.
static void changed_bytes_never_crash(void **state) {
    (void)state;
    mx_buf b = valid_bytes();
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    for (size_t i = 0; i < MX_MIN(b.n, (size_t)700); i++) {
        char old = b.data[i];
        mx_err err;
        b.data[i] = (char)values[i % MX_COUNT(values)];
        char *path = write_bytes(b.data, b.n);
        mx_weights w;
        if (mx_weights_open(&w, path, &err) == MX_OK) {
            for (int32_t k = 0; k < w.n_tensors; k++) {
                const mx_wtensor *t = &w.tensors[k];
                if (!t->n_bytes) continue;
                size_t at = (size_t)((const unsigned char *)t->data - w.files[0].data);
                assert_true(at <= b.n && t->n_bytes <= b.n - at);
            }
            mx_weights_close(&w);
        }
        mx_free(path);
        b.data[i] = old;
    }
    mx_buf_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_valid_file_reads_back),
        cmocka_unit_test(every_scalar_type_is_widened),
        cmocka_unit_test(version_2_and_symlinks_open),
        cmocka_unit_test(huge_counts_allocate_nothing),
        cmocka_unit_test(limits_are_their_own_error),
        cmocka_unit_test(a_file_cut_anywhere_is_refused),
        cmocka_unit_test(truncation_names_tensor_and_bytes),
        cmocka_unit_test(array_and_string_lengths),
        cmocka_unit_test(metadata_faults),
        cmocka_unit_test(key_faults),
        cmocka_unit_test(vocabulary_arrays_have_their_types),
        cmocka_unit_test(alignment_faults),
        cmocka_unit_test(shape_faults),
        cmocka_unit_test(offset_faults),
        cmocka_unit_test(tensor_name_faults),
        cmocka_unit_test(gaps_and_order_are_free),
        cmocka_unit_test(unsupported_types_have_their_names),
        cmocka_unit_test(headers_of_other_files),
        cmocka_unit_test(things_that_are_no_files),
        cmocka_unit_test(an_unreadable_file_is_denied),
        cmocka_unit_test(a_file_that_shrinks_is_noticed),
        cmocka_unit_test(changed_bytes_never_crash),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
