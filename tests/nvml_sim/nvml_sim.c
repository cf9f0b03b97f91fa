/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libnvidia-ml.so.1 whose power waveform is known exactly.
 *
 * The state of the world is a file named by NVML_SIM_WORLD and mapped shared, so every process and
 * every thread sees the same boards. Time is CLOCK_MONOTONIC in nanoseconds, power is in milliwatts,
 * and energy is integrated in picojoules (mW x ns), in integers, so no rounding builds up.
 *
 * The layout belongs to layout.py. The assertions below pin each offset, a Python test compares them
 * with ctypes, and nvmlInit refuses a file whose header disagrees.
 *
 * Publication: a board's state has two slots and `seq` selects one. The writer fills the other slot
 * and bumps `seq`, so a stalled writer never blocks a reader and a reader that was overtaken retries.
 * Steps are only ever appended, beyond the count that the published state holds.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* --- the shared file ---------------------------------------------------------------------------- */

#define WORLD_MAGIC UINT64_C(0x314D49534C4D564E)
#define WORLD_VERSION 1u
#define MAX_BOARDS 16u
#define MAX_STEPS 4096u
#define MAX_PROCESSES 32u
#define MAX_MIG 8u
#define MAX_UNSUPPORTED 16u
#define THROTTLE_FIELDS 5u

enum {
    FLAG_ENERGY = 1,
    FLAG_LOST = 2,
    FLAG_MIG_CAPABLE = 4,
    FLAG_MIG_ENABLED = 8,
    FLAG_POWER_AVERAGED = 16,
    FLAG_POWER_USAGE = 32,
    FLAG_PERSISTENCE = 64
};

typedef struct {
    uint64_t magic;
    uint64_t file_size;
    _Atomic uint64_t init_count;
    uint32_t version;
    uint32_t header_size;
    uint32_t board_size;
    uint32_t state_size;
    uint32_t step_size;
    uint32_t board_count;
    _Atomic uint32_t init_result;
    int32_t cuda_driver_version;
    char driver_version[80];
    char nvml_version[80];
    uint8_t reserved[3880];
} Header;

typedef struct {
    int64_t start_ns;
    int64_t period_ns; /* 0: constant at low_mw */
    int64_t high_ns;   /* the high part comes first in each period */
    uint32_t low_mw;
    uint32_t high_mw;
} Step;

typedef struct {
    uint64_t used_memory;
    uint32_t pid;
    uint32_t graphics;
    uint32_t gpu_instance;
    uint32_t compute_instance;
} Process;

typedef struct {
    uint64_t memory_total;
    uint64_t memory_used;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    char uuid[96];
} Mig;

typedef struct {
    int64_t energy_offset_mj;
    int64_t latch_ns; /* 0: the counter moves continuously */
    int64_t latch_phase_ns;
    int64_t frozen_at_ns; /* INT64_MAX: not frozen */
    int64_t power_latch_ns;
    int64_t call_delay_ns;
    uint64_t memory_total;
    uint64_t memory_used;
    uint64_t event_reasons;
    uint64_t throttle_ns[THROTTLE_FIELDS];
    uint32_t energy_gain_ppm;
    uint32_t power_gain_ppm;
    uint32_t step_count;
    uint32_t flags;
    uint32_t power_limit_mw;
    uint32_t temperature_c;
    uint32_t scope_mask;
    uint32_t clocks_mhz[4];
    uint32_t capability[2];
    uint32_t architecture;
    uint32_t unsupported_count;
    uint32_t process_count;
    uint32_t mig_count;
    uint32_t unsupported[MAX_UNSUPPORTED];
    uint32_t padding;
    Process processes[MAX_PROCESSES];
    Mig migs[MAX_MIG];
    char uuid[96];
    char name[96];
    char pci_bus_id[32];
} State;

