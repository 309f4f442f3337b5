// Integer matrix products: int8 activations times the codes of a tile. Built once per instruction
// set; no state.
//
// Every output is, over activation groups in ascending order (fma rounds once, * once):
//   dot = sum of (code - center) * x, exact;   y = fma(s, d * dot, y)
//   and where the format has a bias:           y = fma(b', v, y), v = d * sum of x,
//                                              b' = fma(center, s, b)
// so weights act on the quantised activation alone: the error is that of rounding x (about 6e-3 of
// the result, relative RMS). The code is centred because its mean would multiply nothing but
// rounding noise. When two formats say the same weight, b' is exactly 0 or the same, and so is y.
// Q6_K has a scale for 16 columns: dot = sc0 * dot0 + sc1 * dot1, at most 2^24: exact as a float.
#include "backend/cpu/k_matmul.h"
#include "backend/cpu/k_matmul_vec.h"

typedef struct record { // one activation group, at the job's first row
    const uint8_t *x;   // codes, xs bytes a row
    const uint8_t *num; // d, v, n, half
    size_t xs;
} record;

VEC_FN record record_at(const mm_job *j, size_t at, int columns) {
    record r = {j->act + at, j->numbers + at, (size_t)columns};
    MM_FORGET_POINTER(r.x);
    MM_FORGET_POINTER(r.num);
    return r;
}
VEC_FN vf scale_of(const record *r, int t) {
    return vset1(*(const float *)(const void *)(r->num + 4 * t));
}
VEC_FN vf sum_of(const record *r, int t) {
    return vset1(*(const float *)(const void *)(r->num + 4 * (CPU_ACT_BLOCK + t)));
}
VEC_FN int32_t start_of(const record *r, int t) {
    return mm_i32(r->num + 4 * (2 * CPU_ACT_BLOCK + t));
}
VEC_FN int32_t half_of(const record *r, int t) {
    return mm_i32(r->num + 4 * (3 * CPU_ACT_BLOCK + t));
}
// start - half; rows past the last one hold anything, so it wraps
VEC_FN int32_t rest_of(const record *r, int t) {
    return (int32_t)((uint32_t)start_of(r, t) - (uint32_t)half_of(r, t));
}

// One stream with many rows computes for so long between its loads that the hardware stops
// fetching ahead: with 8 rows this gave 16 % (EPYC 9004, 1 thread). With several streams it cost
// 5 to 50 %. Twice as far gave AVX-512 7 % more (EPYC 9005, 1 thread; 2 threads: 1 to 4 %) and cost
// AVX2 1 %.
#if defined(MX_ISA_AVX512)
enum { FETCH_AHEAD = 8192 };
#else
enum { FETCH_AHEAD = 4096 };
#endif
VEC_FN void fetch_ahead(const uint8_t *group, size_t n_bytes, int streams) {
    if (streams > 1) return;
    for (size_t i = 0; i < n_bytes; i += CPU_VEC) __builtin_prefetch(group + FETCH_AHEAD + i);
}

typedef struct scales {
    vf s, b; // b' of the formula
} scales;

VEC_FN vf center_bias(vf s, vf b, int bits) {
    return vfma(vset1((float)(1 << (bits - 1))), s, b);
}

VEC_FN scales plain_scales(const cpu_packing *p, const uint8_t *group, bool asym, int bits) {
    scales r = {.s = vld_type(asym ? p->scale_dtype : MX_F16, group), .b = vset1(0.0f)};
    if (asym) {
        r.b = center_bias(r.s, vld_type(p->scale_dtype, group + p->head_bytes / 2), bits);
    }
    return r;
}

VEC_FN scales k45_scales(const uint8_t *group, int u, int bits) {
    vf s = vmul(vldh((const uint16_t *)(const void *)group),
                vld_six(group + 64, 4 * u, group + 192, 2 * u));
    vf m = vmul(vldh((const uint16_t *)(const void *)(group + 32)),
                vld_six(group + 128, 4 * u, group + 192, 16 + 2 * u));
    return (scales){.s = s, .b = center_bias(s, vsub(vset1(0.0f), m), bits)};
}

