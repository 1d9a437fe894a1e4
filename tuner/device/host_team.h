/* A team of threads that run one kernel together, woken for each launch: the host's counterpart of a
 * GPU grid. Rank 0 is the calling thread. Waiting threads spin for about 100 us, because launches
 * follow each other closely and waking a sleeping thread costs as much as a small GEMM, then sleep.
 */
#ifndef TUNER_HOST_TEAM_H
#define TUNER_HOST_TEAM_H
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gemm_abi.h"

#if defined(__x86_64__)
#define TUNER_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define TUNER_PAUSE() __asm__ volatile("yield")
#else
#define TUNER_PAUSE() ((void)0)
#endif

enum { TUNER_MAX_TEAM = 1024, TUNER_SPINS_BEFORE_YIELD = 2000, TUNER_SPINS_BEFORE_SLEEP = 4000 };

typedef struct host_team {
    tuner_team base; /* first, so that a kernel's tuner_team* is a host_team* */
    tuner_gemm_kernel *kernel;
    const tuner_gemm_args *args;
    _Alignas(64) atomic_uint launch;   /* counts launches; a change wakes the team */
    _Alignas(64) atomic_int running;   /* ranks that have not finished this launch */
    _Alignas(64) atomic_int arrived;   /* ranks waiting at the barrier */
    _Alignas(64) atomic_uint phase;    /* counts barriers passed */
    _Alignas(64) atomic_int sleepers;
    atomic_int closing;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pthread_t threads[TUNER_MAX_TEAM];
} host_team;

typedef struct host_team_member {
    host_team *team;
    int rank;
} host_team_member;

static void host_team_relax(unsigned *spins) {
    if (++*spins < TUNER_SPINS_BEFORE_YIELD) TUNER_PAUSE();
    else sched_yield(); /* more threads than cores: let the others run */
}

static void host_team_barrier(tuner_team *base, int rank) {
    host_team *team = (host_team *)base;
    (void)rank;
    if (base->size == 1) return;
    unsigned phase = atomic_load_explicit(&team->phase, memory_order_acquire), spins = 0;
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == base->size) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&team->phase, memory_order_acquire) == phase) host_team_relax(&spins);
}

static void *host_team_main(void *argument) {
    host_team_member self = *(host_team_member *)argument;
    host_team *team = self.team;
    unsigned seen = 0;
    free(argument);
    for (;;) {
        unsigned spins = 0;
        while (atomic_load_explicit(&team->launch, memory_order_acquire) == seen) {
            if (spins < TUNER_SPINS_BEFORE_SLEEP) {
                host_team_relax(&spins);
                continue;
            }
            pthread_mutex_lock(&team->mutex);
            atomic_fetch_add(&team->sleepers, 1);
            while (atomic_load(&team->launch) == seen) pthread_cond_wait(&team->wake, &team->mutex);
            atomic_fetch_sub(&team->sleepers, 1);
            pthread_mutex_unlock(&team->mutex);
        }
        seen++;
        if (atomic_load(&team->closing)) return NULL;
        team->kernel(team->args, &team->base, self.rank);
        atomic_fetch_sub_explicit(&team->running, 1, memory_order_release);
    }
}

static void host_team_signal(host_team *team) {
    atomic_fetch_add(&team->launch, 1);
    if (atomic_load(&team->sleepers)) {
        pthread_mutex_lock(&team->mutex);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->mutex);
    }
}

/* Runs the kernel on all ranks and returns when all have finished. One caller at a time. */
static void host_team_run(host_team *team, tuner_gemm_kernel *kernel, const tuner_gemm_args *args) {
    unsigned spins = 0;
    if (team->base.size == 1) {
        kernel(args, &team->base, 0);
        return;
    }
    team->kernel = kernel;
    team->args = args;
    atomic_store_explicit(&team->running, team->base.size - 1, memory_order_relaxed);
    host_team_signal(team);
    kernel(args, &team->base, 0);
    while (atomic_load_explicit(&team->running, memory_order_acquire)) host_team_relax(&spins);
}

static void host_team_destroy(host_team *team) {
    if (!team) return;
    atomic_store(&team->closing, 1);
    host_team_signal(team);
    for (int rank = 1; rank < team->base.size; rank++) pthread_join(team->threads[rank], NULL);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->mutex);
    free(team);
}

/* Returns NULL where `size` is out of range or the threads cannot be had. */
static host_team *host_team_create(int size) {
    if (size < 1 || size > TUNER_MAX_TEAM) return NULL;
    size_t bytes = (sizeof(host_team) + 63) / 64 * 64;
    host_team *team = aligned_alloc(64, bytes);
    if (!team) return NULL;
    memset(team, 0, bytes);
    team->base.barrier = host_team_barrier;
    team->base.size = 1;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    for (int rank = 1; rank < size; rank++) {
        host_team_member *member = malloc(sizeof *member);
        if (member) *member = (host_team_member){team, rank};
        if (!member || pthread_create(&team->threads[rank], NULL, host_team_main, member)) {
            free(member);
            host_team_destroy(team);
            return NULL;
        }
        team->base.size = rank + 1;
    }
    return team;
}
#endif