typedef struct {
    _Atomic uint64_t seq;
    _Atomic uint64_t calls;
    _Atomic uint64_t writing;
    State slots[2];
    Step steps[MAX_STEPS];
} Board;

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
#define SIZE(type, size) _Static_assert(sizeof(type) == (size), "sizeof " #type)
SIZE(Header, 4096);
AT(Header, magic, 0);
AT(Header, file_size, 8);
AT(Header, init_count, 16);
AT(Header, version, 24);
AT(Header, header_size, 28);
AT(Header, board_size, 32);
AT(Header, state_size, 36);
AT(Header, step_size, 40);
AT(Header, board_count, 44);
AT(Header, init_result, 48);
AT(Header, cuda_driver_version, 52);
AT(Header, driver_version, 56);
AT(Header, nvml_version, 136);
AT(Header, reserved, 216);
SIZE(Step, 32);
AT(Step, start_ns, 0);
AT(Step, period_ns, 8);
AT(Step, high_ns, 16);
AT(Step, low_mw, 24);
AT(Step, high_mw, 28);
SIZE(Process, 24);
AT(Process, used_memory, 0);
AT(Process, pid, 8);
AT(Process, graphics, 12);
AT(Process, gpu_instance, 16);
AT(Process, compute_instance, 20);
SIZE(Mig, 120);
AT(Mig, memory_total, 0);
AT(Mig, memory_used, 8);
AT(Mig, gpu_instance, 16);
AT(Mig, compute_instance, 20);
AT(Mig, uuid, 24);
SIZE(State, 2200);
AT(State, energy_offset_mj, 0);
AT(State, latch_ns, 8);
AT(State, latch_phase_ns, 16);
AT(State, frozen_at_ns, 24);
AT(State, power_latch_ns, 32);
AT(State, call_delay_ns, 40);
AT(State, memory_total, 48);
AT(State, memory_used, 56);
AT(State, event_reasons, 64);
AT(State, throttle_ns, 72);
AT(State, energy_gain_ppm, 112);
AT(State, power_gain_ppm, 116);
AT(State, step_count, 120);
AT(State, flags, 124);
AT(State, power_limit_mw, 128);
AT(State, temperature_c, 132);
AT(State, scope_mask, 136);
AT(State, clocks_mhz, 140);
AT(State, capability, 156);
AT(State, architecture, 164);
AT(State, unsupported_count, 168);
AT(State, process_count, 172);
AT(State, mig_count, 176);
AT(State, unsupported, 180);
AT(State, padding, 244);
AT(State, processes, 248);
AT(State, migs, 1016);
AT(State, uuid, 1976);
AT(State, name, 2072);
AT(State, pci_bus_id, 2168);
SIZE(Board, 135496);
AT(Board, seq, 0);
AT(Board, calls, 8);
AT(Board, writing, 16);
AT(Board, slots, 24);
AT(Board, steps, 4424);
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock inside an atomic could not be shared between processes");

/* --- the ABI: numbers and layouts that callers rely on ------------------------------------------- */

typedef int nvmlReturn_t;
typedef const void *nvmlDevice_t;

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25
};

enum { TYPE_UNSIGNED_INT = 1, TYPE_UNSIGNED_LONG_LONG = 3 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;

typedef struct {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    int value_type;
    nvmlReturn_t result;
    union {
        double d;
        unsigned ui;
        unsigned long long ull;
    } value;
} FieldValue;

SIZE(PciInfo, 68);
SIZE(Memory, 24);
SIZE(Memory2, 40);
SIZE(ProcessInfo, 24);
SIZE(FieldValue, 40);

/* --- one mapped world per process ---------------------------------------------------------------- */

static pthread_rwlock_t guard = PTHREAD_RWLOCK_INITIALIZER;
static unsigned references;
static Header *world;
static size_t world_bytes;

/* Handles are addresses in this table: stable across re-initialisation and never confused with data. */
#define HANDLES_PER_BOARD (1u + MAX_MIG)
static const char handles[MAX_BOARDS * HANDLES_PER_BOARD];

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static Board *board_at(unsigned index)
{
    return (Board *)((char *)world + sizeof(Header) + index * sizeof(Board));
}

static nvmlDevice_t handle_for(unsigned board, unsigned mig_plus_one)
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
    world = header;
    world_bytes = bytes;
    return OK;
}

/* A thread that was inside a query when the process forked does not exist in the child, so its read
 * lock would never be released there. */
static void reset_guard_in_child(void) { pthread_rwlock_init(&guard, NULL); }