// Rows [t, ..) of a record.
VEC_FN record record_from(const record *r, int t) {
    return (record){r->x + (size_t)t * r->xs, r->num + 4 * t, r->xs};
}

// With several blocks of rows, codes are spread once for all where that pays.
VEC_FN mm_unit unit_of(const uint8_t *unit, int bits, int rows, uint8_t *spread) {
    if (rows <= VI_BLOCK || !vi_spread_pays(bits)) return (mm_unit){unit, bits, false};
    vi_spread(spread, unit, bits);
    return (mm_unit){spread, bits, true};
}

VEC_FN void add_block(vf *y, int rows, const mm_unit *unit, int act_units, const record *r,
                      bool asym, const scales *sc) {
    int bits = unit->bits;
    vi dot[VI_BLOCK];
    MM_UNROLL for (int t = 0; t < rows; t++) dot[t] = vi_start(start_of(r, t), bits);
    MM_UNROLL for (int u = 0; u < act_units; u++) {
        vi_dot_unit(dot, rows, &unit[u], r->x + CPU_UNIT * u, r->xs);
    }
    MM_UNROLL for (int t = 0; t < rows; t++) {
        vf d = vi_float(vi_end(dot[t], start_of(r, t), bits));
        y[t] = vfma(sc->s, vmul(scale_of(r, t), d), y[t]);
        if (asym) y[t] = vfma(sc->b, sum_of(r, t), y[t]);
    }
}

// y += one activation group of act_units units.
VEC_FN void add_group(vf *y, int rows, const uint8_t *unit, int bits, int act_units,
                      const record *r, bool asym, const scales *sc) {
    _Alignas(64) uint8_t spread[2][MM_SPREAD_BYTES];
    mm_unit w[2] = {unit_of(unit, bits, rows, spread[0])};
    if (act_units == 2) w[1] = unit_of(unit + bits * CPU_VEC, bits, rows, spread[1]);
    for (int t = 0; t < rows; t += VI_BLOCK) {
        record from = record_from(r, t);
        if (rows > VI_BLOCK) MM_FORGET_MEMORY();
        add_block(y + t, rows < VI_BLOCK ? rows : VI_BLOCK, w, act_units, &from, asym, sc);
    }
}

VEC_FN void add_k6_block(vf *y, int rows, const mm_unit *unit, const record *r, vf s, vf sc0,
                         vf sc1) {
    vi dot[2][VI_BLOCK];
    MM_UNROLL for (int t = 0; t < rows; t++) {
        dot[0][t] = vi_start(half_of(r, t), 6);
        dot[1][t] = vi_start(rest_of(r, t), 6);
    }
    vi_dot(dot[0], rows, unit, 0, r->x, r->xs);
    vi_dot(dot[1], rows, unit, 1, r->x + 16, r->xs);
    MM_UNROLL for (int t = 0; t < rows; t++) {
        vf both = vmul(sc1, vi_float(vi_end(dot[1][t], rest_of(r, t), 6)));
        both = vfma(sc0, vi_float(vi_end(dot[0][t], half_of(r, t), 6)), both);
        both = vmul(scale_of(r, t), both);
        y[t] = vfma(s, both, y[t]);
    }
}

VEC_FN void add_k6_unit(vf *y, int rows, const uint8_t *unit, const record *r, vf s, vf sc0,
                        vf sc1) {
    _Alignas(64) uint8_t spread[MM_SPREAD_BYTES];
    mm_unit w = unit_of(unit, 6, rows, spread);
    for (int t = 0; t < rows; t += VI_BLOCK) {
        record from = record_from(r, t);
        if (rows > VI_BLOCK) MM_FORGET_MEMORY();
        add_k6_block(y + t, rows < VI_BLOCK ? rows : VI_BLOCK, &w, &from, s, sc0, sc1);
    }
}

VEC_FN void store_all(const mm_job *j, const vf *y, int n) {
    MM_UNROLL for (int i = 0; i < n; i++) vst(j->out + 16 * i, y[i]);
}

