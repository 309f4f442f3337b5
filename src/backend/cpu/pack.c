// Packs weights into the tiles that the CPU kernels read, and reads rows back out of them.
// Owns nothing. Knows no instruction set: packing runs once per load and works on 4 codes a word.
//
// Every format is first brought to the same intermediate, 32 codes of a row as 8 words (the code of
// column 4j + i is byte i of word j), and then laid into the planes of a unit (see pack.h).
#include "backend/cpu/pack.h"

#include "base/mem.h"
#include "tensor/half.h"

#include <string.h>

enum { UNIT_WORDS = CPU_UNIT / 4, K_UNITS = 8, K_HEAD = 256, K6_HEAD = 64 + 256 };

static const uint32_t LOW_NIBBLES = 0x0f0f0f0fu, LOW_PAIRS = 0x03030303u, LOW_BITS = 0x01010101u;

static uint32_t load_u32(const uint8_t *p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

static void store_u32(uint8_t *p, uint32_t u) {
    memcpy(p, &u, 4);
}

static float load_scale(mx_dtype t, const uint8_t *p, int64_t i) {
    uint16_t h;
    if (t == MX_F32) return mx_f32_from_bits(load_u32(p + 4 * i));
    memcpy(&h, p + 2 * i, 2);
    return t == MX_F16 ? mx_f16_to_f32(h) : mx_bf16_to_f32(h);
}

// ---- Layout -----------------------------------------------------------------------------------

static size_t unit_bytes(int bits) {
    return (size_t)bits * CPU_VEC;
}

static size_t type_bytes(mx_dtype t) {
    return t == MX_F32 ? 4 : 2;
}

static bool finish_packing(cpu_packing *p) {
    if (p->family == CPU_FAM_FLOAT) {
        p->group_bytes = CPU_TILE_ROWS * type_bytes(p->scale_dtype);
        return true;
    }
    size_t row = CPU_TILE_ROWS * type_bytes(p->scale_dtype);
    switch (p->family) {
    case CPU_FAM_SYM: // two groups
        p->head_bytes = CPU_VEC;
        p->group_bytes = CPU_VEC + 2 * unit_bytes(p->bits);
        return true;
    case CPU_FAM_ASYM: p->head_bytes = 2 * row; break;
    case CPU_FAM_K45: p->head_bytes = K_HEAD; break;
    default: p->head_bytes = K6_HEAD; break;
    }
    p->group_bytes = p->head_bytes + (size_t)p->group_units * unit_bytes(p->bits);
    return true;
}

static bool set_coded(cpu_packing *p, cpu_family family, int bits, int units) {
    *p = (cpu_packing){.family = family, .bits = bits, .group_units = units, .act_units = 1};
    p->scale_dtype = MX_F16;
    return finish_packing(p);
}

static bool set_affine(cpu_packing *p, mx_wfmt f) {
    bool bits_ok = f.bits >= 2 && f.bits <= 8 && f.bits != 7;
    bool group_ok = f.group == 32 || f.group == 64 || f.group == 128;
    if (!bits_ok || !group_ok || !mx_dtype_is_float(f.scale_dtype)) return false;
    *p = (cpu_packing){.family = CPU_FAM_ASYM, .bits = f.bits, .group_units = f.group / CPU_UNIT};
    p->act_units = f.group == 32 ? 1 : 2;
    p->scale_dtype = f.scale_dtype;
    return finish_packing(p);
}

bool cpu_packing_of(mx_wfmt f, cpu_packing *out) {
    switch (f.dtype) {
    case MX_F32:
    case MX_F16:
    case MX_BF16:
        *out = (cpu_packing){.family = CPU_FAM_FLOAT, .scale_dtype = f.dtype};
        return finish_packing(out);
    case MX_Q4_0: return set_coded(out, CPU_FAM_SYM, 4, 1);
    case MX_Q5_0: return set_coded(out, CPU_FAM_SYM, 5, 1);
    case MX_Q8_0: return set_coded(out, CPU_FAM_SYM, 8, 1);
    case MX_Q4_1: return set_coded(out, CPU_FAM_ASYM, 4, 1);
    case MX_Q5_1: return set_coded(out, CPU_FAM_ASYM, 5, 1);
    case MX_Q4_K: return set_coded(out, CPU_FAM_K45, 4, K_UNITS);
    case MX_Q5_K: return set_coded(out, CPU_FAM_K45, 5, K_UNITS);
    case MX_Q6_K: return set_coded(out, CPU_FAM_K6, 6, K_UNITS);
    case MX_AFFINE: return set_affine(out, f);
    default: return false;
    }
}

int64_t cpu_packing_groups(const cpu_packing *p, int64_t n_cols) {
    return p->family == CPU_FAM_FLOAT ? n_cols : n_cols / (CPU_UNIT * p->group_units);
}

size_t cpu_tile_bytes(const cpu_packing *p, int64_t n_cols) {
    int64_t n_groups = cpu_packing_groups(p, n_cols);
    size_t n = (size_t)n_groups * p->group_bytes;
    if (p->family == CPU_FAM_SYM) {
        n = (size_t)(n_groups / 2) * p->group_bytes;
        if (n_groups % 2) n += CPU_VEC + unit_bytes(p->bits);
    }
    return (n + CPU_VEC - 1) & ~(size_t)(CPU_VEC - 1);
}

size_t cpu_pack_bytes(mx_wfmt f, int64_t n_rows, int64_t n_cols, bool exact, uint16_t *pack) {
    cpu_packing p;
    size_t row, total;
    *pack = 0;
    if (n_rows <= 0 || n_cols <= 0 || !cpu_packing_of(f, &p)) return 0;
    if (!mx_wfmt_row_bytes(f, n_cols, &row)) return 0;
    int64_t n_tiles = n_rows / CPU_TILE_ROWS + (n_rows % CPU_TILE_ROWS != 0);
    if (!mx_mul_size((size_t)n_tiles, cpu_tile_bytes(&p, n_cols), &total)) return 0;
    *pack = exact && p.family != CPU_FAM_FLOAT ? CPU_PACK_EXACT : 0;
    return total;
}

cpu_act_kind cpu_act_kind_of(const mx_tensor *w) {
    cpu_packing p;
    CHECKF(cpu_packing_of(w->fmt, &p), "a weight format without packing");
    if (p.family == CPU_FAM_FLOAT || (w->pack & CPU_PACK_EXACT)) return CPU_ACT_F32;
    return p.act_units == 2 ? CPU_ACT_Q64 : CPU_ACT_Q32;
}

size_t cpu_act_bytes(cpu_act_kind kind, int64_t n_cols, int64_t n_tok) {
    if (kind == CPU_ACT_F32) { // kernels may read up to a multiple of four rows
        return (size_t)((n_tok + 3) & ~(int64_t)3) * (size_t)cpu_act_row(n_cols) * sizeof(float);
    }
    int64_t blocks = (n_tok + CPU_ACT_BLOCK - 1) / CPU_ACT_BLOCK;
    return (size_t)blocks * cpu_act_block(kind, n_cols);
}

// ---- Codes of 32 columns of one row, as words ---------------------------------------------------

static void words_nibbles(const uint8_t *qs, uint32_t q[UNIT_WORDS]) { // Q4_0, Q4_1, Q5_0, Q5_1
    for (int j = 0; j < 4; j++) {
        uint32_t w = load_u32(qs + 4 * j);
        q[j] = w & LOW_NIBBLES;
        q[j + 4] = w >> 4 & LOW_NIBBLES;
    }
}

static void words_fifth_bits(const uint8_t *qh, uint32_t q[UNIT_WORDS]) { // Q5_0, Q5_1
    uint32_t h = load_u32(qh);
    // the product spreads 4 bits over 4 bytes
    for (int j = 0; j < UNIT_WORDS; j++) {
        q[j] |= ((h >> 4 * j & 15) * 0x00204081u & LOW_BITS) << 4;
    }
}

static void words_q8(const uint8_t *qs, uint32_t flip, uint32_t q[UNIT_WORDS]) {
    for (int j = 0; j < UNIT_WORDS; j++) q[j] = load_u32(qs + 4 * j) ^ flip;
}

static void words_k45(const uint8_t *qs, const uint8_t *qh, int unit, uint32_t q[UNIT_WORDS]) {
    for (int j = 0; j < UNIT_WORDS; j++) {
        q[j] = load_u32(qs + unit / 2 * 32 + 4 * j) >> (unit % 2 * 4) & LOW_NIBBLES;
        if (qh) q[j] |= (load_u32(qh + 4 * j) >> unit & LOW_BITS) << 4;
    }
}

static void words_q6k(const uint8_t *b, int unit, uint32_t q[UNIT_WORDS]) {
    const uint8_t *ql = b + unit / 4 * 64 + unit % 2 * 32, *qh = b + 128 + unit / 4 * 32;
    for (int j = 0; j < UNIT_WORDS; j++) {
        uint32_t lo = load_u32(ql + 4 * j) >> (unit / 2 % 2 * 4) & LOW_NIBBLES;
        q[j] = lo | (load_u32(qh + 4 * j) >> (unit % 4 * 2) & LOW_PAIRS) << 4;
    }
}

static void words_stream4(const uint8_t *p, uint32_t q[UNIT_WORDS]) {
    for (int j = 0; j < UNIT_WORDS; j++) {
        uint32_t v = (uint32_t)p[2 * j] | (uint32_t)p[2 * j + 1] << 16;
        q[j] = (v & 0x000f000fu) | (v & 0x00f000f0u) << 4;
    }
}

static void words_stream(const uint8_t *p, int bits, uint32_t q[UNIT_WORDS]) {
    uint32_t mask = (1u << bits) - 1;
    for (int j = 0; j < UNIT_WORDS; j++) {
        q[j] = 0;
        for (int i = 0; i < 4; i++) {
            int at = (4 * j + i) * bits;
            uint32_t v = p[at / 8];
            if (at % 8 + bits > 8) v |= (uint32_t)p[at / 8 + 1] << 8;
            q[j] |= (v >> at % 8 & mask) << 8 * i;
        }
    }
}

// ---- Packing ------------------------------------------------------------------------------------

// Lays the words of one row into its lanes of a unit.
static void put_unit(uint8_t *unit, int bits, int row, const uint32_t q[UNIT_WORDS]) {
    uint8_t *p = unit + 4 * row;
    int shift = 0;
    if (bits == 8) {
        for (int j = 0; j < UNIT_WORDS; j++) store_u32(p + CPU_VEC * j, q[j]);
        return;
    }
    if (bits & 4) {
        for (int v = 0; v < 4; v++, p += CPU_VEC) {
            store_u32(p, (q[2 * v] & LOW_NIBBLES) | (q[2 * v + 1] & LOW_NIBBLES) << 4);
        }
        shift = 4;
    }
    if (bits & 2) {
        for (int v = 0; v < 2; v++, p += CPU_VEC) {
            uint32_t w = 0;
            for (int k = 0; k < 4; k++) w |= (q[4 * v + k] >> shift & LOW_PAIRS) << 2 * k;
            store_u32(p, w);
        }
        shift += 2;
    }
    if (bits & 1) {
        uint32_t w = 0;
        for (int j = 0; j < UNIT_WORDS; j++) w |= (q[j] >> shift & LOW_BITS) << j;
        store_u32(p, w);
    }
}

typedef struct row_place { // one row of one group, in the file and in the tile
    const cpu_packing *p;
    const mx_wview *w;
    int64_t row, group;
    int lane;
    uint8_t *dst, *units; // scales and units of the group in the tile
} row_place;

static uint8_t *unit_at(const row_place *a, int unit) {
    return a->units + (size_t)unit * unit_bytes(a->p->bits);
}

static void put_k45_scales(const row_place *a, const uint8_t *block) {
    const uint8_t *s = block + 4;
    uint32_t lo = 0, mi = 0, hi = 0;
    for (int u = 0; u < K_UNITS; u++) {
        uint32_t sc, mn;
        if (u < 4) {
            sc = s[u] & 63u;
            mn = s[u + 4] & 63u;
        } else {
            sc = (s[u + 4] & 15u) | (uint32_t)(s[u - 4] >> 6) << 4;
            mn = (uint32_t)(s[u + 4] >> 4) | (uint32_t)(s[u] >> 6) << 4;
        }
        lo |= (sc & 15) << 4 * u;
        mi |= (mn & 15) << 4 * u;
        hi |= sc >> 4 << 2 * u | mn >> 4 << (16 + 2 * u);
    }
    memcpy(a->dst + 2 * a->lane, block, 2);
    memcpy(a->dst + 32 + 2 * a->lane, block + 2, 2);
    store_u32(a->dst + 64 + 4 * a->lane, lo);
    store_u32(a->dst + 128 + 4 * a->lane, mi);
    store_u32(a->dst + 192 + 4 * a->lane, hi);
}

// A group of a K format: one block of 256.
static void pack_k_row(const row_place *a, const uint8_t *block) {
    uint32_t q[UNIT_WORDS];
    if (a->p->family == CPU_FAM_K45) {
        bool five = a->p->bits == 5;
        put_k45_scales(a, block);
        for (int u = 0; u < K_UNITS; u++) {
            words_k45(block + 16 + (five ? 32 : 0), five ? block + 16 : NULL, u, q);
            put_unit(unit_at(a, u), a->p->bits, a->lane, q);
        }
        return;
    }
    memcpy(a->dst + 2 * a->lane, block + 208, 2);
    for (int i = 0; i < 16; i++) a->dst[64 + 16 * i + a->lane] = block[192 + i];
    for (int u = 0; u < K_UNITS; u++) {
        words_q6k(block, u, q);
        put_unit(unit_at(a, u), 6, a->lane, q);
    }
}

// A block of 32 of the legacy formats: scales first, then fifth bits, then codes.
static void pack_legacy_row(const row_place *a, const uint8_t *block) {
    uint32_t q[UNIT_WORDS];
    bool asym = a->p->family == CPU_FAM_ASYM;
    const uint8_t *codes = block + (asym ? 4 : 2);
    memcpy(a->dst + 2 * a->lane, block, 2);
    if (asym) memcpy(a->dst + 32 + 2 * a->lane, block + 2, 2);
    if (a->p->bits == 8) {
        words_q8(codes, 0x80808080u, q);
    } else if (a->p->bits == 5) {
        words_nibbles(codes + 4, q);
        words_fifth_bits(codes, q);
    } else {
        words_nibbles(codes, q);
    }
    put_unit(unit_at(a, 0), a->p->bits, a->lane, q);
}

static void pack_affine_row(const row_place *a, const uint8_t *row_codes) {
    const cpu_packing *p = a->p;
    size_t es = type_bytes(p->scale_dtype), n_groups = (size_t)a->w->n_cols / a->w->fmt.group;
    size_t at = ((size_t)a->row * n_groups + (size_t)a->group) * es;
    memcpy(a->dst + es * (size_t)a->lane, (const uint8_t *)a->w->scales + at, es);
    memcpy(a->dst + es * (size_t)(CPU_TILE_ROWS + a->lane), (const uint8_t *)a->w->biases + at, es);
    const uint8_t *codes =
        row_codes + (size_t)a->group * (size_t)p->group_units * 4 * (size_t)p->bits;
    for (int u = 0; u < p->group_units; u++, codes += 4 * p->bits) {
        uint32_t q[UNIT_WORDS];
        if (p->bits == 4)
            words_stream4(codes, q);
        else if (p->bits == 8)
            words_q8(codes, 0, q);
        else
            words_stream(codes, p->bits, q);
        put_unit(unit_at(a, u), p->bits, a->lane, q);
    }
}

static void pack_coded_tile(const mx_wview *w, const cpu_packing *p, int64_t row0, int n_rows,
                            uint8_t *dst) {
    size_t row_bytes, block = (size_t)mx_dtype_get(w->fmt.dtype)->block_bytes;
    bool affine = w->fmt.dtype == MX_AFFINE;
    CHECK(affine ? mx_wfmt_code_bytes(w->fmt, w->n_cols, &row_bytes)
                 : mx_wfmt_row_bytes(w->fmt, w->n_cols, &row_bytes));
    int64_t n_groups = cpu_packing_groups(p, w->n_cols);
    for (int64_t g = 0; g < n_groups; g++) {
        uint8_t *scales = dst + cpu_scales_at(p, g), *units = dst + cpu_units_at(p, g);
        for (int r = 0; r < n_rows; r++) {
            const uint8_t *src = (const uint8_t *)w->data + (size_t)(row0 + r) * row_bytes;
            row_place a = {p, w, row0 + r, g, r, scales, units};
            if (affine)
                pack_affine_row(&a, src);
            else if (p->group_units == K_UNITS)
                pack_k_row(&a, src + (size_t)g * block);
            else
                pack_legacy_row(&a, src + (size_t)g * block);
        }
    }
}

static void pack_float_tile(const mx_wview *w, const cpu_packing *p, int64_t row0, int n_rows,
                            uint8_t *dst) {
    size_t es = type_bytes(p->scale_dtype), n_cols = (size_t)w->n_cols;
    for (int r = 0; r < n_rows; r++) {
        const uint8_t *src = (const uint8_t *)w->data + (size_t)(row0 + r) * n_cols * es;
        uint8_t *out = dst + es * (size_t)r;
        for (size_t k = 0; k < n_cols; k++) memcpy(out + k * p->group_bytes, src + k * es, es);
    }
}

void cpu_pack_tiles(const mx_wview *w, int64_t tile0, int64_t tile1, uint8_t *dst) {
    cpu_packing p;
    CHECK(cpu_packing_of(w->fmt, &p));
    size_t bytes = cpu_tile_bytes(&p, w->n_cols);
    for (int64_t t = tile0; t < tile1; t++) {
        uint8_t *out = dst + (size_t)t * bytes;
        int64_t row0 = t * CPU_TILE_ROWS, left = w->n_rows - row0;
        int n_rows = left < CPU_TILE_ROWS ? (int)left : CPU_TILE_ROWS;
        memset(out, 0, bytes);
        if (p.family == CPU_FAM_FLOAT)
            pack_float_tile(w, &p, row0, n_rows, out);
        else
            pack_coded_tile(w, &p, row0, n_rows, out);
    }
}

// ---- Reading back -------------------------------------------------------------------------------

static int unit_code(const uint8_t *unit, int bits, int row, int col) {
    int j = col / 4, shift = 0, code = 0;
    const uint8_t *p = unit + 4 * row + col % 4;
    if (bits == 8) return p[CPU_VEC * j];
    if (bits & 4) {
        code = p[CPU_VEC * (j / 2)] >> (j % 2 * 4) & 15;
        p += 4 * CPU_VEC;
        shift = 4;
    }
    if (bits & 2) {
        code |= (p[CPU_VEC * (j / 4)] >> (j % 4 * 2) & 3) << shift;
        p += 2 * CPU_VEC;
        shift += 2;
    }
    if (bits & 1) code |= (*p >> j & 1) << shift;
    return code;
}

// value = scale * (code - center) + bias, in the order of mx_dequant_row.
static void unit_scales(const cpu_packing *p, const uint8_t *group, int row, int unit, int half,
                        float *scale, float *bias) {
    if (p->family == CPU_FAM_K45) {
        uint32_t lo = load_u32(group + 64 + 4 * row), mi = load_u32(group + 128 + 4 * row);
        uint32_t hi = load_u32(group + 192 + 4 * row);
        uint32_t sc = (lo >> 4 * unit & 15) | (hi >> 2 * unit & 3) << 4;
        uint32_t mn = (mi >> 4 * unit & 15) | (hi >> (16 + 2 * unit) & 3) << 4;
        *scale = load_scale(MX_F16, group, row) * (float)sc;
        *bias = -(load_scale(MX_F16, group + 32, row) * (float)mn);
    } else if (p->family == CPU_FAM_K6) {
        int8_t sc = (int8_t)group[64 + 16 * (2 * unit + half) + row];
        *scale = load_scale(MX_F16, group, row) * (float)sc;
        *bias = 0.0f;
    } else {
        *scale = load_scale(p->scale_dtype, group, row);
        *bias = p->family == CPU_FAM_SYM ? 0.0f
                                         : load_scale(p->scale_dtype, group, CPU_TILE_ROWS + row);
    }
}

static void unpack_coded(const cpu_packing *p, const uint8_t *tile, int row, int64_t n_cols,
                         float *out) {
    bool asym = p->family == CPU_FAM_ASYM || p->family == CPU_FAM_K45;
    int center = asym ? 0 : 1 << (p->bits - 1);
    int64_t n_groups = cpu_packing_groups(p, n_cols);
    for (int64_t g = 0; g < n_groups; g++) {
        const uint8_t *group = tile + cpu_scales_at(p, g), *unit = tile + cpu_units_at(p, g);
        for (int u = 0; u < p->group_units; u++, unit += unit_bytes(p->bits)) {
            for (int i = 0; i < CPU_UNIT; i++) {
                float scale, bias;
                unit_scales(p, group, row, u, i / 16, &scale, &bias);
                float v = scale * (float)(unit_code(unit, p->bits, row, i) - center);
                *out++ = asym ? v + bias : v;
            }
        }
    }
}

static void unpack_plain(const mx_tensor *w, const uint8_t *data, int64_t row, float *out) {
    mx_wview v = {.fmt = w->fmt, .n_rows = w->n_rows, .n_cols = w->n_cols, .data = data};
    if (w->fmt.dtype == MX_AFFINE) {
        v.scales = data + (w->scales_offset - w->offset);
        v.biases = data + (w->biases_offset - w->offset);
    }
    mx_dequant_row(&v, row, out);
}

void cpu_unpack_row_any(const mx_tensor *w, const uint8_t *data, int64_t row, float *out) {
    cpu_packing p;
    if (w->layout != MX_LAYOUT_PACKED) {
        unpack_plain(w, data, row, out);
        return;
    }
    CHECK(cpu_packing_of(w->fmt, &p));
    const uint8_t *tile = data + (size_t)(row / CPU_TILE_ROWS) * cpu_tile_bytes(&p, w->n_cols);
    int lane = (int)(row % CPU_TILE_ROWS);
    if (p.family != CPU_FAM_FLOAT) {
        unpack_coded(&p, tile, lane, w->n_cols, out);
        return;
    }
    for (int64_t k = 0; k < w->n_cols; k++) {
        out[k] = load_scale(p.scale_dtype, tile + (size_t)k * p.group_bytes, lane);
    }
}
