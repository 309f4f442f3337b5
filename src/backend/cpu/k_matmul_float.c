// Float matrix products: weights of float types, and coded weights made floats first (exact mode).
// Built once per instruction set; no state.
//
// Column k of a row goes to partial sum k mod 4 in ascending order, y = (p0 + p1) + (p2 + p3).
#include "backend/cpu/k_matmul.h"
#include "backend/cpu/k_matmul_vec.h"

enum { PARTS = 4 };

// p[part][t] += four columns
VEC_FN void add_columns(vf *p, int rows, vf w, int part, const float *x, size_t ldx) {
    MM_UNROLL for (int t = 0; t < rows; t++) {
        vf b = vset1(x[(size_t)t * ldx]);
        p[part * rows + t] = vfma(w, b, p[part * rows + t]);
    }
}

VEC_FN vf add_parts(const vf *p, int rows, int t) {
    return vadd(vadd(p[t], p[rows + t]), vadd(p[2 * rows + t], p[3 * rows + t]));
}

VEC_FN void core_type(const mm_job *j, int streams, int rows, mx_dtype type) {
    vf p[MM_MAX_STREAMS][PARTS * 4];
    const size_t step = type == MX_F32 ? 64 : 32, ldx = j->act_step / sizeof(float);
    const float *x = (const float *)(const void *)j->act;
    MM_UNROLL for (int s = 0; s < streams; s++) {
        MM_UNROLL for (int i = 0; i < PARTS * rows; i++) p[s][i] = vset1(0.0f);
    }
    int64_t k = 0;
    for (; k + PARTS <= j->n_groups; k += PARTS) {
        MM_UNROLL for (int s = 0; s < streams; s++) {
            const uint8_t *w = j->tile[s] + (size_t)k * step;
            MM_UNROLL for (int i = 0; i < PARTS; i++) {
                add_columns(p[s], rows, vld_type(type, w + (size_t)i * step), i, x + k + i, ldx);
            }
        }
    }
    MM_UNROLL for (int i = 0; i < PARTS - 1; i++) {
        MM_UNROLL for (int s = 0; s < streams; s++) {
            if (k + i < j->n_groups) { // no break: the loop must unroll
                const uint8_t *w = j->tile[s] + (size_t)(k + i) * step;
                add_columns(p[s], rows, vld_type(type, w), i, x + k + i, ldx);
            }
        }
    }
    MM_UNROLL for (int s = 0; s < streams; s++) {
        MM_UNROLL for (int t = 0; t < rows; t++) {
            vst(j->out + 16 * (s * rows + t), add_parts(p[s], rows, t));
        }
    }
}

#define DEFINE(name, type, streams, rows)                                                          \
    static void name(const mm_job *j) {                                                            \
        core_type(j, streams, rows, type);                                                         \
    }
DEFINE(f32_1, MX_F32, 4, 1)
DEFINE(f16_1, MX_F16, 4, 1)
DEFINE(bf16_1, MX_BF16, 4, 1)
DEFINE(f32_4, MX_F32, 1, 4)
DEFINE(f16_4, MX_F16, 1, 4)
DEFINE(bf16_4, MX_BF16, 1, 4)

mm_core CPU_FN(core_float)(const cpu_packing *p, int64_t n_tok) {
    mx_dtype t = p->scale_dtype;
    if (n_tok == 1) return (mm_core){t == MX_F32 ? f32_1 : t == MX_F16 ? f16_1 : bf16_1, 4, 1};
    return (mm_core){t == MX_F32 ? f32_4 : t == MX_F16 ? f16_4 : bf16_4, 1, 4};
}

// ---- Exact products of coded formats ---------------------------------------------------------