VEC_FN void core_plain(const mm_job *j, int streams, int rows, bool asym, int bits, int act_units) {
    vf y[MM_MAX_STREAMS * MM_MAX_TOK];
    MM_UNROLL for (int i = 0; i < streams * rows; i++) y[i] = vset1(0.0f);
    int acts = act_units == 1 ? 1 : j->p.group_units / 2; // activation groups of a weight group
    const size_t unit_bytes = (size_t)(bits * CPU_VEC), both = 2 * unit_bytes + CPU_VEC;
    size_t act = 0;
    for (int64_t g = 0; g < j->n_groups; g++) {
        size_t at = (size_t)g * j->p.group_bytes, unit_at = at + j->p.head_bytes;
        if (!asym) { // cpu_scales_at, cpu_units_at
            size_t pair = (size_t)(g / 2) * both, odd = (size_t)(g % 2);
            at = pair + odd * (CPU_VEC / 2);
            unit_at = pair + CPU_VEC + odd * unit_bytes;
        }
        MM_UNROLL for (int s = 0; s < streams; s++) {
            const uint8_t *group = j->tile[s] + at, *unit = j->tile[s] + unit_at;
            fetch_ahead(unit, asym ? j->p.group_bytes : unit_bytes + CPU_VEC / 2, streams);
            scales sc = plain_scales(&j->p, group, asym, bits);
            for (int a = 0; a < acts; a++) {
                record r = record_at(j, act + (size_t)a * j->act_step, 32 * act_units);
                add_group(y + s * rows, rows, unit, bits, act_units, &r, asym, &sc);
                unit += (size_t)act_units * unit_bytes;
            }
        }
        act += (size_t)acts * j->act_step;
    }
    store_all(j, y, streams * rows);
}

VEC_FN void core_k(const mm_job *j, int streams, int rows, int bits) {
    vf y[MM_MAX_STREAMS * MM_MAX_TOK];
    MM_UNROLL for (int i = 0; i < streams * rows; i++) y[i] = vset1(0.0f);
    size_t at = 0, act = 0;
    for (int64_t g = 0; g < j->n_groups; g++) {
        for (int u = 0; u < 8; u++) {
            MM_UNROLL for (int s = 0; s < streams; s++) {
                record r = record_at(j, act, 32);
                const uint8_t *group = j->tile[s] + at;
                const uint8_t *unit = group + j->p.head_bytes + u * bits * CPU_VEC;
                fetch_ahead(unit, (size_t)bits * CPU_VEC, streams);
                if (bits == 6) {
                    add_k6_unit(y + s * rows, rows, unit, &r,
                                vldh((const uint16_t *)(const void *)group),
                                vld_i8(group + 64 + 32 * u), vld_i8(group + 80 + 32 * u));
                } else {
                    scales sc = k45_scales(group, u, bits);
                    add_group(y + s * rows, rows, unit, bits, 1, &r, true, &sc);
                }
            }
            act += j->act_step;
        }
        at += j->p.group_bytes;
    }
    store_all(j, y, streams * rows);
}

// ---- The cores: a name, then the arguments of its kernel ----------------------------------------

// X(streams, rows, …), rows ascending. SHORT is for the formats that are seldom met. Two streams
// because, with huge pages, one thread of an EPYC 9004 then reads 84-94 % of what it can; four gave
// 64-80 %, one 65 %.
#if defined(MX_ISA_AVX512)
#define ROWS_LIST(X, ...)                                                                          \
    X(2, 1, __VA_ARGS__)                                                                           \
    X(2, 2, __VA_ARGS__)                                                                           \
    X(1, 4, __VA_ARGS__)                                                                           \
    X(1, 8, __VA_ARGS__)
#define SHORT_LIST(X, ...)                                                                         \
    X(2, 1, __VA_ARGS__)                                                                           \
    X(1, 8, __VA_ARGS__)
