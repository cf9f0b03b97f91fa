/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE

#include "view.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "counter.h"

static pthread_rwlock_t guard = PTHREAD_RWLOCK_INITIALIZER;
static unsigned references;
Header *world;
static size_t world_bytes;

/* Handles are addresses in this table: stable across re-initialisation and never confused with data. */
#define HANDLES_PER_BOARD (1u + MAX_MIG)
static const char handles[MAX_BOARDS * HANDLES_PER_BOARD];

int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static Board *board_at(unsigned index)
{
    return (Board *)((char *)world + sizeof(Header) + index * sizeof(Board));
}

nvmlDevice_t handle_for(unsigned board, unsigned mig_plus_one)
{
    return &handles[board * HANDLES_PER_BOARD + mig_plus_one];
}

static nvmlReturn_t map_world(void)
{
    const char *path = getenv("NVML_SIM_WORLD");
    if (path == NULL || *path == '\0')
        return DRIVER_NOT_LOADED;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return errno == EACCES ? NO_PERMISSION : DRIVER_NOT_LOADED;
    struct stat info;
    if (fstat(fd, &info) != 0 || info.st_size < (off_t)sizeof(Header)) {
        close(fd);
        return LIB_RM_VERSION_MISMATCH;
    }
    size_t bytes = (size_t)info.st_size;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return DRIVER_NOT_LOADED;
    Header *header = memory;
    int same_layout = header->magic == WORLD_MAGIC && header->version == WORLD_VERSION &&
                      header->header_size == sizeof(Header) && header->board_size == sizeof(Board) &&
                      header->state_size == sizeof(State) && header->step_size == sizeof(Step) &&
                      header->board_count <= MAX_BOARDS && header->file_size == bytes &&
                      bytes == sizeof(Header) + header->board_count * sizeof(Board);
    nvmlReturn_t result =
        same_layout ? (nvmlReturn_t)atomic_load(&header->init_result) : LIB_RM_VERSION_MISMATCH;
    if (result != OK) {
        munmap(memory, bytes);
        return result;
    }
    atomic_fetch_add(&header->init_count, 1);
    forget_counters();
    world = header;
    world_bytes = bytes;
    return OK;
}

/* A thread that was inside a query when the process forked does not exist in the child, so its locks
 * would never be released there. */
static void reset_locks_in_child(void)
{
    pthread_rwlock_init(&guard, NULL);
    abandon_counters();
}

__attribute__((constructor)) static void on_load(void)
{
    pthread_atfork(NULL, NULL, reset_locks_in_child);
}

API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn_t result = OK;
    pthread_rwlock_wrlock(&guard);
    if (world == NULL)
        result = map_world();
    if (result == OK)
        references++;
    pthread_rwlock_unlock(&guard);
    return result;
}

API nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t result = OK;
    pthread_rwlock_wrlock(&guard);
    if (references == 0) {
        result = UNINITIALIZED;
    } else if (--references == 0) {
        munmap(world, world_bytes);
        world = NULL;
    }
    pthread_rwlock_unlock(&guard);
    return result;
}

/* Lets a test check that it has loaded this library and not that of a driver. */
API unsigned nvml_sim_version(void) { return WORLD_VERSION; }

/*
 * Copies the published state and takes the time at which it is valid.
 *
 * A writer that stamps a step with "now" sets `writing` before it reads the clock. The reader reads
 * the clock first, so finding `writing` clear and `seq` unchanged afterwards proves that no step with
 * an earlier stamp is still to come: a counter value is never revised after it was read. The wait is
 * limited in case a writer died half-way.
 */
void take_snapshot(View *view)
{
    view->board = board_at(view->index);
    const int64_t give_up = clock_ns(CLOCK_MONOTONIC) + 500000000;
    for (;;) {
        uint64_t seq = atomic_load(&view->board->seq);
        memcpy(&view->state, &view->board->slots[seq & 1], sizeof(State));
        view->now_ns = clock_ns(CLOCK_MONOTONIC);
        atomic_thread_fence(memory_order_seq_cst);
        int settled = atomic_load(&view->board->writing) == 0 || view->now_ns > give_up;
        if (settled && atomic_load(&view->board->seq) == seq)
            return;
        sched_yield();
    }
}

