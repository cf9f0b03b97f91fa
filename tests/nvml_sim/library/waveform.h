/* SPDX-License-Identifier: Apache-2.0 */
/* True power and energy of a board, computed from its steps. Must agree with waveform.py. */
#ifndef NVML_SIM_WAVEFORM_H
#define NVML_SIM_WAVEFORM_H

#include "layout.h"

__extension__ typedef __int128 Wide;

/* Cumulative levels of the first b blocks of a noise step, in mW, for b < count. */
typedef struct {
    uint64_t *sums;
    uint64_t count, room;
} NoiseSums;

/*
 * The sums that one process has cached for the steps of one board. They stay valid, because steps are only
 * appended: `before[i]` is the energy in pJ until step i starts, for i < known.
 */
typedef struct {
    uint32_t known;
    Wide before[MAX_STEPS];
    NoiseSums noise[MAX_STEPS];
} StepSums;

typedef struct {
    const Step *steps;
    uint32_t count;
    StepSums *sums;
} Waveform;

/* The step in force at an instant, or -1 before the first. Takes O(log steps). */
int64_t step_at(const Waveform *wave, int64_t at_ns);

uint32_t power_at(const Waveform *wave, int64_t at_ns);

/* Energy in pJ from the first step until `end_ns`. The caller holds the lock of the sums. */
Wide energy_until(const Waveform *wave, int64_t end_ns);

void free_step_sums(StepSums *sums);

#endif
