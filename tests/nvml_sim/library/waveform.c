/* SPDX-License-Identifier: Apache-2.0 */
#include "waveform.h"

#include <stdlib.h>

#include "draw.h"

#define NOISE_BLOCK 128u

static Wide floor_div(Wide value, Wide by) { return value / by - (value % by < 0); }

static uint32_t noise_level(const Step *step, uint64_t period)
{
    return step->low_mw + (uint32_t)(draw(step->seed, period) % ((uint64_t)step->high_mw - step->low_mw + 1));
}

static uint64_t add_levels(const Step *step, uint64_t from, uint64_t until)
{
    uint64_t sum = 0;
    for (uint64_t period = from; period < until; period++)
        sum += noise_level(step, period);
    return sum;
}

/* The sum of all levels before period `until`. Sums of whole blocks are cached. */
static uint64_t levels_before(const Step *step, NoiseSums *known, uint64_t until)
{
    const uint64_t block = until / NOISE_BLOCK;
    if (known->room <= block) {
        known->room = 2 * block + 64;
        known->sums = realloc(known->sums, known->room * sizeof *known->sums);
        if (known->sums == NULL)
            abort();
    }
    for (; known->count <= block; known->count++) {
        const uint64_t b = known->count;
        known->sums[b] =
            b == 0 ? 0 : known->sums[b - 1] + add_levels(step, (b - 1) * NOISE_BLOCK, b * NOISE_BLOCK);
    }
    return known->sums[block] + add_levels(step, block * NOISE_BLOCK, until);
}

/* Energy in pJ over the first `spent` ns of a step. */
static Wide step_energy(const Step *step, NoiseSums *noise, uint64_t spent)
{
    const uint64_t period = (uint64_t)step->period_ns, high = (uint64_t)step->high_ns;
    const Wide rise = (Wide)step->high_mw - step->low_mw;
    switch (step->kind) {
    case STEP_BURST: {
        const uint64_t rest = spent % period;
        const uint64_t above = spent / period * high + (rest < high ? rest : high);
        return (Wide)spent * step->low_mw + above * rise;
    }
    case STEP_RAMP: {
        /* Rounded down as a function of the time since the start, so that differences do not drift. */
        const Wide run = spent < period ? spent : period;
        const Wide triangle = floor_div(rise * run * run, 2 * (Wide)period);
        return spent * (Wide)step->low_mw + triangle + (spent - run) * rise;
    }
    case STEP_DECAY: {
        /* What is above the end halves in each period, in a straight line; rounded down as a ramp. */
        const uint64_t run = spent < DECAY_PERIODS * period ? spent : DECAY_PERIODS * period;
        const uint64_t whole = run / period, rest = run % period;
        const Wide area = 6 * (Wide)period * period * ((1 << whole) - 1) + (4 * (Wide)period - rest) * rest;
        return spent * (Wide)step->high_mw + floor_div(-rise * area, 4 * (Wide)period << whole);
    }
    case STEP_NOISE: {
        const uint64_t whole = spent / period;
        return (Wide)levels_before(step, noise, whole) * period +
               (Wide)noise_level(step, whole) * (spent % period);
    }
    default: return (Wide)spent * step->low_mw;
    }
}

static uint32_t step_power(const Step *step, int64_t spent)
{
    switch (step->kind) {
    case STEP_BURST: return spent % step->period_ns < step->high_ns ? step->high_mw : step->low_mw;
    case STEP_RAMP: {
        const Wide rise = (Wide)step->high_mw - step->low_mw;
        if (spent >= step->period_ns)
            return step->high_mw;
        return (uint32_t)(step->low_mw + floor_div(rise * spent, step->period_ns));
    }
    case STEP_DECAY: {
        const Wide fall = (Wide)step->low_mw - step->high_mw;
        const int64_t whole = spent / step->period_ns, rest = spent % step->period_ns;
        if (whole >= DECAY_PERIODS)
            return step->high_mw;
        const Wide above = floor_div(fall * (2 * step->period_ns - rest), 2 * (Wide)step->period_ns << whole);
        return (uint32_t)(step->high_mw + above);
    }
    case STEP_NOISE: return noise_level(step, (uint64_t)(spent / step->period_ns));
    default: return step->low_mw;
    }
}

int64_t step_at(const Waveform *wave, int64_t at_ns)
{
    int64_t low = 0, high = wave->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (wave->steps[middle].start_ns <= at_ns)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

uint32_t power_at(const Waveform *wave, int64_t at_ns)
{
    const int64_t i = step_at(wave, at_ns);
    return i < 0 ? 0 : step_power(&wave->steps[i], at_ns - wave->steps[i].start_ns);
}

static Wide energy_before(const Waveform *wave, uint32_t i)
{
    StepSums *sums = wave->sums;
    for (; sums->known <= i; sums->known++) {
        const uint32_t next = sums->known;
        if (next == 0) {
            sums->before[0] = 0;
            continue;
        }
        const Step *step = &wave->steps[next - 1];
        const uint64_t length = (uint64_t)(wave->steps[next].start_ns - step->start_ns);
        sums->before[next] = sums->before[next - 1] + step_energy(step, &sums->noise[next - 1], length);
    }
    return sums->before[i];
}

Wide energy_until(const Waveform *wave, int64_t end_ns)
{
    const int64_t i = step_at(wave, end_ns);
    if (i < 0)
        return 0;
    const uint64_t spent = (uint64_t)(end_ns - wave->steps[i].start_ns);
    return energy_before(wave, (uint32_t)i) + step_energy(&wave->steps[i], &wave->sums->noise[i], spent);
}

void free_step_sums(StepSums *sums)
{
    for (uint32_t i = 0; i < MAX_STEPS; i++)
        free(sums->noise[i].sums);
}
