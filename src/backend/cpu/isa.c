// Choice of the instruction set. No state. A processor may announce AVX-512 or AMX while the
// operating system does not save their registers: XCR0 decides, not CPUID alone.
#include "backend/cpu/isa.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { // CPUID bits
    L1C_FMA = 1u << 12,
    L1C_OSXSAVE = 1u << 27,
    L1C_AVX = 1u << 28,
    L1C_F16C = 1u << 29,
    L7B_BMI1 = 1u << 3,
    L7B_AVX2 = 1u << 5,
    L7B_BMI2 = 1u << 8,
    L7B_AVX512F = 1u << 16,
    L7B_AVX512DQ = 1u << 17,
    L7B_AVX512BW = 1u << 30,
    L7C_VNNI = 1u << 11,
    L71A_AVXVNNI = 1u << 4,
};
static const uint32_t L7B_AVX512VL = 1u << 31;
enum { XCR_SSE_AVX = 0x6, XCR_AVX512 = 0xe6 };

#if defined(__x86_64__)
static uint64_t read_xcr0(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

void cpu_isa_read(cpu_isa_facts *out) {
    uint32_t a, b, c, d;
    *out = (cpu_isa_facts){0};
    if (__get_cpuid(1, &a, &b, &c, &d)) out->leaf1_ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        out->leaf7_ebx = b;
        out->leaf7_ecx = c;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) out->leaf7_1_eax = a;
    }
    if (out->leaf1_ecx & L1C_OSXSAVE) out->xcr0 = read_xcr0();
}
#else
void cpu_isa_read(cpu_isa_facts *out) {
    *out = (cpu_isa_facts){0};
}
#endif

static bool has(uint32_t word, uint32_t bits) {
    return (word & bits) == bits;
}

static bool has_avx2(const cpu_isa_facts *f) {
    return has(f->leaf1_ecx, L1C_OSXSAVE | L1C_AVX | L1C_FMA | L1C_F16C) &&
           has(f->leaf7_ebx, L7B_AVX2 | L7B_BMI1 | L7B_BMI2) &&
           (f->xcr0 & XCR_SSE_AVX) == XCR_SSE_AVX;
}

bool cpu_isa_granted(const cpu_isa_facts *f, cpu_isa isa) {
    if (isa == CPU_ISA_SCALAR) return true;
    if (!has_avx2(f)) return false;
    if (isa == CPU_ISA_AVXVNNI) return has(f->leaf7_1_eax, L71A_AVXVNNI);
    return isa == CPU_ISA_AVX2 ||
           (has(f->leaf7_ebx, L7B_AVX512F | L7B_AVX512DQ | L7B_AVX512BW | L7B_AVX512VL) &&
            has(f->leaf7_ecx, L7C_VNNI) && (f->xcr0 & XCR_AVX512) == XCR_AVX512);
}

cpu_isa cpu_isa_best(const cpu_isa_facts *f) {
    int isa = CPU_ISA_COUNT - 1;
    while (!cpu_isa_granted(f, (cpu_isa)isa)) isa--;
    return (cpu_isa)isa;
}

const char *cpu_isa_name(cpu_isa isa) {
    static const char *const names[] = {"scalar", "avx2", "avxvnni", "avx512"};
    return (unsigned)isa < CPU_ISA_COUNT ? names[isa] : "?";
}

mx_status cpu_isa_choose(cpu_isa *out, const cpu_isa_facts *f, const char *wanted, mx_err *err) {
    cpu_isa best = cpu_isa_best(f), isa = CPU_ISA_COUNT;
    *out = best;
    if (!wanted || !*wanted) return MX_OK;
    for (int i = 0; i < CPU_ISA_COUNT; i++) {
        if (!strcmp(wanted, cpu_isa_name((cpu_isa)i))) isa = (cpu_isa)i;
    }
    if (!strcmp(wanted, "vnni") || !strcmp(wanted, "amx")) isa = CPU_ISA_AVX512;
    if (isa == CPU_ISA_COUNT) {
        return mx_err_set(
            err, MX_INVALID,
            "MLXCEL_CPU_ISA: \"%s\" is unknown; valid are scalar, avx2, avxvnni, avx512, "
            "vnni and amx",
            wanted);
    }
    if (!cpu_isa_granted(f, isa)) {
        return mx_err_set(err, MX_INVALID,
                          "MLXCEL_CPU_ISA: \"%s\" is not granted here; the best that processor and "
                          "system allow is %s",
                          wanted, cpu_isa_name(best));
    }
    *out = isa;
    return MX_OK;
}