__attribute__((constructor)) static void on_load(void)
{
    pthread_atfork(NULL, NULL, reset_guard_in_child);
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

/* Lets a test make sure that the library it talks to is this one and not a driver's. */
API unsigned nvml_sim_version(void) { return WORLD_VERSION; }

/* --- reading a board ------------------------------------------------------------------------------ */

typedef struct {
    State state;
    Board *board;
    int64_t now_ns;
    unsigned index;
    unsigned mig; /* 0: the board itself, else instance number + 1 */
} View;

/*
 * Copies the published state and takes the time at which it is valid.
 *
 * A writer that stamps a step with "now" raises `writing` before it looks at the clock. The reader
 * looks at the clock first, so seeing `writing` down and `seq` unmoved afterwards proves that no step
 * with an earlier stamp is still to come: a counter value is never revised after it was read. The
 * limit on waiting is for a writer that died half-way.
 */
static void take_snapshot(View *view)
{
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

static nvmlReturn_t fill_view(View *view)
{
    view->board = board_at(view->index);
    atomic_fetch_add(&view->board->calls, 1);
    take_snapshot(view);
    if (view->state.call_delay_ns > 0) {
        sleep_until(view->now_ns + view->state.call_delay_ns);
        take_snapshot(view);
    }
    if (view->state.flags & FLAG_LOST)
        return GPU_IS_LOST;
    int mig_on = (view->state.flags & FLAG_MIG_ENABLED) != 0;
    if (view->mig > 0 && (!mig_on || view->mig > view->state.mig_count))
        return NOT_FOUND;
    return OK;
}

/* Every query starts here and ends in done(): the lock keeps the mapping alive in between. */
static nvmlReturn_t begin(nvmlDevice_t device, View *view, const void *out)
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

static nvmlReturn_t begin_board(nvmlDevice_t device, View *view, const void *out)
{
    nvmlReturn_t result = begin(device, view, out);
    return result == OK && view->mig > 0 ? NOT_SUPPORTED : result;
}

static nvmlReturn_t done(nvmlReturn_t result)
{
    pthread_rwlock_unlock(&guard);
    return result;
}

static nvmlReturn_t copy_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

/* --- the waveform --------------------------------------------------------------------------------- */

__extension__ typedef unsigned __int128 Picojoules;

static Picojoules step_energy(const Step *step, int64_t duration_ns)
{
    uint64_t total = (uint64_t)duration_ns, high = 0;
    if (step->period_ns > 0) {
        uint64_t period = (uint64_t)step->period_ns, width = (uint64_t)step->high_ns;
        uint64_t rest = total % period;
        high = total / period * width + (rest < width ? rest : width);
    }
    return (Picojoules)high * step->high_mw + (Picojoules)(total - high) * step->low_mw;
}

static Picojoules energy_until(const View *view, int64_t end_ns)
{
    const Step *steps = view->board->steps;
    const uint32_t count = view->state.step_count;
    Picojoules sum = 0;
    for (uint32_t i = 0; i < count && steps[i].start_ns < end_ns; i++) {
        int64_t stop = i + 1 < count && steps[i + 1].start_ns < end_ns ? steps[i + 1].start_ns : end_ns;
        sum += step_energy(&steps[i], stop - steps[i].start_ns);
    }
    return sum;
}

static uint32_t power_at(const View *view, int64_t at_ns)
{
    const Step *steps = view->board->steps;
    uint32_t i = view->state.step_count;
    while (i > 0 && steps[i - 1].start_ns > at_ns)
        i--;
    if (i == 0)
        return 0;
    const Step *step = &steps[i - 1];
    int high = step->period_ns > 0 && (at_ns - step->start_ns) % step->period_ns < step->high_ns;
    return high ? step->high_mw : step->low_mw;
}

static int64_t latched(int64_t at_ns, int64_t period_ns, int64_t phase_ns)
{
    if (period_ns <= 0)
        return at_ns;
    int64_t since = (at_ns - phase_ns) % period_ns;
    return at_ns - (since < 0 ? since + period_ns : since);
}

static unsigned long long energy_mj(const View *view)
{
    const State *state = &view->state;
    int64_t at = view->now_ns < state->frozen_at_ns ? view->now_ns : state->frozen_at_ns;
    Picojoules true_pj = energy_until(view, latched(at, state->latch_ns, state->latch_phase_ns));
    /* mW x ns x ppm: divide once, at the end, so that the value is the floor of the exact product. */
    uint64_t counted = (uint64_t)(true_pj * state->energy_gain_ppm / UINT64_C(1000000000000000));
    return counted + (uint64_t)state->energy_offset_mj;
}

static unsigned power_mw(const View *view, int averaged)
{
    const State *state = &view->state;
    int64_t at = latched(view->now_ns, state->power_latch_ns, state->latch_phase_ns);
    const int64_t second = 1000000000;
    uint64_t mw = averaged ? (uint64_t)((energy_until(view, at) - energy_until(view, at - second)) / 1000000000)
                           : power_at(view, at);
    return (unsigned)(mw * state->power_gain_ppm / 1000000);
}

/* --- system --------------------------------------------------------------------------------------- */

API const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t begin_system(const void *out)
{
    pthread_rwlock_rdlock(&guard);
    if (world == NULL)
        return UNINITIALIZED;
    return out == NULL ? INVALID_ARGUMENT : OK;
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    nvmlReturn_t result = begin_system(version);
    return done(result == OK ? copy_text(version, length, world->driver_version) : result);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    nvmlReturn_t result = begin_system(version);
    return done(result == OK ? copy_text(version, length, world->nvml_version) : result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t result = begin_system(version);
    if (result == OK)
        *version = world->cuda_driver_version;
    return done(result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* --- enumeration ---------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    nvmlReturn_t result = begin_system(count);
    if (result == OK)
        *count = world->board_count;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    nvmlReturn_t result = begin_system(device);
    if (result == OK && index >= world->board_count)
        result = INVALID_ARGUMENT;
    if (result == OK) {
        View view = {.index = index};
        result = fill_view(&view);
    }
    if (result == OK)
        *device = handle_for(index, 0);
    return done(result);
}

/* Boards are searched in order, and a lost board is reported only if it is the one asked for. */
static nvmlReturn_t find(int (*matches)(const View *, const void *), const void *key, nvmlDevice_t *device)
{
    for (unsigned index = 0; index < world->board_count; index++) {
        View view = {.index = index};
        nvmlReturn_t state = fill_view(&view);
        unsigned instances = view.state.flags & FLAG_MIG_ENABLED ? view.state.mig_count : 0;
        for (view.mig = 0; view.mig <= instances; view.mig++) {
            if (!matches(&view, key))
                continue;
            if (state == OK)
                *device = handle_for(index, view.mig);
            return state;
        }
    }
    return NOT_FOUND;
}

static const char *uuid_of(const View *view)
{
    return view->mig > 0 ? view->state.migs[view->mig - 1].uuid : view->state.uuid;
}

static int uuid_matches(const View *view, const void *key) { return strcmp(uuid_of(view), key) == 0; }

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = begin_system(device);
    if (result == OK)
        result = uuid == NULL ? INVALID_ARGUMENT : find(uuid_matches, uuid, device);
    return done(result);
}

static int parse_bus_id(const char *text, unsigned parts[3])
{
    return sscanf(text, "%x:%x:%x", &parts[0], &parts[1], &parts[2]) == 3;
}

static int bus_id_matches(const View *view, const void *key)
{
    unsigned parts[3];
    return view->mig == 0 && parse_bus_id(view->state.pci_bus_id, parts) &&
           memcmp(parts, key, sizeof parts) == 0;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    unsigned parts[3];
    nvmlReturn_t result = begin_system(device);
    if (result == OK && (bus_id == NULL || !parse_bus_id(bus_id, parts)))
        result = INVALID_ARGUMENT;
    return done(result == OK ? find(bus_id_matches, parts, device) : result);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    View view;
    nvmlReturn_t result = begin(device, &view, uuid);
    return done(result == OK ? copy_text(uuid, length, uuid_of(&view)) : result);
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    View view;
    nvmlReturn_t result = begin(device, &view, name);
    return done(result == OK ? copy_text(name, length, view.state.name) : result);
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    View view;
    nvmlReturn_t result = begin(device, &view, index);
    if (result == OK)
        *index = view.mig > 0 ? view.mig - 1 : view.index;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, PciInfo *info)
{
    View view;
    unsigned parts[3];
    nvmlReturn_t result = begin_board(device, &view, info);
    if (result == OK && !parse_bus_id(view.state.pci_bus_id, parts))
        result = NOT_FOUND;
    if (result == OK) {
        memset(info, 0, sizeof *info);
        info->domain = parts[0];
        info->bus = parts[1];
        info->device = parts[2];
        snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", parts[0] & 0xFFFF,
                 parts[1] & 0xFF, parts[2] & 0xFF);
        snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", parts[0], parts[1] & 0xFF,
                 parts[2] & 0xFF);
    }
    return done(result);
}

/* --- memory and processes ------------------------------------------------------------------------- */

static void memory_of(const View *view, Memory *memory)
{
    const Mig *mig = view->mig > 0 ? &view->state.migs[view->mig - 1] : NULL;
    memory->total = mig ? mig->memory_total : view->state.memory_total;
    memory->used = mig ? mig->memory_used : view->state.memory_used;
    memory->free = memory->total - memory->used;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, Memory *memory)
{
    View view;
    nvmlReturn_t result = begin(device, &view, memory);
    if (result == OK)
        memory_of(&view, memory);
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, Memory2 *memory)
{
    View view;
    nvmlReturn_t result = begin(device, &view, memory);
    if (result == OK && memory->version != (sizeof(Memory2) | 2u << 24))
        result = ARGUMENT_VERSION_MISMATCH;
    if (result == OK) {
        Memory plain;
        memory_of(&view, &plain);
        memory->total = plain.total;
        memory->reserved = 0;
        memory->free = plain.free;
        memory->used = plain.used;
    }
    return done(result);
}

static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, ProcessInfo *out, uint32_t graphics)
{
    View view;
    nvmlReturn_t result = begin(device, &view, count);
    if (result != OK)
        return done(result);
    const unsigned room = out == NULL ? 0 : *count;
    unsigned found = 0;
    for (uint32_t i = 0; i < view.state.process_count && i < MAX_PROCESSES; i++) {
        const Process *process = &view.state.processes[i];
        if (process->graphics != graphics)
            continue;
        if (view.mig > 0 && process->gpu_instance != view.state.migs[view.mig - 1].gpu_instance)
            continue;
        if (found < room)
            out[found] = (ProcessInfo){process->pid, process->used_memory, process->gpu_instance,
                                       process->compute_instance};
        found++;
    }
    *count = found;
    return done(found > room ? INSUFFICIENT_SIZE : OK);
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, ProcessInfo *out)
{
    return processes(device, count, out, 0);
}

