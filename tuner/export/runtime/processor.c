/* Asks the processor, rather than the compiler's own support functions, which not every compiler links. */
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stddef.h>

uint32_t wavetune_processor_features(void) {
    /* Leaf 1 c, leaf 7 b, leaf 7 c, leaf 7 d, leaf 7.1 a, leaf 0x80000001 c; Intel SDM, volume 2, CPUID. */
    static const struct {
        uint32_t feature;
        int word, bit;
    } places[] = {
        {FEATURE_FMA, 0, 12},        {FEATURE_SSE4_2, 0, 20},     {FEATURE_MOVBE, 0, 22},
        {FEATURE_AVX, 0, 28},        {FEATURE_F16C, 0, 29},       {FEATURE_BMI, 1, 3},
        {FEATURE_AVX2, 1, 5},        {FEATURE_BMI2, 1, 8},        {FEATURE_AVX512F, 1, 16},
        {FEATURE_AVX512DQ, 1, 17},   {FEATURE_AVX512CD, 1, 28},   {FEATURE_AVX512BW, 1, 30},
        {FEATURE_AVX512VL, 1, 31},   {FEATURE_AVX512VNNI, 2, 11}, {FEATURE_AVX512FP16, 3, 23},
        {FEATURE_AVX512BF16, 4, 5},  {FEATURE_LZCNT, 5, 5},
    };
    const uint32_t avx = FEATURE_AVX | FEATURE_AVX2 | FEATURE_FMA | FEATURE_F16C;
    uint32_t words[6] = {0}, a, b, c, d, state = 0, found = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) words[0] = c;
    if (__get_cpuid_count(7, 0, &a, &words[1], &words[2], &words[3]))
        if (a >= 1) __get_cpuid_count(7, 1, &words[4], &b, &c, &d);
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) words[5] = c;
    /* Bit 27: the operating system lets programs ask which registers it saves. */
    if (words[0] >> 27 & 1) __asm__ volatile("xgetbv" : "=a"(state), "=d"(d) : "c"(0));
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (words[places[i].word] >> places[i].bit & 1) found |= places[i].feature;
    if ((state & 0x06) != 0x06) found &= ~avx; /* xmm and ymm */
    if ((state & 0xe6) != 0xe6) found &= FEATURE_AVX512F - 1u; /* and zmm, with masks */
    return found;
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

uint32_t wavetune_processor_features(void) {
    /* Linux, arch/arm64/include/uapi/asm/hwcap.h. */
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    uint32_t found = 0;
    if (first >> 20 & 1) found |= FEATURE_ARM_DOTPROD;
    if (first >> 10 & 1) found |= FEATURE_ARM_FP16;
    if (first >> 8 & 1) found |= FEATURE_ARM_ATOMICS;
    if (first >> 22 & 1) found |= FEATURE_ARM_SVE;
    if (second >> 1 & 1) found |= FEATURE_ARM_SVE2;
    if (second >> 13 & 1) found |= FEATURE_ARM_I8MM;
    if (second >> 14 & 1) found |= FEATURE_ARM_BF16;
    return found;
}

#else
uint32_t wavetune_processor_features(void) { return wavetune_required_features; } /* no way to ask */
#endif
