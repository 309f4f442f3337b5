// How weights and activations lie in memory for the CPU's matrix products. Every instruction set
// reads the same bytes. Little-endian.
#ifndef MX_BACKEND_CPU_PACK_H
#define MX_BACKEND_CPU_PACK_H

#include "backend/cpu/cpu_int.h"

// ---- Weights --------------------------------------------------------------------------------
// A tile is CPU_TILE_ROWS output rows as one contiguous stream, padded to 64 bytes. Columns ascend.
//
// FLOAT: column after column, 16 values of the checkpoint's type each.
//
// The others: group after group of 32 * group_units columns; a group is its scales, then its units.
//   ASYM  s[16] b[16] in the file's scale type          w = s * c + b
//   K45   d[16] m[16] f16, lo[16] mi[16] hi[16] u32     8 units, w = d * sc[u] * c - m * mn[u]
//         (sc[u] = bits 4u.. of lo and 2u.. of hi, mn[u] = 4u.. of mi and 16+2u.. of hi)
//   K6    d[16] f16, 32 bytes of zeros, sc[16][16] i8   8 units, w = d * sc[2u + half] * (c -
//   center) SYM   s[16] f16                                     w = s * (c - center)
//         Two groups share 64 bytes of scales, in front of their units: units that do not start
//         at 64 bytes cost a fifth of the speed when they come from memory (EPYC 9004). The last
//         of an odd number of groups leaves 32 bytes empty.
// center is half the range of codes, 1 << (bits - 1).
//
// A unit is 32 columns of codes. In a vector of 64 bytes, byte 4r + i belongs to row r and column
// 4j + i of "quad column" j (0..7). Vectors, the planes of the code's bits from low to high:
//   8 bits  8 vectors: j
//   4 bits  4 vectors: v holds j = 2v in the low nibbles, 2v + 1 in the high ones
//   2 bits  2 vectors: v holds j = 4v + k in bits 2k..
//   1 bit   1 vector:  j in bit j
enum { CPU_UNIT = 32, CPU_VEC = 64 };

typedef enum cpu_family {
    CPU_FAM_FLOAT,
    CPU_FAM_SYM,
    CPU_FAM_ASYM,
    CPU_FAM_K45,
    CPU_FAM_K6
} cpu_family;

typedef struct cpu_packing {
    cpu_family family;
    int bits;
    int group_units;      // units of one set of scales
    int act_units;        // units of one activation group: 1 or 2
    mx_dtype scale_dtype; // of SYM and ASYM; FLOAT: the weights' own type
    size_t head_bytes;    // scales of a group
    size_t group_bytes;   // FLOAT: of a column; SYM: of two groups
} cpu_packing;

enum { CPU_PACK_EXACT = 1 }; // bit of mx_tensor.pack: float32 activations for a coded format

// False when the format has no packed form.
bool cpu_packing_of(mx_wfmt f, cpu_packing *out);
// Groups (FLOAT: columns) of a row.
int64_t cpu_packing_groups(const cpu_packing *p, int64_t n_cols);
// Where group g has its scales and its units in the tile. Not for FLOAT.
static inline size_t cpu_scales_at(const cpu_packing *p, int64_t g) {
    if (p->family != CPU_FAM_SYM) return (size_t)g * p->group_bytes;
    return (size_t)(g / 2) * p->group_bytes + (size_t)(g % 2) * (CPU_VEC / 2);
}
static inline size_t cpu_units_at(const cpu_packing *p, int64_t g) {
    if (p->family != CPU_FAM_SYM) return (size_t)g * p->group_bytes + p->head_bytes;
    size_t unit = (size_t)p->bits * CPU_VEC;
    return (size_t)(g / 2) * p->group_bytes + CPU_VEC + (size_t)(g % 2) * unit;
}
size_t cpu_tile_bytes(const cpu_packing *p, int64_t n_cols);

size_t cpu_pack_bytes(mx_wfmt f, int64_t n_rows, int64_t n_cols, bool exact, uint16_t *pack);
void cpu_pack_tiles(const mx_wview *w, int64_t tile0, int64_t tile1, uint8_t *dst);
cpu_act_kind cpu_act_kind_of(const mx_tensor *w);
// Any weight, in PACKED or ROWS. data is the tensor's first byte.
void cpu_unpack_row_any(const mx_tensor *w, const uint8_t *data, int64_t row, float *out);

// ---- Activations ----------------------------------------------------------------------------
// F32: rows of floats, cpu_act_row floats apart.
// Q32, Q64: blocks of CPU_ACT_BLOCK rows; in a block, group after group; a group is a record:
//   codes i8 [CPU_ACT_BLOCK][32 or 64]     round(x / d), d = max |x| / 127
//   d     f32 [CPU_ACT_BLOCK]
//   v     f32 [CPU_ACT_BLOCK]              d * sum of codes
//   n     i32 [CPU_ACT_BLOCK]              -(sum of codes)
//   half  i32 [CPU_ACT_BLOCK]              the part of n of the group's first 16 columns
enum { CPU_ACT_BLOCK = 8 };

static inline int64_t cpu_act_row(int64_t n_cols) { // floats
    return (n_cols + 15) & ~(int64_t)15;
}
static inline int cpu_act_group(cpu_act_kind kind) {
    return kind == CPU_ACT_Q64 ? 64 : 32;
}
static inline size_t cpu_act_record(cpu_act_kind kind) {
    return (size_t)CPU_ACT_BLOCK * ((size_t)cpu_act_group(kind) + 16);
}
static inline size_t cpu_act_block(cpu_act_kind kind, int64_t n_cols) {
    return (size_t)(n_cols / cpu_act_group(kind)) * cpu_act_record(kind);
}
size_t cpu_act_bytes(cpu_act_kind kind, int64_t n_cols, int64_t n_tok);

#endif
