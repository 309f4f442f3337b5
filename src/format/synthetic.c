// Models without a file: geometries of real models with weights that mean nothing, for measuring
// speed where no checkpoint can be had. Fills an mx_weights as if a folder of safetensors had been
// read. Owns the address range that it maps (mx_weights.made). Nothing is written anywhere.
//
// Values are one pattern a kind (matrix, scales, biases, norms) of some MiB of pseudo-random codes,
// mapped again and again until the largest tensor fits; every tensor begins at its own place of the
// range. So a model of 16 GB costs its reader some MiB of memory and no time, while a backend that
// copies what it uploads (each does) holds every tensor in full. Scales are such that the values
// have a standard deviation near 0.02, and activations stay finite.
#include "format/format_int.h"

#include "base/mem.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

typedef enum part { PART_MATRIX, PART_SCALES, PART_BIASES, PART_NORM, PARTS } part;

enum { PAGE = 4096, MAX_PATTERN = 16 << 20, MAX_NAME = 128 };
enum { QK_NORMS = 1, POST_NORMS = 2, TIED = 4, MINUS_ONE = 8 }; // MINUS_ONE: of the norms

typedef struct geometry {
    const char *name, *model_type;
    int32_t n_layer, d_model, d_ff, n_head, n_kv_head, head_dim, n_vocab, max_ctx;
    double theta, eps, rope_factor; // rope_factor 0: no scaling, else llama3's
    int32_t window, flags;
} geometry;

