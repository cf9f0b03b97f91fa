/* SPDX-License-Identifier: Apache-2.0 */
/* What the sensors of a board make of its waveform: the energy counter and the power readings. */
#ifndef NVML_SIM_COUNTER_H
#define NVML_SIM_COUNTER_H

#include "view.h"

enum { SCOPE_GPU = 0, SCOPE_MODULE = 1 };

unsigned long long energy_mj(const View *view, uint32_t scope);
unsigned power_mw(const View *view, int averaged, uint32_t scope);

/* Drops what this process worked out about another world. */
void forget_counters(void);

/* Starts afresh in a process whose threads may have been in the middle of anything. */
void abandon_counters(void);

#endif
