/* SPDX-License-Identifier: Apache-2.0 */
/* Power and energy of a board from its steps, apart from any sensor. Must agree with waveform.py. */
#ifndef NVML_SIM_WAVEFORM_H
#define NVML_SIM_WAVEFORM_H

#include "layout.h"

__extension__ typedef __int128 Wide;

/* The levels of the first b blocks of a noise step, added up, in mW, for b < count. */
typedef struct {
    uint64_t *sums;
    uint64_t count, room;
} NoiseSums;

/*
 * What one process has worked out about the steps of one board. It stays true, because steps are only
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

/* Energy in pJ from the first step until `end_ns`. The caller holds whatever guards the sums. */
Wide energy_until(const Waveform *wave, int64_t end_ns);

void free_step_sums(StepSums *sums);

#endif
