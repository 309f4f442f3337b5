// Which instruction sets this machine grants: a pure choice from facts, and the facts.
#ifndef MX_BACKEND_CPU_ISA_H
#define MX_BACKEND_CPU_ISA_H

#include "base/err.h"

#include <stdint.h>

typedef enum cpu_isa {
    CPU_ISA_SCALAR,
    CPU_ISA_AVX2,
    CPU_ISA_AVXVNNI,
    CPU_ISA_AVX512,
    CPU_ISA_COUNT
} cpu_isa;

// The CPUID words that matter and XCR0 (0 when the operating system has no XSAVE).
typedef struct cpu_isa_facts {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx;
    uint64_t xcr0;
    uint32_t leaf7_1_eax;
} cpu_isa_facts;

void cpu_isa_read(cpu_isa_facts *out);
// Does the processor have it and the operating system save its registers?
bool cpu_isa_granted(const cpu_isa_facts *f, cpu_isa isa);
// The last one that is granted.
cpu_isa cpu_isa_best(const cpu_isa_facts *f);
const char *cpu_isa_name(cpu_isa isa);
// wanted NULL or "": the best. Else the named one; INVALID, naming the valid ones, when the name is
// unknown, and INVALID when this machine does not grant it. "vnni" and "amx" name sets that have no
// table of their own here: they are at least avx512 and give avx512.
mx_status cpu_isa_choose(cpu_isa *out, const cpu_isa_facts *f, const char *wanted, mx_err *err);

#endif
