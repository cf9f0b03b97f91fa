/* SPDX-License-Identifier: Apache-2.0 */
/* Pseudo-random numbers that are the same in every process and in Python (draw.py). */
#ifndef NVML_SIM_DRAW_H
#define NVML_SIM_DRAW_H

#include <stdint.h>

/* Output `index` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started from `seed`. */
static inline uint64_t draw(uint64_t seed, uint64_t index)
{
    uint64_t mixed = seed + (index + 1) * UINT64_C(0x9E3779B97F4A7C15);
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94D049BB133111EB);
    return mixed ^ mixed >> 31;
}

#endif