static void sleep_until(int64_t deadline_ns)
{
    struct timespec at = {(time_t)(deadline_ns / 1000000000), (long)(deadline_ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
    }
}

static int is_lost(const View *view)
{
    for (uint32_t i = 0; i < view->state.fault_count; i++) {
        const Fault *fault = &view->board->faults[i];
        if (fault->kind == FAULT_LOST && fault->start_ns <= view->now_ns && view->now_ns < fault->end_ns)
            return 1;
    }
    return (view->state.flags & FLAG_LOST) != 0;
}

nvmlReturn_t fill_view(View *view)
{
    take_snapshot(view);
    const uint64_t call = atomic_fetch_add(&view->board->calls, 1) + 1;
    const State *state = &view->state;
    if (state->call_delay_ns > 0 && (state->call_delay_every < 2 || call % state->call_delay_every == 0)) {
        const int before = (state->flags & FLAG_DELAY_BEFORE) != 0;
        sleep_until(view->now_ns + state->call_delay_ns);
        if (before)
            take_snapshot(view);
    }
    if (is_lost(view))
        return GPU_IS_LOST;
    if (state->flags & FLAG_NO_PERMISSION)
        return NO_PERMISSION;
    int mig_on = (state->flags & FLAG_MIG_ENABLED) != 0;
    if (view->mig > 0 && (!mig_on || view->mig > state->mig_count))
        return NOT_FOUND;
    return OK;
}

nvmlReturn_t begin(nvmlDevice_t device, View *view, const void *out)
{
    pthread_rwlock_rdlock(&guard);
    if (world == NULL)
        return UNINITIALIZED;
    uintptr_t offset = (uintptr_t)device - (uintptr_t)handles;
    if (offset >= world->board_count * HANDLES_PER_BOARD || out == NULL)
        return INVALID_ARGUMENT;
    view->index = (unsigned)(offset / HANDLES_PER_BOARD);
    view->mig = (unsigned)(offset % HANDLES_PER_BOARD);
    return fill_view(view);
}

nvmlReturn_t begin_board(nvmlDevice_t device, View *view, const void *out)
{
    nvmlReturn_t result = begin(device, view, out);
    return result == OK && view->mig > 0 ? NOT_SUPPORTED : result;
}

nvmlReturn_t begin_change(nvmlDevice_t device, View *view)
{
    view->locked_fd = -1;
    nvmlReturn_t result = begin_board(device, view, view);
    if (result == OK && !(view->state.flags & FLAG_SETTINGS))
        return NOT_SUPPORTED;
    if (result == OK && view->state.flags & FLAG_SETTINGS_DENIED)
        return NO_PERMISSION;
    if (result != OK)
        return result;
    view->locked_fd = open(getenv("NVML_SIM_WORLD"), O_RDWR | O_CLOEXEC);
    if (view->locked_fd < 0 || flock(view->locked_fd, LOCK_EX) != 0)
        return GPU_IS_LOST;
    take_snapshot(view);
    return OK;
}

nvmlReturn_t end_change(View *view, nvmlReturn_t result)
{
    if (result == OK) {
        const uint64_t next = atomic_load(&view->board->seq) + 1;
        view->board->slots[next & 1] = view->state;
        atomic_store(&view->board->seq, next);
    }
    if (view->locked_fd >= 0)
        close(view->locked_fd);
    return done(result);
}

nvmlReturn_t begin_system(const void *out)
{
    pthread_rwlock_rdlock(&guard);
    if (world == NULL)
        return UNINITIALIZED;
    return out == NULL ? INVALID_ARGUMENT : OK;
}

nvmlReturn_t done(nvmlReturn_t result)
{
    pthread_rwlock_unlock(&guard);
    return result;
}

nvmlReturn_t copy_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}
