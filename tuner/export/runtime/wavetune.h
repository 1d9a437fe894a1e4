/* Tuned GEMM kernels behind a C interface.
 *
 *   D = act(alpha * scale_a * scale_b * scale_alpha_vec[i] * op(A) * op(B) + beta * C + bias[i])
 *
 * in BLAS terms: column-major, op(A) is m x k, op(B) is k x n, C and D are m x n, leading dimensions and
 * strides count elements. A row-major product is the column-major product with A and B, and m and n,
 * exchanged.
 */
#ifndef WAVETUNE_H
#define WAVETUNE_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum wavetune_status {
    WAVETUNE_SUCCESS = 0,
    WAVETUNE_INVALID_VALUE = 1, /* NULL, a negative size, or a leading dimension or stride that is too small */
    WAVETUNE_NOT_SUPPORTED = 2, /* the library has no kernel for these types, transposes and epilogue */
    WAVETUNE_ARCH_MISMATCH = 3, /* the kernels use instructions that this processor lacks */
    WAVETUNE_OUT_OF_MEMORY = 4, /* memory or threads */
} wavetune_status;

typedef enum wavetune_dtype {
    WAVETUNE_NONE = 0, /* for bias_type: no bias */
    WAVETUNE_F64 = 1,
    WAVETUNE_F32 = 2,
    WAVETUNE_F16 = 3,
    WAVETUNE_BF16 = 4,
    WAVETUNE_I8 = 5,
    WAVETUNE_I32 = 6,
    WAVETUNE_FP8_E4M3 = 7,
    WAVETUNE_FP8_E5M2 = 8,
} wavetune_dtype;

typedef enum wavetune_transpose { WAVETUNE_N = 0, WAVETUNE_T = 1 } wavetune_transpose;

typedef enum wavetune_activation {
    WAVETUNE_IDENTITY = 0,
    WAVETUNE_RELU = 1,
    WAVETUNE_GELU = 2, /* the tanh form */
    WAVETUNE_SILU = 3,
} wavetune_activation;

typedef struct wavetune_gemm_args {
    wavetune_transpose trans_a, trans_b;
    wavetune_dtype a_type, b_type, c_type, d_type, compute_type, bias_type;
    wavetune_activation activation;
    int64_t m, n, k, batch_count;
    int64_t lda, ldb, ldc, ldd;
    int64_t stride_a, stride_b, stride_c, stride_d; /* between the matrices of a batch; 0 shares A, B or C */
    double alpha, beta;
    const void *a, *b; /* not read where alpha is 0 */
    const void *c;     /* not read where beta is 0; may be d, with the same layout */
    void *d;
    const void *bias;            /* m elements of bias_type */
    const void *scale_a;         /* 1 element of compute_type, or NULL */
    const void *scale_b;         /* 1 element of compute_type, or NULL */
    const void *scale_alpha_vec; /* m elements of compute_type, or NULL */
} wavetune_gemm_args;

typedef struct wavetune_handle wavetune_handle;

/* Starts a team of `threads`; 0 means as many as the kernels were tuned with, or as there are processors if
 * those are fewer. */
wavetune_status wavetune_create(wavetune_handle **handle, int threads);

/* No call on the handle may be in progress. NULL is allowed. */
void wavetune_destroy(wavetune_handle *handle);

/* Fills in the usual for operands of one type: tight leading dimensions, one matrix, alpha 1, beta 0, no
 * epilogue, and results of the same type (i32 for i8, bf16 for fp8). Pointers are NULL. */
void wavetune_gemm_init(wavetune_gemm_args *args, wavetune_dtype type, wavetune_transpose trans_a,
                        wavetune_transpose trans_b, int64_t m, int64_t n, int64_t k);

/* Returns when D is complete. Any number of threads may use one handle at once: the first has the team, and
 * one that finds it busy runs the kernel by itself. Allocates only where a larger workspace is needed than
 * ever before. In a child of fork() a handle still works, on the calling thread. */
wavetune_status wavetune_gemm(wavetune_handle *handle, const wavetune_gemm_args *args);

/* The name of the kernel for these arguments, whose pointers are not looked at; NULL if there is none.
 * `*exact` says whether the very size was tuned; otherwise it is the kernel of the nearest size. */
const char *wavetune_kernel_name(const wavetune_gemm_args *args, int *exact);

int wavetune_threads(const wavetune_handle *handle);

/* One sentence. */
const char *wavetune_status_string(wavetune_status status);

/* What the kernels were compiled for, such as x86_64-v3. */
const char *wavetune_arch(void);

/* The identity of this export, as in its manifest.json. */
const char *wavetune_library_id(void);

#ifdef __cplusplus
}
#endif
#endif
