/* What table.c holds: the kernels, and which of them is for what. */
#ifndef WAVETUNE_TABLE_H
#define WAVETUNE_TABLE_H
#include "gemm_abi.h"

typedef struct kernel_entry {
    const char *name;
    tuner_gemm_kernel *run;
    tuner_gemm_workspace *workspace;
} kernel_entry;

/* A tuned size. Those of one type lie together, in ascending order of m, n, k and batch_count. */
typedef struct size_entry {
    int64_t m, n, k, batch_count;
    int64_t kernel;
} size_entry;

typedef struct type_entry {
    uint64_t code; /* as type_code() in wavetune.c computes it */
    int64_t first, count;
} type_entry;

extern const kernel_entry wavetune_kernels[];
extern const size_entry wavetune_sizes[];
extern const type_entry wavetune_types[];
extern const int wavetune_type_count;
extern const int wavetune_tuned_threads;
extern const char wavetune_arch_name[];
extern const char wavetune_id[];
#endif
