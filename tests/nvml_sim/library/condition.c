/* SPDX-License-Identifier: Apache-2.0 */
/* The condition of a board: memory, processes, temperature, clocks and throttling. */
#include <string.h>

#include "view.h"

/* Memory that the driver reserves on the board; MIG instances have none. */
static uint64_t reserved_of(const View *view)
{
    return view->mig > 0 ? 0 : (uint64_t)view->state.memory_reserved_mib << 20;
}

static void memory_of(const View *view, Memory *memory)
{
    const Mig *mig = view->mig > 0 ? &view->state.migs[view->mig - 1] : NULL;
    memory->total = mig ? mig->memory_total : view->state.memory_total;
    memory->used = (mig ? mig->memory_used : view->state.memory_used) + reserved_of(view);
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
        memory->reserved = reserved_of(&view);
        memory->free = plain.free;
        memory->used = plain.used - memory->reserved;
    }
    return done(result);
}

static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, ProcessInfo *out, uint32_t kind)
{
    View view;
    nvmlReturn_t result = begin(device, &view, count);
    if (result == OK && !(view.state.flags & FLAG_PROCESSES))
        result = NO_PERMISSION;
    if (result != OK)
        return done(result);
    const unsigned room = out == NULL ? 0 : *count;
    unsigned found = 0;
    for (uint32_t i = 0; i < view.state.process_count && i < MAX_PROCESSES; i++) {
        const Process *process = &view.state.processes[i];
        if (process->kind != kind)
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

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                         ProcessInfo *out)
{
    return processes(device, count, out, 0);
}

API nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                          ProcessInfo *out)
{
    return processes(device, count, out, 1);
}

API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                            ProcessInfo *out)
{
    return processes(device, count, out, 2);
}

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

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned clock, unsigned *mhz, int highest)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, mhz);
    if (result == OK && clock > 3)
        result = INVALID_ARGUMENT;
    if (result == OK)
        *mhz = highest ? view.state.max_clocks_mhz[clock] : view.state.clocks_mhz[clock];
    const uint16_t *locked = view.state.locked_clocks_mhz;
    if (result == OK && !highest && clock < 2 && locked[1] > 0)
        *mhz = *mhz < locked[0] ? locked[0] : *mhz > locked[1] ? locked[1] : *mhz;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned clock, unsigned *mhz)
{
    return clock_of(device, clock, mhz, 0);
}

API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned clock, unsigned *mhz)
{
    return clock_of(device, clock, mhz, 1);
}

/* Of the clock ids, 0 is the current clock and 3 the highest; application clocks are not simulated. */
API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned clock, unsigned id, unsigned *mhz)
{
    if (id == 0 || id == 3)
        return clock_of(device, clock, mhz, id == 3);
    View view;
    nvmlReturn_t result = begin_board(device, &view, mhz);
    return done(result != OK ? result : id > 3 ? INVALID_ARGUMENT : NOT_SUPPORTED);
}

static nvmlReturn_t lock_clocks(nvmlDevice_t device, unsigned lowest, unsigned highest)
{
    View view;
    nvmlReturn_t result = begin_change(device, &view);
    if (result == OK && (lowest > highest || highest > view.state.max_clocks_mhz[0]))
        result = INVALID_ARGUMENT;
    if (result == OK) {
        view.state.locked_clocks_mhz[0] = (uint16_t)lowest;
        view.state.locked_clocks_mhz[1] = (uint16_t)highest;
    }
    return end_change(&view, result);
}

API nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned lowest, unsigned highest)
{
    return lock_clocks(device, lowest, highest);
}

API nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) { return lock_clocks(device, 0, 0); }

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
