/* The runtime of an exported library: finds the kernel for a GEMM and runs it on a team of threads. */
#define _GNU_SOURCE
#include "wavetune.h"
#include "processor.h"
#include "host_team.h"
#include "table.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { CACHE_LINE = 64, REMEMBERED = 256 /* a power of two */ };

/* What one call needs for itself, kept for the next: the workspace, and which entry was nearest to sizes that
 * were not tuned. */
typedef struct context {
    struct context *next;
    void *workspace;
    int64_t bytes;
    struct {
        const type_entry *type; /* NULL where there is nothing yet */
        size_entry size;
    } nearest[REMEMBERED];
} context;

struct wavetune_handle {
    unsigned born;          /* `forks` when it was created: a child has no team */
    pthread_mutex_t busy;   /* held by the caller who has the team and its context */
    host_team *team;
    context team_context;
    pthread_mutex_t pooled; /* guards the pool */
    context *pool;          /* of callers who find the team busy */
};

static atomic_uint forks;
static pthread_once_t watch_forks_once = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

/* Finding the kernel */

/* One number for everything that a kernel is compiled for; tuner/export/table.py computes the same.
 * 0, which is no type's, where a value is out of range. */
static uint64_t type_code(const wavetune_gemm_args *g) {
    const unsigned values[] = {g->trans_a, g->trans_b, g->a_type, g->b_type, g->c_type, g->d_type, g->compute_type,
                               g->bias_type, g->activation, g->scale_a != NULL, g->scale_b != NULL,
                               g->scale_alpha_vec != NULL};
    uint64_t code = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        if (values[i] > 15) return 0;
        code = code << 4 | values[i];
    }
    return code;
}

static const type_entry *find_type(const wavetune_gemm_args *g) {
    const uint64_t code = type_code(g);
    for (int i = 0; i < wavetune_type_count; i++)
        if (wavetune_types[i].code == code) return &wavetune_types[i];
    return NULL;
}

/* Below, at or above 0 as a comes before, is or comes after b. */
static int order(const size_entry *a, const size_entry *b) {
    if (a->m != b->m) return a->m < b->m ? -1 : 1;
    if (a->n != b->n) return a->n < b->n ? -1 : 1;
    if (a->k != b->k) return a->k < b->k ? -1 : 1;
    return (a->batch_count > b->batch_count) - (a->batch_count < b->batch_count);
}

