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

/* A team whose ranks run one at a time from barrier to barrier: a kernel in which ranks race is right by
 * luck if they march in step. Odd values of `stagger` let rank 0 come last, even ones first; each barrier
 * turns the order round.
 */
typedef struct staggered_team {
    tuner_team base;
    host_team *team;
    tuner_gemm_kernel *kernel;
    unsigned stagger;
    atomic_uint turn; /* turns ended, in all phases */
} staggered_team;

static staggered_team staggered;
static _Thread_local unsigned staggered_phase;

static void staggered_await_turn(int rank) {
    unsigned size = (unsigned)staggered.base.size, place = (unsigned)rank, spins = 0;
    if ((staggered.stagger + staggered_phase) % 2) place = size - 1 - place;
    while (atomic_load(&staggered.turn) != staggered_phase * size + place) host_team_relax(&spins);
}

static void staggered_barrier(tuner_team *base, int rank) {
    (void)base;
    atomic_fetch_add(&staggered.turn, 1);
    staggered_phase++;
    staggered_await_turn(rank); /* the first turn of a phase comes when all ranks have ended the last */
}

static void staggered_kernel(const tuner_gemm_args *args, tuner_team *team, int rank) {
    (void)team;
    staggered_phase = 0;
    staggered_await_turn(rank);
    staggered.kernel(args, &staggered.base, rank);
    atomic_fetch_add(&staggered.turn, 1);
}

EXPORT void launcher_run_staggered(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *args,
                                   int stagger) {
    staggered.base = (tuner_team){team->base.size, staggered_barrier};
    staggered.team = team;
    staggered.kernel = kernel;
    staggered.stagger = (unsigned)stagger;
    atomic_store(&staggered.turn, 0);
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