// One unit as floats, (32, 16); the value of a weight as mx_dequant_row has it.
VEC_FN void expand_unit(const cpu_packing *p, const uint8_t *group, const uint8_t *unit, int u,
                        int bits, float *w) {
    bool asym = p->family == CPU_FAM_ASYM || p->family == CPU_FAM_K45;
    vf s, b = vset1(0.0f);
    if (p->family == CPU_FAM_K45) {
        s = vmul(vldh((const uint16_t *)(const void *)group),
                 vld_six(group + 64, 4 * u, group + 192, 2 * u));
        b = vsub(b, vmul(vldh((const uint16_t *)(const void *)(group + 32)),
                         vld_six(group + 128, 4 * u, group + 192, 16 + 2 * u)));
    } else {
        s = vld_type(p->scale_dtype, group);
        if (asym) b = vld_type(p->scale_dtype, group + p->head_bytes / 2);
    }
    for (int h = 0; h < 2; h++) {
        vf c[16];
        vf sh = p->family == CPU_FAM_K6 ? vmul(s, vld_i8(group + 64 + 16 * (2 * u + h))) : s;
        if (h == 0)
            mm_columns(c, unit, bits, 0, asym ? 0 : 1 << (bits - 1));
        else
            mm_columns(c, unit, bits, 1, asym ? 0 : 1 << (bits - 1));
        MM_UNROLL for (int i = 0; i < 16; i++) {
            vf v = vmul(sh, c[i]);
            vst(w + 16 * (16 * h + i), asym ? vadd(v, b) : v);
        }
    }
}

// Unit `unit` of a row.
static void expand(const cpu_packing *p, const uint8_t *tile, int64_t unit, float *w) {
    int64_t g = unit / p->group_units;
    int u = (int)(unit % p->group_units);
    const uint8_t *group = tile + cpu_scales_at(p, g);
    const uint8_t *codes = tile + cpu_units_at(p, g) + (size_t)(u * p->bits) * CPU_VEC;
    switch (p->bits) {
    case 2: expand_unit(p, group, codes, u, 2, w); break;
    case 3: expand_unit(p, group, codes, u, 3, w); break;
    case 4: expand_unit(p, group, codes, u, 4, w); break;
    case 5: expand_unit(p, group, codes, u, 5, w); break;
    case 6: expand_unit(p, group, codes, u, 6, w); break;
    default: expand_unit(p, group, codes, u, 8, w); break;
    }
}

// Adds 32 columns to the partial sums of `rows` rows of activations.
VEC_FN void sweep(float *parts, int rows, const float *w, const float *x, int64_t ldx) {
    vf p[PARTS * 4];
    MM_UNROLL for (int i = 0; i < PARTS * rows; i++) p[i] = vld(parts + 16 * i);
    for (int k = 0; k < CPU_UNIT; k += PARTS) {
        MM_UNROLL for (int i = 0; i < PARTS; i++) {
            add_columns(p, rows, vld(w + 16 * (k + i)), i, x + k + i, (size_t)ldx);
        }
    }
    MM_UNROLL for (int i = 0; i < PARTS * rows; i++) vst(parts + 16 * i, p[i]);
}

void CPU_FN(exact_tile)(const cpu_packing *p, const uint8_t *tile, int64_t n_cols, const float *x,
                        int64_t ldx, int n_tok, float *out) {
    _Alignas(64) float parts[MM_EXACT_TOK * PARTS * 16], w[CPU_UNIT * 16];
    memset(parts, 0, sizeof(float) * 16 * PARTS * (size_t)n_tok);
    int fours = n_tok & ~3;
    for (int64_t k = 0; k < n_cols; k += CPU_UNIT) {
        expand(p, tile, k / CPU_UNIT, w);
        int t = 0;
        for (; t < fours; t += 4) sweep(parts + 64 * t, 4, w, x + t * ldx + k, ldx);
        for (; t < n_tok; t++) sweep(parts + 64 * t, 1, w, x + t * ldx + k, ldx);
    }
    for (int t = 0; t < n_tok; t++) { // blocks of four rows hold parts as (part, row)
        int rows = t < fours ? 4 : 1;
        const float *q = parts + 64 * (t / rows * rows) + 16 * (t % rows);
        vf a = vadd(vld(q), vld(q + 16 * rows)), b = vadd(vld(q + 32 * rows), vld(q + 48 * rows));
        vst(out + 16 * t, vadd(a, b));
    }
}