static const size_entry *find_exact(const type_entry *type, const size_entry *size) {
    int64_t low = type->first, high = type->first + type->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int compared = order(&wavetune_sizes[middle], size);
        if (compared == 0) return &wavetune_sizes[middle];
        if (compared < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

static double ratio(int64_t x, int64_t y) {
    return x > y ? (double)x / (double)y : (double)y / (double)x;
}

/* The tuned size with the smallest product of the ratios of m, n, k and batch_count: the nearest one on a
 * logarithmic scale. Of several the first in the table. tuner/export/table.py decides the same. */
static const size_entry *find_nearest(const type_entry *type, const size_entry *size) {
    const size_entry *best = NULL;
    double least = 0;
    for (int64_t i = type->first; i < type->first + type->count; i++) {
        const size_entry *tuned = &wavetune_sizes[i];
        const double distance = ratio(size->m, tuned->m) * ratio(size->n, tuned->n) * ratio(size->k, tuned->k) *
                                ratio(size->batch_count, tuned->batch_count);
        if (best == NULL || distance < least) {
            best = tuned;
            least = distance;
        }
    }
    return best;
}

static const kernel_entry *choose(const type_entry *type, size_entry size, context *own) {
    const size_entry *exact = find_exact(type, &size);
    if (exact) return &wavetune_kernels[exact->kernel];
    const uint64_t hash = (((uint64_t)size.m * 31 + (uint64_t)size.n) * 31 + (uint64_t)size.k) * 31;
    const size_t slot = ((hash + (uint64_t)size.batch_count) * 0x9e3779b97f4a7c15u >> 32) % REMEMBERED;
    if (own->nearest[slot].type != type || order(&own->nearest[slot].size, &size) != 0) {
        size.kernel = find_nearest(type, &size)->kernel;
        own->nearest[slot].type = type;
        own->nearest[slot].size = size;
    }
    return &wavetune_kernels[own->nearest[slot].size.kernel];
}

/* Checking the arguments */

/* Whether matrices of rows x columns may lie like this. `shared` allows one matrix for the whole batch. */
static int fits(int64_t rows, int64_t columns, int64_t ld, int64_t batch_count, int64_t stride, int shared) {
    int64_t span;
    if (ld < rows || ld < 1) return 0;
    if (rows == 0 || columns == 0) return 1;
    if (__builtin_mul_overflow(ld, columns - 1, &span) || __builtin_add_overflow(span, rows, &span)) return 0;
    return batch_count <= 1 || stride >= span || (shared && stride == 0);
}

/* Whether the product adds anything, or A and B are not to be read. */
static int has_product(const wavetune_gemm_args *g) { return g->k > 0 && g->alpha != 0; }

static int is_whole(double x) { return x >= -0x1p63 && x < 0x1p63 && (double)(int64_t)x == x; }

static int is_valid(const wavetune_gemm_args *g) {
    if (g->m < 0 || g->n < 0 || g->k < 0 || g->batch_count < 0) return 0;
    const int turned_a = g->trans_a == WAVETUNE_T, turned_b = g->trans_b == WAVETUNE_T;
    const int64_t rows_a = turned_a ? g->k : g->m, rows_b = turned_b ? g->n : g->k;
    const int64_t columns_a = turned_a ? g->m : g->k, columns_b = turned_b ? g->k : g->n;
    if (!fits(rows_a, columns_a, g->lda, g->batch_count, g->stride_a, 1)) return 0;
    if (!fits(rows_b, columns_b, g->ldb, g->batch_count, g->stride_b, 1)) return 0;
    if (g->beta != 0 && !fits(g->m, g->n, g->ldc, g->batch_count, g->stride_c, 1)) return 0;
    if (!fits(g->m, g->n, g->ldd, g->batch_count, g->stride_d, 0)) return 0;
    if (g->compute_type == WAVETUNE_I32 && !(is_whole(g->alpha) && is_whole(g->beta))) return 0;
    if (g->m == 0 || g->n == 0 || g->batch_count == 0) return 1;
    if (has_product(g) && (!g->a || !g->b)) return 0;
    if (g->beta != 0 && !g->c) return 0;
    if (g->bias_type != WAVETUNE_NONE && !g->bias) return 0;
    return g->d != NULL;
}

/* Running the kernel */

static int64_t round_up(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

static int reserve(context *own, int64_t bytes) {
    if (bytes <= own->bytes) return 1;
    free(own->workspace);
    own->workspace = aligned_alloc(CACHE_LINE, (size_t)bytes);
    own->bytes = own->workspace ? bytes : 0;
    return own->workspace != NULL;
}

static void run_on(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *args) {
    tuner_team alone = {1, host_team_barrier};
    if (team) host_team_run(team, kernel, args);
    else kernel(args, &alone, 0);
}

/* `team` is NULL for a caller who runs the kernel alone. */
static wavetune_status run(const wavetune_gemm_args *w, const type_entry *type, context *own, host_team *team) {
    const int team_size = team ? team->base.size : 1;
    tuner_gemm_args g = {
        .m = w->m, .n = w->n, .k = w->k, .batch_count = w->batch_count,
        .lda = w->lda, .ldb = w->ldb, .ldc = w->ldc, .ldd = w->ldd,
        .stride_a = w->stride_a, .stride_b = w->stride_b, .stride_c = w->stride_c, .stride_d = w->stride_d,
        .alpha = w->alpha, .beta = w->beta, .a = w->a, .b = w->b, .c = w->c, .d = w->d, .bias = w->bias,
        .scale_a = w->scale_a, .scale_b = w->scale_b, .scale_alpha_vec = w->scale_alpha_vec,
    };
    int64_t zeros = 0;
    if (!has_product(w)) { /* zeros stand for A and B, so that a kernel need not know of empty products */
        zeros = round_up((w->m > w->n ? w->m : w->n) * (int64_t)sizeof(double));
        g.k = 1;
        g.alpha = g.stride_a = g.stride_b = 0;
        g.lda = w->trans_a == WAVETUNE_T ? 1 : w->m;
        g.ldb = w->trans_b == WAVETUNE_T ? w->n : 1;
    }
    const kernel_entry *kernel = choose(type, (size_entry){g.m, g.n, g.k, g.batch_count, 0}, own);
    g.workspace_bytes = round_up(kernel->workspace(&g, team_size));
    if (!reserve(own, g.workspace_bytes + zeros)) return WAVETUNE_OUT_OF_MEMORY;
    g.workspace = own->workspace;
    if (zeros) g.a = g.b = memset((char *)own->workspace + g.workspace_bytes, 0, (size_t)zeros);
    run_on(team, kernel->run, &g);
    return WAVETUNE_SUCCESS;
}

static context *borrow(wavetune_handle *handle) {
    pthread_mutex_lock(&handle->pooled);
    context *own = handle->pool;
    if (own) handle->pool = own->next;
    pthread_mutex_unlock(&handle->pooled);
    return own ? own : calloc(1, sizeof *own);
}

static void give_back(wavetune_handle *handle, context *own) {
    pthread_mutex_lock(&handle->pooled);
    own->next = handle->pool;
    handle->pool = own;
    pthread_mutex_unlock(&handle->pooled);
}

EXPORT wavetune_status wavetune_gemm(wavetune_handle *handle, const wavetune_gemm_args *args) {
    if (!handle || !args) return WAVETUNE_INVALID_VALUE;
    const type_entry *type = find_type(args);
    if (!type) return WAVETUNE_NOT_SUPPORTED;
    if (!is_valid(args)) return WAVETUNE_INVALID_VALUE;
    if (args->m == 0 || args->n == 0 || args->batch_count == 0) return WAVETUNE_SUCCESS;
    wavetune_status status;
    if (atomic_load_explicit(&forks, memory_order_relaxed) != handle->born) {
        /* The locks may have been held by threads that a child of fork() does not have. */
        context *own = calloc(1, sizeof *own);
        if (!own) return WAVETUNE_OUT_OF_MEMORY;
        status = run(args, type, own, NULL);
        free(own->workspace);
        free(own);
    } else if (pthread_mutex_trylock(&handle->busy) == 0) {
        status = run(args, type, &handle->team_context, handle->team);
        pthread_mutex_unlock(&handle->busy);
    } else {
        context *own = borrow(handle);
        if (!own) return WAVETUNE_OUT_OF_MEMORY;
        status = run(args, type, own, NULL);
        give_back(handle, own);
    }
    return status;
}

EXPORT const char *wavetune_kernel_name(const wavetune_gemm_args *g, int *exact) {
    const type_entry *type = g ? find_type(g) : NULL;
    if (!type || g->m < 1 || g->n < 1 || g->k < 0 || g->batch_count < 1) return NULL;
    const size_entry size = {g->m, g->n, has_product(g) ? g->k : 1, g->batch_count, 0};
    const size_entry *found = find_exact(type, &size);
    if (exact) *exact = found != NULL;
    if (!found) found = find_nearest(type, &size);
    return wavetune_kernels[found->kernel].name;
}

/* Handles */

static int available_processors(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

EXPORT wavetune_status wavetune_create(wavetune_handle **handle, int threads) {
    if (!handle) return WAVETUNE_INVALID_VALUE;
    *handle = NULL;
    if (threads < 0 || threads > TUNER_MAX_TEAM) return WAVETUNE_INVALID_VALUE;
    if (wavetune_required_features & ~wavetune_processor_features()) return WAVETUNE_ARCH_MISMATCH;
    if (threads == 0) {
        const int available = available_processors();
        threads = wavetune_tuned_threads < available ? wavetune_tuned_threads : available;
    }
    wavetune_handle *made = calloc(1, sizeof *made);
    if (made) made->team = host_team_create(threads);
    if (!made || !made->team) {
        free(made);
        return WAVETUNE_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&made->busy, NULL);
    pthread_mutex_init(&made->pooled, NULL);
    pthread_once(&watch_forks_once, watch_forks);
    made->born = atomic_load(&forks);
    *handle = made;
    return WAVETUNE_SUCCESS;
}

EXPORT void wavetune_destroy(wavetune_handle *handle) {
    if (!handle) return;
    if (atomic_load(&forks) == handle->born) { /* a child has no threads to join, and leaves the memory */
        host_team_destroy(handle->team);
        pthread_mutex_destroy(&handle->busy);
        pthread_mutex_destroy(&handle->pooled);
    }
    free(handle->team_context.workspace);
    for (context *own = handle->pool, *next; own; own = next) {
        next = own->next;
        free(own->workspace);
        free(own);
    }
    free(handle);
}

static int64_t at_least_one(int64_t x) { return x > 1 ? x : 1; }

EXPORT void wavetune_gemm_init(wavetune_gemm_args *args, wavetune_dtype type, wavetune_transpose trans_a,
                               wavetune_transpose trans_b, int64_t m, int64_t n, int64_t k) {
    const int is_fp8 = type == WAVETUNE_FP8_E4M3 || type == WAVETUNE_FP8_E5M2;
    const wavetune_dtype result = type == WAVETUNE_I8 ? WAVETUNE_I32 : is_fp8 ? WAVETUNE_BF16 : type;
    const int is_own = type == WAVETUNE_F64 || type == WAVETUNE_I8;
    memset(args, 0, sizeof *args);
    args->trans_a = trans_a;
    args->trans_b = trans_b;
    args->a_type = args->b_type = type;
    args->c_type = args->d_type = result;
    args->compute_type = is_own ? result : WAVETUNE_F32;
    args->m = m;
    args->n = n;
    args->k = k;
    args->batch_count = 1;
    args->lda = at_least_one(trans_a == WAVETUNE_T ? k : m);
    args->ldb = at_least_one(trans_b == WAVETUNE_T ? n : k);
    args->ldc = args->ldd = at_least_one(m);
    args->alpha = 1;
}

EXPORT int wavetune_threads(const wavetune_handle *handle) { return handle ? handle->team->base.size : 0; }

EXPORT const char *wavetune_status_string(wavetune_status status) {
    switch (status) {
    case WAVETUNE_SUCCESS: return "success";
    case WAVETUNE_INVALID_VALUE: return "a pointer, size, leading dimension, stride or scalar is not valid";
    case WAVETUNE_NOT_SUPPORTED: return "the library has no kernel for these types, transposes and epilogue";
    case WAVETUNE_ARCH_MISMATCH: return "the kernels use instructions that this processor lacks";
    case WAVETUNE_OUT_OF_MEMORY: return "there is not enough memory, or no more threads can be started";
    }
    return "an unknown status";
}

EXPORT const char *wavetune_arch(void) { return wavetune_arch_name; }

EXPORT const char *wavetune_library_id(void) { return wavetune_id; }
