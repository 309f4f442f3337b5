// The scalar oracle: what every weight format means, one row at a time, and simple quantisers.
// No state. Not fast, and not meant to be: kernels are compared with it.
//
// The float32 value of a weight is computed in the order of the drawings below, each operation
// rounded to float32. In the GGUF formats and in affine with 16-bit scales every product is exact
// (at most 24 significant bits), so a fused multiply-add gives the same value.
//
// Blocks, little-endian, d and m are float16; c[i] is the code of element i:
//   q4_0  d qs[16]              low nibbles are elements 0..15, high 16..31; d * (c - 8)
//   q4_1  d m qs[16]            d * c + m
//   q5_0  d qh[4] qs[16]        bit i of qh is bit 4 of c[i]; d * (c - 16)
//   q5_1  d m qh[4] qs[16]      d * c + m
//   q8_0  d qs[32]              int8; d * c
//   q4_k  d m sc[12] qs[128]    8 sub-blocks of 32; (d * scale) * c - (m * min); each 32 bytes of
//                               qs hold two sub-blocks: low nibbles, then high nibbles
//   q5_k  d m sc[12] qh[32] qs[128]  as q4_k; bit s of qh[i] is bit 4 of element i of sub-block s
//   q6_k  ql[128] qh[64] sc[16] d    16 sub-blocks of 16, int8 scales; (d * scale) * (c - 32)
// The 12 bytes sc of q4_k and q5_k hold eight 6-bit scales and eight 6-bit mins:
//   byte 0..3   scale 0..3 in bits 0-5, bits 4-5 of scale 4..7 in bits 6-7
//   byte 4..7   min 0..3 in bits 0-5,   bits 4-5 of min 4..7 in bits 6-7
//   byte 8..11  bits 0-3 of scale 4..7 in bits 0-3, bits 0-3 of min 4..7 in bits 4-7
// affine: codes are one little-endian bit stream a row; scale * c + bias, one of each a group.
#include "tensor/half.h"
#include "tensor/tensor.h"

#include <math.h>

enum { K_BLOCK = 256, K_SCALES = 12 };

static uint16_t load_u16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_f16(const uint8_t *p) {
    return mx_f16_to_f32(load_u16(p));
}

static void store_u16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

// Stores d as float16 and returns the value that a reader will see.
static float store_f16(uint8_t *p, float d) {
    uint16_t h = mx_f32_to_f16(d);
    store_u16(p, h);
    return mx_f16_to_f32(h);
}

// The i-th value of a plain float array.
static float load_float(mx_dtype t, const uint8_t *p, int64_t i) {
    uint32_t u;
    if (t == MX_F16) return load_f16(p + 2 * i);
    if (t == MX_BF16) return mx_bf16_to_f32(load_u16(p + 2 * i));
    memcpy(&u, p + 4 * i, 4);
    return mx_f32_from_bits(u);
}

static float store_float(mx_dtype t, uint8_t *p, int64_t i, float x) {
    if (t == MX_F16) return store_f16(p + 2 * i, x);
    if (t == MX_BF16) {
        uint16_t h = mx_f32_to_bf16(x);
        store_u16(p + 2 * i, h);
        return mx_bf16_to_f32(h);
    }
    memcpy(p + 4 * i, &x, 4);
    return x;
}

static int nibble(const uint8_t *qs, int i) {
    return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
}

static int bit_of(const uint8_t *p, int i) {
    return p[i / 8] >> (i % 8) & 1;
}

static void dequant_q4_0(const uint8_t *b, float *out) {
    float d = load_f16(b);
    for (int i = 0; i < 32; i++) out[i] = d * (float)(nibble(b + 2, i) - 8);
}

static void dequant_q4_1(const uint8_t *b, float *out) {
    float d = load_f16(b), m = load_f16(b + 2);
    for (int i = 0; i < 32; i++) out[i] = d * (float)nibble(b + 4, i) + m;
}

static void dequant_q5_0(const uint8_t *b, float *out) {
    float d = load_f16(b);
    for (int i = 0; i < 32; i++) {
        out[i] = d * (float)((nibble(b + 6, i) | bit_of(b + 2, i) << 4) - 16);
    }
}

static void dequant_q5_1(const uint8_t *b, float *out) {
    float d = load_f16(b), m = load_f16(b + 2);
    for (int i = 0; i < 32; i++) {
        out[i] = d * (float)(nibble(b + 8, i) | bit_of(b + 4, i) << 4) + m;
    }
}

static void dequant_q8_0(const uint8_t *b, float *out) {
    float d = load_f16(b);
    for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)b[2 + i];
}

