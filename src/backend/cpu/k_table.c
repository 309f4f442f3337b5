// The kernel table of one instruction set. No state.
#include "backend/cpu/pack.h"

const cpu_kernels CPU_CAT(cpu_kernels_, MX_ISA) = {
#define STR_(x) #x
#define STR(x)  STR_(x)
    .isa = STR(MX_ISA),
    .tile_rows = CPU_TILE_ROWS,
    .pack_bytes = CPU_FN(pack_bytes),
    .pack = CPU_FN(pack),
    .act_kind = CPU_FN(act_kind),
    .act_bytes = CPU_FN(act_bytes),
    .act_prepare = CPU_BASE(act_prepare),
    .mul = CPU_FN(mul),
    .mul_glu = CPU_FN(mul_glu),
    .unpack_row = CPU_FN(unpack_row),
    .rms_norm = CPU_BASE(rms_norm),
    .add = CPU_BASE(add),
    .glu = CPU_BASE(glu),
    .softcap = CPU_BASE(softcap),
    .rope = CPU_BASE(rope),
    .max_sum = CPU_BASE(max_sum),
    .attn_chunk = CPU_BASE(attn_chunk),
    .attn_merge = CPU_BASE(attn_merge),
    .attn_finish = CPU_BASE(attn_finish),
    .kv_store = CPU_BASE(kv_store),
};
