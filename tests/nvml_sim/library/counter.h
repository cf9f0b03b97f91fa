/* SPDX-License-Identifier: Apache-2.0 */
/* The sensors of a board: its energy counter and its power readings. */
#ifndef NVML_SIM_COUNTER_H
#define NVML_SIM_COUNTER_H

#include "view.h"

enum { SCOPE_GPU = 0, SCOPE_MODULE = 1 };

unsigned long long energy_mj(const View *view, uint32_t scope);
unsigned power_mw(const View *view, int averaged, uint32_t scope);

/* Drops the sums that this process cached for another world. */
void forget_counters(void);

/* Reinitialises the cache and its locks in a forked child, where other threads no longer exist. */
void abandon_counters(void);

#endif
