/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The world file: the state that every process and every thread sees, mapped shared.
 *
 * The layout belongs to layout.py. The assertions below pin each offset, a Python test compares them
 * with ctypes, and nvmlInit refuses a file whose header disagrees.
 *
 * Time is CLOCK_MONOTONIC in nanoseconds, power is in milliwatts, and energy is integrated in
 * picojoules (mW x ns), in integers, so no rounding builds up.
 *
 * Publication: a board's state has two slots and `seq` selects one. The writer fills the other slot
 * and bumps `seq`, so a stalled writer never blocks a reader and a reader that was overtaken retries.
 * Steps and faults are only ever appended, beyond the count that the published state holds.
 */
#ifndef NVML_SIM_LAYOUT_H
#define NVML_SIM_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define WORLD_MAGIC UINT64_C(0x314D49534C4D564E)
#define WORLD_VERSION 6u
#define MAX_BOARDS 16u
#define MAX_STEPS 4096u
#define MAX_PROCESSES 32u
#define MAX_MIG 8u
#define MAX_UNSUPPORTED 16u
#define MAX_RESETS 32u
#define MAX_FAULTS 64u
#define DECAY_PERIODS 24
#define THROTTLE_FIELDS 5u

enum {
    FLAG_ENERGY = 1,
    FLAG_LOST = 2,
    FLAG_MIG_CAPABLE = 4,
    FLAG_MIG_ENABLED = 8,
    FLAG_POWER_AVERAGED = 16,
    FLAG_POWER_USAGE = 32,
    FLAG_PERSISTENCE = 64,
    FLAG_NO_PERMISSION = 128,
    FLAG_DELAY_BEFORE = 256,
    FLAG_PROCESSES = 512,
    FLAG_SETTINGS = 1024,
    FLAG_SETTINGS_DENIED = 2048
};

enum { STEP_CONSTANT = 0, STEP_BURST = 1, STEP_RAMP = 2, STEP_NOISE = 3, STEP_DECAY = 4 };

enum { FAULT_OFFSET = 0, FAULT_STALL = 1, FAULT_LOSS = 2, FAULT_LOST = 3 };

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
    int64_t period_ns; /* burst and noise: the period; ramp: the duration; decay: time to halve */
    int64_t high_ns;   /* burst: the high part, which comes first in each period */
    uint64_t seed;     /* noise */
    uint32_t low_mw;   /* constant: the power; ramp and decay: at its start */
    uint32_t high_mw;  /* ramp and decay: at its end and from then on */
    uint32_t kind;
    uint32_t padding;
} Step;

typedef struct {
    int64_t at_ns;
    int64_t offset_mj; /* the energy offset that no longer applies from then on */
} Reset;

/* Something wrong from start to end: boards.py says what each kind does. */
typedef struct {
    int64_t start_ns;
    int64_t end_ns;
    int64_t offset_mj;
    uint32_t kind;
    uint32_t padding;
} Fault;

typedef struct {
    uint64_t used_memory;
    uint32_t pid;
    uint32_t kind; /* 0 compute, 1 graphics, 2 client of MPS */
    uint32_t gpu_instance;
    uint32_t compute_instance;
} Process;

typedef struct {
    uint64_t memory_total;
    uint64_t memory_used;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t gpu_slices;
    uint32_t compute_slices;
    char uuid[96];
} Mig;