API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, ProcessInfo *out)
{
    return processes(device, count, out, 1);
}

/* --- power and energy ----------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, milliwatts);
    if (result == OK && !(view.state.flags & FLAG_POWER_USAGE))
        result = NOT_SUPPORTED;
    if (result == OK)
        *milliwatts = power_mw(&view, (view.state.flags & FLAG_POWER_AVERAGED) != 0);
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, milliwatts);
    if (result == OK)
        *milliwatts = view.state.power_limit_mw;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
}

API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, millijoules);
    if (result == OK && !(view.state.flags & FLAG_ENERGY))
        result = NOT_SUPPORTED;
    if (result == OK)
        *millijoules = energy_mj(&view);
    return done(result);
}

static void fill_field(const View *view, FieldValue *value)
{
    static const uint32_t throttle_fields[THROTTLE_FIELDS] = {74, 76, 269, 270, 271};
    const State *state = &view->state;
    value->result = NOT_SUPPORTED;
    for (uint32_t i = 0; i < state->unsupported_count && i < MAX_UNSUPPORTED; i++)
        if (state->unsupported[i] == value->field)
            return;
    int scoped = value->scope < 32 && (state->scope_mask >> value->scope & 1);
    switch (value->field) {
    case 83:
    case 191:
        if (view->mig > 0 || !(state->flags & FLAG_ENERGY) || (value->field == 191 && !scoped))
            return;
        value->value_type = TYPE_UNSIGNED_LONG_LONG;
        value->value.ull = energy_mj(view);
        break;
    case 185:
    case 186:
        if (view->mig > 0 || !scoped)
            return;
        value->value_type = TYPE_UNSIGNED_INT;
        value->value.ui = power_mw(view, value->field == 185);
        break;
    default: {
        unsigned i = 0;
        while (i < THROTTLE_FIELDS && throttle_fields[i] != value->field)
            i++;
        if (i == THROTTLE_FIELDS || view->mig > 0)
            return;
        value->value_type = TYPE_UNSIGNED_LONG_LONG;
        value->value.ull = state->throttle_ns[i];
    }
    }
    value->result = OK;
}

/* All fields of one call are evaluated at one instant; each still carries its own return code. */
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, FieldValue *values)
{
    View view;
    const int64_t entered = clock_ns(CLOCK_MONOTONIC);
    nvmlReturn_t result = begin(device, &view, values);
    if (result == OK && count < 1)
        result = INVALID_ARGUMENT;
    for (int i = 0; result == OK && i < count; i++) {
        values[i].timestamp_us = clock_ns(CLOCK_REALTIME) / 1000;
        fill_field(&view, &values[i]);
        values[i].latency_us = (clock_ns(CLOCK_MONOTONIC) - entered) / 1000;
    }
    return done(result);
}

