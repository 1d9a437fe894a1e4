/* Compiled with the flags of the kernels, unlike the rest of the runtime: the compiler itself says which
 * instructions it was allowed to use.
 */
#include "processor.h"

const uint32_t wavetune_required_features = 0
#ifdef __SSE4_2__
    | FEATURE_SSE4_2
#endif
#ifdef __AVX__
    | FEATURE_AVX
#endif
#ifdef __AVX2__
    | FEATURE_AVX2
#endif
#ifdef __FMA__
    | FEATURE_FMA
#endif
#ifdef __F16C__
    | FEATURE_F16C
#endif
#ifdef __BMI__
    | FEATURE_BMI
#endif
#ifdef __BMI2__
    | FEATURE_BMI2
#endif
#ifdef __LZCNT__
    | FEATURE_LZCNT
#endif
#ifdef __MOVBE__
    | FEATURE_MOVBE
#endif
#ifdef __AVX512F__
    | FEATURE_AVX512F
#endif
#ifdef __AVX512BW__
    | FEATURE_AVX512BW
#endif
#ifdef __AVX512CD__
    | FEATURE_AVX512CD
#endif
#ifdef __AVX512DQ__
    | FEATURE_AVX512DQ
#endif
#ifdef __AVX512VL__
    | FEATURE_AVX512VL
#endif
#ifdef __AVX512VNNI__
    | FEATURE_AVX512VNNI
#endif
#ifdef __AVX512BF16__
    | FEATURE_AVX512BF16
#endif
#ifdef __AVX512FP16__
    | FEATURE_AVX512FP16
#endif
#ifdef __ARM_FEATURE_DOTPROD
    | FEATURE_ARM_DOTPROD
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
    | FEATURE_ARM_FP16
#endif
#ifdef __ARM_FEATURE_ATOMICS
    | FEATURE_ARM_ATOMICS
#endif
#ifdef __ARM_FEATURE_SVE
    | FEATURE_ARM_SVE
#endif
#ifdef __ARM_FEATURE_SVE2
    | FEATURE_ARM_SVE2
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    | FEATURE_ARM_I8MM
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    | FEATURE_ARM_BF16
#endif
    ;
