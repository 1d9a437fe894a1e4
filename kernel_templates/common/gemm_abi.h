/* The interface of every host GEMM kernel. A kernel is called by all threads of a team at once, as a
 * GPU kernel is by its workgroups: it never creates threads and never allocates.
 *
 *   D = act(alpha * scale_a * scale_b * scale_alpha_vec[i] * op(A) * op(B) + beta * C + bias[i])
 *
 * Column-major; leading dimensions and strides count elements. C is not read where beta is 0.
 * Pointers are aligned to their element type only.
 */
#ifndef TUNER_GEMM_ABI_H
#define TUNER_GEMM_ABI_H
#include <stdint.h>

typedef struct tuner_gemm_args {
    int64_t m, n, k, batch_count;
    int64_t lda, ldb, ldc, ldd;
    int64_t stride_a, stride_b, stride_c, stride_d;
    double alpha, beta;
    const void *a, *b, *c;
    void *d;
    const void *bias;            /* m elements, or NULL */
    const void *scale_a;         /* 1 element of the compute type, or NULL */
    const void *scale_b;         /* 1 element of the compute type, or NULL */
    const void *scale_alpha_vec; /* m elements of the compute type, or NULL */
    void *workspace;             /* what the kernel's _workspace function asked for; 64-byte aligned */
    int64_t workspace_bytes;
} tuner_gemm_args;

/* Threads that run one kernel together. `barrier` returns once all `size` ranks have called it; nowhere else
 * may a rank wait for another, because validation runs them one at a time between barriers.
 */
typedef struct tuner_team {
    int size;
    void (*barrier)(struct tuner_team *team, int rank);
} tuner_team;

typedef void tuner_gemm_kernel(const tuner_gemm_args *args, tuner_team *team, int rank);
typedef int64_t tuner_gemm_workspace(const tuner_gemm_args *args, int team_size);
#endif