/* --- condition ------------------------------------------------------------------------------------ */

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, celsius);
    if (result == OK && sensor != 0)
        result = INVALID_ARGUMENT;
    if (result == OK)
        *celsius = view.state.temperature_c;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, reasons);
    if (result == OK)
        *reasons = view.state.event_reasons;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned clock, unsigned *mhz)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, mhz);
    if (result == OK && clock > 3)
        result = INVALID_ARGUMENT;
    if (result == OK)
        *mhz = view.state.clocks_mhz[clock];
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, mode);
    if (result == OK)
        *mode = (view.state.flags & FLAG_PERSISTENCE) != 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    View view;
    nvmlReturn_t result = begin(device, &view, minor == NULL ? NULL : major);
    if (result == OK) {
        *major = (int)view.state.capability[0];
        *minor = (int)view.state.capability[1];
    }
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture)
{
    View view;
    nvmlReturn_t result = begin(device, &view, architecture);
    if (result == OK)
        *architecture = view.state.architecture;
    return done(result);
}

/* --- MIG ------------------------------------------------------------------------------------------ */

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, pending == NULL ? NULL : current);
    if (result == OK && !(view.state.flags & FLAG_MIG_CAPABLE))
        result = NOT_SUPPORTED;
    if (result == OK)
        *current = *pending = (view.state.flags & FLAG_MIG_ENABLED) != 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, count);
    if (result == OK)
        *count = view.state.flags & FLAG_MIG_CAPABLE ? MAX_MIG : 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, mig);
    if (result == OK && !(view.state.flags & FLAG_MIG_CAPABLE))
        result = NOT_SUPPORTED;
    if (result == OK && index >= MAX_MIG)
        result = INVALID_ARGUMENT;
    if (result == OK && (!(view.state.flags & FLAG_MIG_ENABLED) || index >= view.state.mig_count))
        result = NOT_FOUND;
    if (result == OK)
        *mig = handle_for(view.index, index + 1);
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    View view;
    nvmlReturn_t result = begin(mig, &view, device);
    if (result == OK && view.mig == 0)
        result = INVALID_ARGUMENT;
    if (result == OK)
        *device = handle_for(view.index, 0);
    return done(result);
}

API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig)
{
    View view;
    nvmlReturn_t result = begin(device, &view, is_mig);
    if (result == OK)
        *is_mig = view.mig > 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    View view;
    nvmlReturn_t result = begin(device, &view, id);
    if (result == OK && view.mig == 0)
        result = NOT_SUPPORTED;
    if (result == OK)
        *id = view.state.migs[view.mig - 1].gpu_instance;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    View view;
    nvmlReturn_t result = begin(device, &view, id);
    if (result == OK && view.mig == 0)
        result = NOT_SUPPORTED;
    if (result == OK)
        *id = view.state.migs[view.mig - 1].compute_instance;
    return done(result);
}
