/* What the cpu device needs of C: guarded memory, launches on a team of threads, and their timing.
 * Loaded by tuner/device/cpu.py through ctypes.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>
#include "host_team.h"

#define EXPORT __attribute__((visibility("default")))

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

EXPORT host_team *launcher_team_create(int size) { return host_team_create(size); }
EXPORT void launcher_team_destroy(host_team *team) { host_team_destroy(team); }

/* Memory between two inaccessible pages. The last byte lies against the upper one, so that reading or
 * writing one element too far faults; the slack below the first byte is for the caller to check.
 * Returns the address of the first accessible byte, or NULL; the data starts at `*data`.
 */
EXPORT void *launcher_guarded_alloc(size_t bytes, void **data) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = round_up(bytes ? bytes : 1, page);
    char *base = mmap(NULL, body + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    if (mprotect(base + page, body, PROT_READ | PROT_WRITE)) {
        munmap(base, body + 2 * page);
        return NULL;
    }
    *data = base + page + body - bytes;
    return base + page;
}

EXPORT int launcher_guarded_protect(void *body, size_t bytes, int writable) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return mprotect(body, round_up(bytes ? bytes : 1, page), PROT_READ | (writable ? PROT_WRITE : 0));
}

EXPORT void launcher_guarded_free(void *body, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap((char *)body - page, round_up(bytes ? bytes : 1, page) + 2 * page);
}

/* Page-aligned memory for timing, in huge pages where the system has them, as large NumPy arrays are. */
EXPORT void *launcher_arena_alloc(size_t bytes) {
    void *arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(arena, bytes, MADV_HUGEPAGE);
#endif
    return arena;
}

EXPORT void launcher_arena_free(void *arena, size_t bytes) { munmap(arena, bytes); }

EXPORT void launcher_run(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *args) {
    host_team_run(team, kernel, args);
}

/* A team whose ranks start, and pass barriers, at different times: a kernel in which ranks race is right
 * by luck if they march in step. Odd values of `stagger` let rank 0 come last, even ones first; at
 * barriers the order changes each time.
 */
typedef struct staggered_team {
    tuner_team base;
    host_team *team;
    tuner_gemm_kernel *kernel;
    int stagger;
} staggered_team;

static staggered_team staggered;
static _Thread_local unsigned barriers_passed;

static void linger(int rank, unsigned step) {
    const double span_ns = 60e3;
    int last = staggered.base.size - 1;
    int place = ((unsigned)staggered.stagger + step) % 2 ? last - rank : rank;
    double until = now_ns() + (last ? span_ns * place / last : 0);
    while (now_ns() < until) TUNER_PAUSE();
}

static void staggered_barrier(tuner_team *base, int rank) {
    (void)base;
    linger(rank, ++barriers_passed);
    host_team_barrier(&staggered.team->base, rank);
}

static void staggered_kernel(const tuner_gemm_args *args, tuner_team *team, int rank) {
    (void)team;
    barriers_passed = 0;
    linger(rank, 0);
    staggered.kernel(args, &staggered.base, rank);
}

EXPORT void launcher_run_staggered(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *args,
                                   int stagger) {
    staggered = (staggered_team){{team->base.size, staggered_barrier}, team, kernel, stagger};
    host_team_run(team, staggered_kernel, args);
}

/* Times `samples` groups of `group` launches each and writes nanoseconds of one launch per group.
 * Launch i uses sets[(first + i) % set_count], so that a ring of operand sets larger than the cache
 * makes every launch find its operands in memory.
 */
EXPORT void launcher_time(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *sets,
                          int64_t set_count, int64_t first, int samples, int group, double *out_ns) {
    int64_t next = first % set_count;
    for (int s = 0; s < samples; s++) {
        double start = now_ns();
        for (int g = 0; g < group; g++) {
            host_team_run(team, kernel, &sets[next]);
            if (++next == set_count) next = 0;
        }
        out_ns[s] = (now_ns() - start) / group;
    }
}