#elif defined(MX_ISA_AVX2)
#define ROWS_LIST(X, ...)                                                                          \
    X(2, 1, __VA_ARGS__)                                                                           \
    X(2, 2, __VA_ARGS__)                                                                           \
    X(1, 4, __VA_ARGS__)                                                                           \
    X(1, 8, __VA_ARGS__)
#define SHORT_LIST(X, ...)                                                                         \
    X(2, 1, __VA_ARGS__)                                                                           \
    X(1, 8, __VA_ARGS__)
#else
#define ROWS_LIST(X, ...)                                                                          \
    X(1, 1, __VA_ARGS__)                                                                           \
    X(1, 4, __VA_ARGS__)
#define SHORT_LIST(X, ...) X(1, 1, __VA_ARGS__)
#endif

// X(name, rows list, asym, bits, act_units)
#define PLAIN_LIST(X)                                                                              \
    X(s4, ROWS_LIST, false, 4, 1)                                                                  \
    X(s5, ROWS_LIST, false, 5, 1)                                                                  \
    X(s8, ROWS_LIST, false, 8, 1)                                                                  \
    X(a2, SHORT_LIST, true, 2, 1)                                                                  \
    X(a3, SHORT_LIST, true, 3, 1)                                                                  \
    X(a4, ROWS_LIST, true, 4, 1)                                                                   \
    X(a5, SHORT_LIST, true, 5, 1)                                                                  \
    X(a6, SHORT_LIST, true, 6, 1)                                                                  \
    X(a8, SHORT_LIST, true, 8, 1)                                                                  \
    X(b2, SHORT_LIST, true, 2, 2)                                                                  \
    X(b3, SHORT_LIST, true, 3, 2)                                                                  \
    X(b4, ROWS_LIST, true, 4, 2)                                                                   \
    X(b5, SHORT_LIST, true, 5, 2)                                                                  \
    X(b6, SHORT_LIST, true, 6, 2)                                                                  \
    X(b8, ROWS_LIST, true, 8, 2)
#define K_LIST(X)                                                                                  \
    X(k4, ROWS_LIST, 4)                                                                            \
    X(k5, SHORT_LIST, 5)                                                                           \
    X(k6, ROWS_LIST, 6)

#define DEFINE_PLAIN(streams, rows, name, asym, bits, units)                                       \
    static void name##_##rows(const mm_job *j) {                                                   \
        core_plain(j, streams, rows, asym, bits, units);                                           \
    }
#define DEFINE_K(streams, rows, name, bits)                                                        \
    static void name##_##rows(const mm_job *j) {                                                   \
        core_k(j, streams, rows, bits);                                                            \
    }
#define ENTRY(streams_, rows_, name, ...) {name##_##rows_, streams_, rows_},
#define PLAIN_CORES(name, list, asym, bits, units)                                                 \
    list(DEFINE_PLAIN, name, asym, bits,                                                           \
         units) static const mm_core name##_cores[] = {list(ENTRY, name, 0){NULL, 0, 0}};
#define K_CORES(name, list, bits)                                                                  \
    list(DEFINE_K, name,                                                                           \
         bits) static const mm_core name##_cores[] = {list(ENTRY, name, 0){NULL, 0, 0}};

PLAIN_LIST(PLAIN_CORES)
K_LIST(K_CORES)

static const mm_core *cores_of(const cpu_packing *p) {
    if (p->family == CPU_FAM_K6) return k6_cores;
    if (p->family == CPU_FAM_K45) return p->bits == 4 ? k4_cores : k5_cores;
    bool is_asym = p->family == CPU_FAM_ASYM;
#define PICK(name, list, asym_, bits_, units_)                                                     \
    if (is_asym == asym_ && p->bits == bits_ && p->act_units == units_) return name##_cores;
    PLAIN_LIST(PICK)
    CHECKF(false, "no integer product for %d bits", p->bits);
    return NULL;
}

mm_core CPU_FN(core_int)(const cpu_packing *p, int64_t n_tok) {
    const mm_core *c = cores_of(p);
    while (c[1].fn && c->rows < n_tok) c++;
    return *c;
}