static const geometry geometries[] = {
    {"tiny", "llama", 4, 256, 512, 4, 2, 64, 512, 2048, 1e4, 1e-5, 0, 0, TIED},
    {"tiny-qwen3", "qwen3", 2, 256, 512, 4, 2, 128, 512, 2048, 1e6, 1e-6, 0, 0, QK_NORMS},
    {"launch-heavy", "llama", 45, 256, 256, 4, 1, 64, 1024, 32768, 1e4, 1e-5, 0, 0, TIED},
    {"smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, 0, 0, TIED},
    {"llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, 32, 0, TIED},
    {"llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, 8, 0, 0},
    {"qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, 0, 0,
     QK_NORMS | TIED},
    {"qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, 0, 0, QK_NORMS},
    {"gemma-3-1b", "gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, 32768, 1e6, 1e-6, 0, 512,
     QK_NORMS | POST_NORMS | TIED | MINUS_ONE},
};

// A block format whose bytes are random but for one or two float16 fields.
typedef struct block_rule {
    mx_dtype dtype;
    int16_t scale_at, min_at; // byte of the field in a block; -1: none
    float scale, min;
} block_rule;

static const block_rule block_rules[] = {
    {MX_Q4_0, 0, -1, 4.3e-3f, 0},    {MX_Q4_1, 0, 2, 4.3e-3f, -3.2e-2f},
    {MX_Q5_0, 0, -1, 2.2e-3f, 0},    {MX_Q5_1, 0, 2, 2.2e-3f, -3.4e-2f},
    {MX_Q8_0, 0, -1, 2.7e-4f, 0},    {MX_Q4_K, 0, 2, 1.2e-4f, 9e-4f},
    {MX_Q5_K, 0, 2, 6e-5f, 9.3e-4f}, {MX_Q6_K, 208, -1, 1.5e-5f, 0},
};

typedef struct maker {
    mx_weights *w;
    const geometry *g;
    mx_wfmt fmt;
    size_t unit[PARTS];    // places in the range are multiples of this
    size_t pattern[PARTS]; // bytes
    size_t most[PARTS];    // of the largest tensor
    unsigned char *base[PARTS];
    bool place; // second pass: data pointers are set
    mx_err *err;
} maker;

// ---- Values ------------------------------------------------------------------------------------

static uint64_t next_random(uint64_t *s) {
    *s += 0x9e3779b97f4a7c15ull;
    uint64_t z = (*s ^ (*s >> 30)) * 0xbf58476d1ce4e5b9ull;
    return z ^ (z >> 29);
}

// Float16 bits of x, rounded down; subnormals too. x is a constant of the tables above.
static uint16_t half_bits(float x) {
    uint16_t sign = x < 0 ? 0x8000 : 0;
    float a = x < 0 ? -x : x;
    if (a < 6.103515625e-5f) return (uint16_t)(sign | (uint16_t)(a * 16777216.0f));
    int e = 15;
    for (; a < 1; a *= 2) e--;
    return (uint16_t)(sign | e << 10 | (uint16_t)((a - 1) * 1024));
}

static void set_halfs(unsigned char *p, size_t n, size_t block, int16_t at, float x) {
    if (at < 0) return;
    uint16_t h = half_bits(x);
    for (size_t i = 0; i + block <= n; i += block) memcpy(p + i + at, &h, sizeof h);
}

// Every 16-bit word: sign and mantissa of the noise, exponent from `bits`.
static void shape_words(uint16_t *p, size_t n_bytes, uint16_t keep, uint16_t bits) {
    for (size_t i = 0; i < n_bytes / 2; i++) p[i] = (uint16_t)((p[i] & keep) | bits);
}

// Exponent field of a bfloat16 power of two: 2^e.
static uint16_t bf16_pow2(int e) {
    return (uint16_t)((127 + e) << 7);
}

static void shape_matrix(const maker *m, unsigned char *p, size_t n) {
    switch (m->fmt.dtype) {
    case MX_BF16: shape_words((uint16_t *)(void *)p, n, 0x807f, bf16_pow2(-6)); break;
    case MX_F16: shape_words((uint16_t *)(void *)p, n, 0x83ff, 9 << 10); break;
    case MX_F32:
        for (size_t i = 0; i < n / 4; i++) {
            uint32_t *w = (uint32_t *)(void *)p + i;
            *w = (*w & 0x807fffffu) | 121u << 23;
        }
        break;
    default:
        for (size_t i = 0; i < MX_COUNT(block_rules); i++) {
            const block_rule *r = &block_rules[i];
            if (r->dtype != m->fmt.dtype) continue;
            size_t block = (size_t)mx_dtype_get(r->dtype)->block_bytes;
            set_halfs(p, n, block, r->scale_at, r->scale);
            set_halfs(p, n, block, r->min_at, r->min);
        }
    }
}

// Affine: values of b bits have a deviation of 2^b / 3.5 steps around half the range.
static void shape_part(const maker *m, part k, unsigned char *p, size_t n) {
    int bits = m->fmt.bits;
    uint16_t *w = (uint16_t *)(void *)p;
    switch (k) {
    case PART_MATRIX: shape_matrix(m, p, n); break;
    case PART_SCALES: shape_words(w, n, 0x0007, bf16_pow2(-4 - bits)); break;
    case PART_BIASES: shape_words(w, n, 0x0007, 0x8000 | bf16_pow2(-5)); break;
    case PART_NORM:
        shape_words(w, n, 0x0007, m->g->flags & MINUS_ONE ? bf16_pow2(-7) : bf16_pow2(0));
        break;
    case PARTS: break;
    }
}

static void fill_pattern(const maker *m, part k, unsigned char *p, size_t n) {
    uint64_t s = (uint64_t)k + 1;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t v = next_random(&s);
        memcpy(p + i, &v, 8);
    }
    shape_part(m, k, p, n);
}

// ---- The range ---------------------------------------------------------------------------------

static size_t gcd(size_t a, size_t b) {
    while (b) {
        size_t t = a % b;
        a = b, b = t;
    }
    return a;
}

static void choose_pattern(maker *m, part k) {
    size_t block = 1;
    if (k == PART_MATRIX && m->fmt.dtype != MX_AFFINE) {
        block = (size_t)mx_dtype_get(m->fmt.dtype)->block_bytes;
    }
    m->unit[k] = block / gcd(block, 64) * 64;
    size_t step = m->unit[k] / gcd(m->unit[k], PAGE) * PAGE;
    size_t want = MX_MIN((size_t)MAX_PATTERN, MX_MAX(2 * m->most[k], (size_t)1 << 20));
    m->pattern[k] = (want / step | 1) * step; // an odd count: rows repeat late
}

static size_t range_of(const maker *m, part k) {
    return m->most[k] ? (m->most[k] / m->pattern[k] + 2) * m->pattern[k] : 0;
}

// Maps one pattern over its whole range.
static mx_status map_part(maker *m, part k, unsigned char *at) {
    size_t n = range_of(m, k), pattern = m->pattern[k];
    m->base[k] = at;
    if (n == 0) return MX_OK;
    int fd = memfd_create("mlxcel-synthetic", MFD_CLOEXEC);
    bool ok = fd >= 0 && ftruncate(fd, (off_t)pattern) == 0;
    for (size_t i = 0; ok && i < n; i += pattern) {
        int prot = i == 0 ? PROT_READ | PROT_WRITE : PROT_READ;
        ok = mmap(at + i, pattern, prot, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
    }
    if (ok) fill_pattern(m, k, at, pattern);
    if (fd >= 0) close(fd);
    if (ok) return MX_OK;
    return mx_err_set(m->err, MX_NOMEM, "%s: %zu bytes of pattern could not be mapped", m->w->path,
                      pattern);
}

static mx_status map_all(maker *m) {
    size_t total = 0;
    for (int k = 0; k < PARTS; k++) {
        choose_pattern(m, (part)k);
        total += range_of(m, (part)k);
    }
    void *p = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        return mx_err_set(m->err, MX_NOMEM, "%s: %zu bytes of addresses", m->w->path, total);
    }
    m->w->made = p;
    m->w->made_bytes = total;
    unsigned char *at = p;
    for (int k = 0; k < PARTS; k++) {
        MX_TRY(map_part(m, (part)k, at));
        at += range_of(m, (part)k);
    }
    return MX_OK;
}

void synthetic_unmap(mx_weights *w) {
    if (w->made) munmap(w->made, w->made_bytes);
    w->made = NULL;
}

// ---- Tensors -----------------------------------------------------------------------------------

static mx_status add(maker *m, part k, const char *name, mx_dtype t, int64_t rows, int64_t cols) {
    mx_wtensor x = {.dtype = t, .n_dim = cols ? 2 : 1, .dim = {rows, cols}, .file = -1};
    if (!weights_shape_bytes(t, x.dim, x.n_dim, &x.n_bytes)) {
        return mx_err_set(m->err, MX_UNSUPPORTED,
                          "%s: rows of %lld do not divide into blocks of %s", m->w->path,
                          (long long)(cols ? cols : rows), mx_dtype_get(t)->name);
    }
    if (!m->place) {
        m->most[k] = MX_MAX(m->most[k], x.n_bytes);
        return MX_OK;
    }
    size_t n_places = m->pattern[k] / m->unit[k];
    size_t place = (size_t)(mx_hash64(name, strlen(name), 1) % n_places);
    x.data = m->base[k] + place * m->unit[k];
    x.name = mx_str_of(mx_arena_strndup(&m->w->arena, name, strlen(name)));
    return weights_add(m->w, &x, m->err);
}

static mx_status add_norm(maker *m, const char *base, int64_t n) {
    char name[MAX_NAME + 16];
    snprintf(name, sizeof name, "%s.weight", base);
    return add(m, PART_NORM, name, MX_BF16, n, 0);
}

static mx_status add_matrix(maker *m, const char *base, int64_t rows, int64_t cols) {
    char name[MAX_NAME + 16];
    snprintf(name, sizeof name, "%s.weight", base);
    mx_wfmt f = m->fmt;
    if (f.dtype != MX_AFFINE) return add(m, PART_MATRIX, name, f.dtype, rows, cols);
    if (cols % f.group != 0) {
        return mx_err_set(m->err, MX_UNSUPPORTED,
                          "%s: rows of %lld do not divide into groups of %d", m->w->path,
                          (long long)cols, f.group);
    }
    MX_TRY(add(m, PART_MATRIX, name, MX_U32, rows, cols * f.bits / 32));
    snprintf(name, sizeof name, "%s.scales", base);
    MX_TRY(add(m, PART_SCALES, name, MX_BF16, rows, cols / f.group));
    snprintf(name, sizeof name, "%s.biases", base);
    return add(m, PART_BIASES, name, MX_BF16, rows, cols / f.group);
}

static mx_status add_layer(maker *m, int32_t il) {
    const geometry *g = m->g;
    int64_t d = g->d_model, q = (int64_t)g->n_head * g->head_dim,
            kv = (int64_t)g->n_kv_head * g->head_dim;
    const struct {
        const char *name;
        int64_t rows, cols; // cols 0: a norm
        int32_t flag;       // 0: always there
    } rows[] = {
        {"input_layernorm", d, 0, 0},
        {"self_attn.q_proj", q, d, 0},
        {"self_attn.k_proj", kv, d, 0},
        {"self_attn.v_proj", kv, d, 0},
        {"self_attn.o_proj", d, q, 0},
        {"self_attn.q_norm", g->head_dim, 0, QK_NORMS},
        {"self_attn.k_norm", g->head_dim, 0, QK_NORMS},
        {"post_attention_layernorm", d, 0, 0},
        {"pre_feedforward_layernorm", d, 0, POST_NORMS},
        {"mlp.gate_proj", g->d_ff, d, 0},
        {"mlp.up_proj", g->d_ff, d, 0},
        {"mlp.down_proj", d, g->d_ff, 0},
        {"post_feedforward_layernorm", d, 0, POST_NORMS},
    };
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        if ((rows[i].flag & g->flags) != rows[i].flag) continue;
        char base[MAX_NAME];
        snprintf(base, sizeof base, "model.layers.%d.%s", il, rows[i].name);
        if (rows[i].cols)
            MX_TRY(add_matrix(m, base, rows[i].rows, rows[i].cols));
        else
            MX_TRY(add_norm(m, base, rows[i].rows));
    }
    return MX_OK;
}

static mx_status add_all(maker *m) {
    const geometry *g = m->g;
    MX_TRY(add_matrix(m, "model.embed_tokens", g->n_vocab, g->d_model));
    for (int32_t il = 0; il < g->n_layer; il++) MX_TRY(add_layer(m, il));
    MX_TRY(add_norm(m, "model.norm", g->d_model));
    return g->flags & TIED ? MX_OK : add_matrix(m, "lm_head", g->n_vocab, g->d_model);
}

// ---- Name and config ---------------------------------------------------------------------------

static json_t *make_config(const geometry *g, mx_wfmt f) {
    json_t *c = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:b}", "model_type", g->model_type,
        "num_hidden_layers", g->n_layer, "hidden_size", g->d_model, "intermediate_size", g->d_ff,
        "num_attention_heads", g->n_head, "num_key_value_heads", g->n_kv_head, "head_dim",
        g->head_dim, "vocab_size", g->n_vocab, "max_position_embeddings", g->max_ctx, "rope_theta",
        g->theta, "rms_norm_eps", g->eps, "tie_word_embeddings", (g->flags & TIED) != 0);
    CHECK(c != NULL);
    if (g->rope_factor > 0) {
        json_object_set_new(c, "rope_scaling",
                            json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3", "factor",
                                      g->rope_factor, "low_freq_factor", 1.0, "high_freq_factor",
                                      4.0, "original_max_position_embeddings", 8192));
    }
    if (g->window) json_object_set_new(c, "sliding_window", json_integer(g->window));
    if (f.dtype == MX_AFFINE) {
        json_object_set_new(c, "quantization",
                            json_pack("{s:i, s:i}", "bits", f.bits, "group_size", f.group));
    }
    return c;
}

