/* Instruction sets that a compiler may use for the kernels, and that a processor may lack. */
#ifndef WAVETUNE_PROCESSOR_H
#define WAVETUNE_PROCESSOR_H
#include <stdint.h>

enum {
    FEATURE_SSE4_2 = 1 << 0,
    FEATURE_AVX = 1 << 1,
    FEATURE_AVX2 = 1 << 2,
    FEATURE_FMA = 1 << 3,
    FEATURE_F16C = 1 << 4,
    FEATURE_BMI = 1 << 5,
    FEATURE_BMI2 = 1 << 6,
    FEATURE_LZCNT = 1 << 7,
    FEATURE_MOVBE = 1 << 8,
    FEATURE_AVX512F = 1 << 9,
    FEATURE_AVX512BW = 1 << 10,
    FEATURE_AVX512CD = 1 << 11,
    FEATURE_AVX512DQ = 1 << 12,
    FEATURE_AVX512VL = 1 << 13,
    FEATURE_AVX512VNNI = 1 << 14,
    FEATURE_AVX512BF16 = 1 << 15,
    FEATURE_AVX512FP16 = 1 << 16,
    FEATURE_ARM_DOTPROD = 1 << 17,
    FEATURE_ARM_FP16 = 1 << 18,
    FEATURE_ARM_ATOMICS = 1 << 19,
    FEATURE_ARM_SVE = 1 << 20,
    FEATURE_ARM_SVE2 = 1 << 21,
    FEATURE_ARM_I8MM = 1 << 22,
    FEATURE_ARM_BF16 = 1 << 23,
};

/* What the kernels were compiled to use. */
extern const uint32_t wavetune_required_features;

/* What this processor and its operating system offer. */
uint32_t wavetune_processor_features(void);
#endif