typedef struct {
    int64_t energy_offset_mj;
    int64_t latch_ns; /* 0: the counter moves continuously */
    int64_t latch_phase_ns;
    int64_t latch_jitter_ns;
    int64_t sensor_window_ns; /* 0 or >= latch_ns: the sensor samples all the time */
    int64_t frozen_at_ns; /* INT64_MAX: not frozen */
    int64_t power_latch_ns;
    int64_t power_window_ns; /* 0: the power at an instant */
    int64_t call_delay_ns;
    uint64_t memory_total;
    uint64_t memory_used;
    uint64_t event_reasons;
    uint64_t throttle_ns[THROTTLE_FIELDS];
    uint32_t energy_gain_ppm;
    uint32_t power_gain_ppm;
    uint32_t module_factor_ppm;
    uint32_t call_delay_every; /* 0 or 1: every call is slow */
    uint32_t step_count;
    uint32_t flags;
    uint32_t power_limit_mw;
    uint32_t power_limit_min_mw;
    uint32_t power_limit_max_mw;
    uint32_t power_limit_default_mw;
    uint32_t temperature_c;
    uint32_t scope_mask;
    uint32_t clocks_mhz[4];
    uint32_t max_clocks_mhz[4];
    uint32_t capability[2];
    uint32_t architecture;
    uint32_t unsupported_count;
    uint32_t process_count;
    uint32_t mig_count;
    uint32_t reset_count;
    uint32_t fault_count;
    uint32_t unsupported[MAX_UNSUPPORTED];
    uint32_t memory_reserved_mib;
    uint16_t locked_clocks_mhz[2]; /* lowest and highest graphics clock; 0: not locked */
    Reset resets[MAX_RESETS];
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
    Fault faults[MAX_FAULTS];
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
SIZE(Step, 48);
AT(Step, start_ns, 0);
AT(Step, period_ns, 8);
AT(Step, high_ns, 16);
AT(Step, seed, 24);
AT(Step, low_mw, 32);
AT(Step, high_mw, 36);
AT(Step, kind, 40);
AT(Step, padding, 44);
SIZE(Reset, 16);
AT(Reset, at_ns, 0);
AT(Reset, offset_mj, 8);
SIZE(Fault, 32);
AT(Fault, start_ns, 0);
AT(Fault, end_ns, 8);
AT(Fault, offset_mj, 16);
AT(Fault, kind, 24);
AT(Fault, padding, 28);
SIZE(Process, 24);
AT(Process, used_memory, 0);
AT(Process, pid, 8);
AT(Process, kind, 12);
AT(Process, gpu_instance, 16);
AT(Process, compute_instance, 20);
SIZE(Mig, 128);
AT(Mig, memory_total, 0);
AT(Mig, memory_used, 8);
AT(Mig, gpu_instance, 16);
AT(Mig, compute_instance, 20);
AT(Mig, gpu_slices, 24);
AT(Mig, compute_slices, 28);
AT(Mig, uuid, 32);
SIZE(State, 2848);
AT(State, energy_offset_mj, 0);
AT(State, latch_ns, 8);
AT(State, latch_phase_ns, 16);
AT(State, latch_jitter_ns, 24);
AT(State, sensor_window_ns, 32);
AT(State, frozen_at_ns, 40);
AT(State, power_latch_ns, 48);
AT(State, power_window_ns, 56);
AT(State, call_delay_ns, 64);
AT(State, memory_total, 72);
AT(State, memory_used, 80);
AT(State, event_reasons, 88);
AT(State, throttle_ns, 96);
AT(State, energy_gain_ppm, 136);
AT(State, power_gain_ppm, 140);
AT(State, module_factor_ppm, 144);
AT(State, call_delay_every, 148);
AT(State, step_count, 152);
AT(State, flags, 156);
AT(State, power_limit_mw, 160);
AT(State, power_limit_min_mw, 164);
AT(State, power_limit_max_mw, 168);
AT(State, power_limit_default_mw, 172);
AT(State, temperature_c, 176);
AT(State, scope_mask, 180);
AT(State, clocks_mhz, 184);
AT(State, max_clocks_mhz, 200);
AT(State, capability, 216);
AT(State, architecture, 224);
AT(State, unsupported_count, 228);
AT(State, process_count, 232);
AT(State, mig_count, 236);
AT(State, reset_count, 240);
AT(State, fault_count, 244);
AT(State, unsupported, 248);
AT(State, memory_reserved_mib, 312);
AT(State, locked_clocks_mhz, 316);
AT(State, resets, 320);
AT(State, processes, 832);
AT(State, migs, 1600);
AT(State, uuid, 2624);
AT(State, name, 2720);
AT(State, pci_bus_id, 2816);
SIZE(Board, 204376);
AT(Board, seq, 0);
AT(Board, calls, 8);
AT(Board, writing, 16);
AT(Board, slots, 24);
AT(Board, steps, 5720);
AT(Board, faults, 202328);
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock inside an atomic could not be shared between processes");

#endif