static void unpack_k_scale(const uint8_t *sc, int s, int *scale, int *min) {
    if (s < 4) {
        *scale = sc[s] & 63;
        *min = sc[s + 4] & 63;
    } else {
        *scale = (sc[s + 4] & 15) | (sc[s - 4] >> 6) << 4;
        *min = sc[s + 4] >> 4 | (sc[s] >> 6) << 4;
    }
}

static void pack_k_scale(uint8_t *sc, int s, int scale, int min) {
    if (s < 4) {
        sc[s] = (uint8_t)((sc[s] & 0xc0) | scale);
        sc[s + 4] = (uint8_t)((sc[s + 4] & 0xc0) | min);
    } else {
        sc[s + 4] = (uint8_t)((scale & 15) | (min & 15) << 4);
        sc[s - 4] = (uint8_t)((sc[s - 4] & 63) | (scale >> 4) << 6);
        sc[s] = (uint8_t)((sc[s] & 63) | (min >> 4) << 6);
    }
}

// q4_k (qh NULL) and q5_k
static void dequant_k45(const uint8_t *b, const uint8_t *qh, const uint8_t *qs, float *out) {
    float d = load_f16(b), m = load_f16(b + 2);
    for (int s = 0; s < 8; s++) {
        int scale, min;
        unpack_k_scale(b + 4, s, &scale, &min);
        float ds = d * (float)scale, ms = m * (float)min;
        for (int i = 0; i < 32; i++) {
            int c = qs[s / 2 * 32 + i] >> (s % 2 * 4) & 15;
            if (qh) c |= (qh[i] >> s & 1) << 4;
            out[s * 32 + i] = ds * (float)c - ms;
        }
    }
}

static void dequant_q4_k(const uint8_t *b, float *out) {
    dequant_k45(b, NULL, b + 4 + K_SCALES, out);
}

static void dequant_q5_k(const uint8_t *b, float *out) {
    dequant_k45(b, b + 4 + K_SCALES, b + 4 + K_SCALES + 32, out);
}

// Where element i of a q6_k block keeps its low nibble and its two high bits: each half of 128
// elements uses 64 bytes of ql (elements 0..63 low nibbles, 64..127 high) and 32 bytes of qh
// (two bits for each of the four runs of 32).
static void q6_k_place(int i, int *ql, int *ql_shift, int *qh, int *qh_shift) {
    int half = i / 128, r = i % 128;
    *ql = half * 64 + r % 64;
    *ql_shift = r / 64 * 4;
    *qh = half * 32 + r % 32;
    *qh_shift = r / 32 * 2;
}

static void dequant_q6_k(const uint8_t *b, float *out) {
    const uint8_t *ql = b, *qh = b + 128, *sc = b + 192;
    float d = load_f16(b + 208);
    for (int i = 0; i < K_BLOCK; i++) {
        int l, ls, h, hs;
        q6_k_place(i, &l, &ls, &h, &hs);
        int c = (ql[l] >> ls & 15) | (qh[h] >> hs & 3) << 4;
        out[i] = d * (float)(int8_t)sc[i / 16] * (float)(c - 32);
    }
}

typedef void (*dequant_block_fn)(const uint8_t *block, float *out);

static dequant_block_fn dequant_block_of(mx_dtype t) {
    switch (t) {
    case MX_Q4_0: return dequant_q4_0;
    case MX_Q4_1: return dequant_q4_1;
    case MX_Q5_0: return dequant_q5_0;
    case MX_Q5_1: return dequant_q5_1;
    case MX_Q8_0: return dequant_q8_0;
    case MX_Q4_K: return dequant_q4_k;
    case MX_Q5_K: return dequant_q5_k;
    case MX_Q6_K: return dequant_q6_k;
    default: return NULL;
    }
}

// Code i of a stream of bits-wide codes; reads only the bytes that hold it.
static int stream_code(const uint8_t *p, int64_t i, int bits) {
    size_t at = (size_t)i * (size_t)bits;
    int shift = (int)(at % 8), v = p[at / 8] >> shift;
    if (shift + bits > 8) v |= p[at / 8 + 1] << (8 - shift);
    return v & ((1 << bits) - 1);
}

static void put_stream_code(uint8_t *p, int64_t i, int bits, int code) {
    size_t at = (size_t)i * (size_t)bits;
    int shift = (int)(at % 8), mask = ((1 << bits) - 1) << shift, v = code << shift;
    p[at / 8] = (uint8_t)((p[at / 8] & ~mask) | (v & 255));
    if (shift + bits > 8) p[at / 8 + 1] = (uint8_t)((p[at / 8 + 1] & ~(mask >> 8)) | v >> 8);
}

static void dequant_affine(const mx_wview *r, float *out) {
    mx_wfmt f = r->fmt;
    for (int64_t i = 0; i < r->n_cols; i++) {
        float s = load_float(f.scale_dtype, r->scales, i / f.group);
        float b = load_float(f.scale_dtype, r->biases, i / f.group);
        out[i] = s * (float)stream_code(r->data, i, f.bits) + b;
    }
}