// "bf16", "q4_1", "affine4" (groups of 64), "affine8g32".
static bool parse_format(mx_str s, mx_wfmt *out) {
    char text[32];
    if (s.n >= sizeof text) return false;
    memcpy(text, s.p, s.n);
    text[s.n] = 0;
    int bits, group = 64, used = 0;
    if (sscanf(text, "affine%1d%n", &bits, &used) == 1) {
        int more = 0;
        if (text[used] && (sscanf(text + used, "g%3d%n", &group, &more) != 1)) return false;
        *out = (mx_wfmt){.dtype = MX_AFFINE,
                         .bits = (uint8_t)bits,
                         .group = (uint16_t)group,
                         .scale_dtype = MX_BF16};
        return text[used + more] == 0 && bits >= 2 && bits <= 8 && bits != 7 &&
               (group == 32 || group == 64 || group == 128);
    }
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        bool block = false;
        for (size_t i = 0; i < MX_COUNT(block_rules); i++) block |= (int)block_rules[i].dtype == t;
        if (!block && !mx_dtype_is_float((mx_dtype)t)) continue;
        *out = mx_wfmt_of((mx_dtype)t);
        if (mx_str_is(s, mx_dtype_get((mx_dtype)t)->name)) return true;
    }
    return false;
}

static mx_status parse_name(maker *m, mx_str name) {
    size_t cut = name.n;
    while (cut > 0 && name.p[cut - 1] != '-') cut--;
    mx_str geo = {name.p, cut ? cut - 1 : 0}, fmt = {name.p + cut, name.n - cut};
    for (size_t i = 0; i < MX_COUNT(geometries); i++) {
        if (mx_str_is(geo, geometries[i].name)) m->g = &geometries[i];
    }
    if (m->g && parse_format(fmt, &m->fmt)) return MX_OK;
    mx_buf b;
    mx_buf_init(&b, 0);
    for (size_t i = 0; i < MX_COUNT(geometries); i++) {
        mx_buf_printf(&b, "%s%s", i ? ", " : "", geometries[i].name);
    }
    mx_err_set(m->err, MX_NOTFOUND,
               "%s: expected synthetic:GEOMETRY-FORMAT, geometries %s; formats bf16, f16, f32, "
               "affine2 to affine8 (also affine4g32, ...), q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, "
               "q5_k, q6_k",
               m->w->path, b.data);
    mx_buf_free(&b);
    return MX_NOTFOUND;
}

mx_status synthetic_open(mx_weights *w, mx_str name, mx_err *err) {
    maker m = {.w = w, .err = err};
    MX_TRY(parse_name(&m, name));
    w->container = MX_CONTAINER_SAFETENSORS;
    w->config = make_config(m.g, m.fmt);
    MX_TRY(add_all(&m));
    MX_TRY(map_all(&m));
    m.place = true;
    return add_all(&m);
}