void mx_dequant_row(const mx_wview *w, int64_t row, float *out) {
    mx_wview r = mx_wview_rows(w, row, 1);
    const mx_dtype_info *d = mx_dtype_get(r.fmt.dtype);
    if (r.fmt.dtype == MX_AFFINE) {
        dequant_affine(&r, out);
        return;
    }
    if (mx_dtype_is_float(r.fmt.dtype)) {
        for (int64_t i = 0; i < r.n_cols; i++) out[i] = load_float(r.fmt.dtype, r.data, i);
        return;
    }
    dequant_block_fn fn = dequant_block_of(r.fmt.dtype);
    CHECKF(fn != NULL, "%s is not a weight format", d->name);
    const uint8_t *p = r.data;
    for (int64_t i = 0; i < r.n_cols; i += d->block_elems, p += d->block_bytes) fn(p, out + i);
}

// ---- Quantisers ----

// x rounded to the nearest integer in [lo, hi]; NaN gives lo.
static int round_code(float x, int lo, int hi) {
    if (!(x > (float)lo)) return lo;
    return x >= (float)hi ? hi : (int)lrintf(x);
}

static float ratio(float a, float b) {
    return b != 0 ? a / b : 0;
}

static void min_max(const float *x, int n, float *lo, float *hi) {
    *lo = *hi = x[0];
    for (int i = 1; i < n; i++) {
        if (x[i] < *lo) *lo = x[i];
        if (x[i] > *hi) *hi = x[i];
    }
}

// The value of the largest magnitude, with its sign.
static float signed_max(const float *x, int n) {
    float best = 0;
    for (int i = 0; i < n; i++) {
        if (fabsf(x[i]) > fabsf(best)) best = x[i];
    }
    return best;
}

static void put_nibble(uint8_t *qs, int i, int c) {
    uint8_t *p = &qs[i % 16];
    *p = (uint8_t)(i < 16 ? (*p & 0xf0) | (c & 15) : (*p & 15) | (c & 15) << 4);
}

static void put_codes_45(uint8_t *qh, uint8_t *qs, int i, int c) {
    put_nibble(qs, i, c);
    if (qh && c & 16) qh[i / 8] = (uint8_t)(qh[i / 8] | 1 << (i % 8));
}

// q4_0, q5_0: the largest magnitude becomes code 0, so the scale may be negative.
static void quant_symmetric(const float *x, int bits, uint8_t *b) {
    uint8_t *qh = bits == 5 ? b + 2 : NULL, *qs = b + (bits == 5 ? 6 : 2);
    int half = 1 << (bits - 1);
    float d = store_f16(b, signed_max(x, 32) / (float)-half);
    if (qh) memset(qh, 0, 4);
    for (int i = 0; i < 32; i++) {
        put_codes_45(qh, qs, i, round_code(ratio(x[i], d) + (float)half, 0, 2 * half - 1));
    }
}

// q4_1, q5_1
static void quant_min_max(const float *x, int bits, uint8_t *b) {
    uint8_t *qh = bits == 5 ? b + 4 : NULL, *qs = b + (bits == 5 ? 8 : 4);
    float lo, hi;
    min_max(x, 32, &lo, &hi);
    float m = store_f16(b + 2, lo);
    float d = store_f16(b, (hi - lo) / (float)((1 << bits) - 1));
    if (qh) memset(qh, 0, 4);
    for (int i = 0; i < 32; i++) {
        put_codes_45(qh, qs, i, round_code(ratio(x[i] - m, d), 0, (1 << bits) - 1));
    }
}

static void quant_q8_0(const float *x, uint8_t *b) {
    float d = store_f16(b, fabsf(signed_max(x, 32)) / 127);
    for (int i = 0; i < 32; i++) b[2 + i] = (uint8_t)round_code(ratio(x[i], d), -127, 127);
}

// q4_k, q5_k: min/max of every sub-block, then one scale of the scales and one of the mins.
static void quant_k45(const float *x, int bits, uint8_t *b) {
    int top = (1 << bits) - 1;
    uint8_t *sc = b + 4, *qh = bits == 5 ? sc + K_SCALES : NULL;
    uint8_t *qs = sc + K_SCALES + (bits == 5 ? 32 : 0);
    float scale[8], min[8], max_scale = 0, max_min = 0;
    for (int s = 0; s < 8; s++) {
        float lo, hi;
        min_max(x + 32 * s, 32, &lo, &hi);
        if (lo > 0) lo = 0;
        scale[s] = (hi > lo ? hi - lo : 0) / (float)top;
        min[s] = -lo;
        if (scale[s] > max_scale) max_scale = scale[s];
        if (min[s] > max_min) max_min = min[s];
    }
    float d = store_f16(b, max_scale / 63), m = store_f16(b + 2, max_min / 63);
    memset(sc, 0, (size_t)(b + (bits == 5 ? 176 : 144) - sc));
    for (int s = 0; s < 8; s++) {
        int ds = round_code(ratio(scale[s], d), 0, 63), ms = round_code(ratio(min[s], m), 0, 63);
        pack_k_scale(sc, s, ds, ms);
        for (int i = 0; i < 32; i++) {
            float v = x[s * 32 + i] + m * (float)ms;
            int c = round_code(ratio(v, d * (float)ds), 0, top);
            uint8_t *q = &qs[s / 2 * 32 + i];
            *q = (uint8_t)(*q | (c & 15) << (s % 2 * 4));
            if (qh) qh[i] = (uint8_t)(qh[i] | c >> 4 << s);
        }
    }
}

static void quant_q6_k(const float *x, uint8_t *b) {
    float scale[16];
    for (int s = 0; s < 16; s++) scale[s] = signed_max(x + 16 * s, 16) / -32;
    float d = store_f16(b + 208, signed_max(scale, 16) / -128);
    memset(b, 0, 192);
    for (int s = 0; s < 16; s++) {
        b[192 + s] = (uint8_t)round_code(ratio(scale[s], d), -128, 127);
    }
    for (int i = 0; i < K_BLOCK; i++) {
        int l, ls, h, hs;
        q6_k_place(i, &l, &ls, &h, &hs);
        float ds = d * (float)(int8_t)b[192 + i / 16];
        int c = round_code(ratio(x[i], ds) + 32, 0, 63);
        b[l] = (uint8_t)(b[l] | (c & 15) << ls);
        b[128 + h] = (uint8_t)(b[128 + h] | c >> 4 << hs);
    }
}

static void quant_block(mx_dtype t, const float *x, uint8_t *b) {
    switch (t) {
    case MX_Q4_0: quant_symmetric(x, 4, b); break;
    case MX_Q5_0: quant_symmetric(x, 5, b); break;
    case MX_Q4_1: quant_min_max(x, 4, b); break;
    case MX_Q5_1: quant_min_max(x, 5, b); break;
    case MX_Q8_0: quant_q8_0(x, b); break;
    case MX_Q4_K: quant_k45(x, 4, b); break;
    case MX_Q5_K: quant_k45(x, 5, b); break;
    case MX_Q6_K: quant_q6_k(x, b); break;
    default: CHECKF(false, "%s has no quantiser", mx_dtype_get(t)->name);
    }
}

void mx_quant_row(mx_dtype t, const float *x, int64_t n, void *out) {
    const mx_dtype_info *d = mx_dtype_get(t);
    CHECKF(n >= 0 && n % d->block_elems == 0, "%lld elements of %s", (long long)n, d->name);
    uint8_t *p = out;
    if (mx_dtype_is_float(t)) {
        for (int64_t i = 0; i < n; i++) store_float(t, p, i, x[i]);
        return;
    }
    for (int64_t i = 0; i < n; i += d->block_elems, p += d->block_bytes) quant_block(t, x + i, p);
}

// One group: the edge of the larger magnitude is hit exactly; the scale is negative when that is
// the maximum. Codes are chosen with the unrounded scale and bias.
static void affine_rule(const float *x, int n, int top, float *scale, float *bias) {
    float lo, hi;
    min_max(x, n, &lo, &hi);
    float s = fmaxf((hi - lo) / (float)top, 1e-7f), edge = lo;
    if (!(fabsf(lo) > fabsf(hi))) {
        s = -s;
        edge = hi;
    }
    float q0 = rintf(edge / s);
    *bias = 0;
    if (q0 != 0) {
        s = edge / q0;
        *bias = edge;
    }
    *scale = s;
}

void mx_quant_row_affine(mx_wfmt f, const float *x, int64_t n, void *codes, void *scales,
                         void *biases) {
    size_t bytes;
    CHECK(f.dtype == MX_AFFINE && mx_wfmt_code_bytes(f, n, &bytes));
    int top = (1 << f.bits) - 1;
    for (int64_t g = 0; g < n / f.group; g++) {
        const float *xg = x + g * f.group;
        float s, b;
        affine_rule(xg, f.group, top, &s, &b);
        for (int64_t i = 0; i < f.group; i++) {
            int c = round_code((xg[i] - b) / s, 0, top);
            put_stream_code(codes, g * f.group + i, f.bits, c);
        }
        store_float(f.scale_dtype, scales, g, s);
        store_float(f.scale_dtype, biases, g, b);
    }
}
