/* SPDX-License-Identifier: Apache-2.0 */
#include "counter.h"

#include <pthread.h>
#include <string.h>

#include "draw.h"
#include "waveform.h"

/* The counter is updated by tick k at phase + k * latch + (a fixed draw of k, below jitter). */
typedef struct {
    int64_t latch_ns;
    int64_t phase_ns;
    int64_t jitter_ns;
    uint64_t seed;
} Ticks;

/* A part-time sensor and the time since which it counts. */
typedef struct {
    Ticks ticks;
    int64_t window_ns;
    int64_t origin_ns;
} Sensor;

/* The cached sum of a part-time sensor in this process: up to tick k, from the first `count` steps. */
typedef struct {
    Sensor sensor;
    int64_t k;
    Wide sum;
    uint32_t count; /* 0: nothing summed yet */
} SensorSum;

typedef struct {
    pthread_mutex_t lock;
    int used;
    SensorSum sensor;
    StepSums steps;
} Memo;

/* Zero-initialised mutexes are unlocked. */
static Memo memos[MAX_BOARDS];

static Memo *lock_memo(unsigned index)
{
    pthread_mutex_lock(&memos[index].lock);
    memos[index].used = 1;
    return &memos[index];
}

static void unlock_memo(Memo *memo) { pthread_mutex_unlock(&memo->lock); }

static void clear_memo(Memo *memo)
{
    memset(memo, 0, sizeof *memo);
    pthread_mutex_init(&memo->lock, NULL);
}

void forget_counters(void)
{
    for (unsigned i = 0; i < MAX_BOARDS; i++) {
        if (!memos[i].used)
            continue;
        free_step_sums(&memos[i].steps);
        clear_memo(&memos[i]);
    }
}

void abandon_counters(void)
{
    for (unsigned i = 0; i < MAX_BOARDS; i++)
        if (memos[i].used)
            clear_memo(&memos[i]);
}

/* --- ticks ------------------------------------------------------------------------------------------ */

static int64_t tick_ns(const Ticks *ticks, int64_t k)
{
    const int64_t nominal = ticks->phase_ns + k * ticks->latch_ns;
    if (ticks->jitter_ns <= 0)
        return nominal;
    return nominal + (int64_t)(draw(ticks->seed, (uint64_t)k) % (uint64_t)ticks->jitter_ns);
}

/* The last tick at or before an instant. Jitter is below the latch, so ticks are in order. */
static int64_t last_tick(const Ticks *ticks, int64_t at_ns)
{
    const int64_t since = at_ns - ticks->phase_ns;
    const int64_t k = since / ticks->latch_ns - (since % ticks->latch_ns < 0);
    return tick_ns(ticks, k) > at_ns ? k - 1 : k;
}

/* --- the part-time sensor --------------------------------------------------------------------------- */

/* The contribution of tick k: the energy in the sensor's window times the interval, in pJ x ns. */
static Wide seen_at(const Sensor *sensor, const Waveform *wave, int64_t k)
{
    const int64_t at = tick_ns(&sensor->ticks, k), previous = tick_ns(&sensor->ticks, k - 1);
    const int64_t interval = at - (previous > sensor->origin_ns ? previous : sensor->origin_ns);
    return (energy_until(wave, at) - energy_until(wave, at - sensor->window_ns)) * interval;
}

/* Adds one tick, or all ticks up to k whose windows hold only the same constant power. */
static void advance(SensorSum *sum, const Waveform *wave, int64_t k)
{
    const Sensor *sensor = &sum->sensor;
    const int64_t from = sum->k + 1;
    const int64_t i = step_at(wave, tick_ns(&sensor->ticks, from) - sensor->window_ns);
    sum->k = from;
    if (i >= 0 && wave->steps[i].kind == STEP_CONSTANT) {
        int64_t last = k;
        if (i + 1 < wave->count) {
            const int64_t inside = last_tick(&sensor->ticks, wave->steps[i + 1].start_ns);
            last = inside < last ? inside : last;
        }
        if (last > from) {
            const int64_t length = tick_ns(&sensor->ticks, last) - tick_ns(&sensor->ticks, from);
            sum->sum += (Wide)wave->steps[i].low_mw * sensor->window_ns * length;
            sum->k = last;
        }
    }
    sum->sum += seen_at(sensor, wave, from);
}

/* The sum over all ticks after the origin, up to tick k. The last sum is cached: time mostly advances. */
static Wide seen_until(SensorSum *sum, const Sensor *sensor, Waveform *wave, int64_t k)
{
    if (sum->count == 0 || memcmp(&sum->sensor, sensor, sizeof *sensor) != 0)
        *sum = (SensorSum){*sensor, last_tick(&sensor->ticks, sensor->origin_ns), 0, wave->count};
    /* A backdated step changes the windows of later ticks: subtract them with the steps of that time. */
    if (sum->count < wave->count) {
        Waveform then = {wave->steps, sum->count, wave->sums};
        const int64_t unchanged = last_tick(&sensor->ticks, wave->steps[sum->count].start_ns);
        const int64_t first = last_tick(&sensor->ticks, sensor->origin_ns);
        while (sum->k > unchanged && sum->k > first)
            sum->sum -= seen_at(sensor, &then, sum->k--);
        sum->count = wave->count;
    }
    wave->count = sum->count;
    while (sum->k < k)
        advance(sum, wave, k);
    while (sum->k > k)
        sum->sum -= seen_at(sensor, wave, sum->k--);
    return sum->sum;
}

/* --- the energy counter ----------------------------------------------------------------------------- */

static const Reset *last_reset(const State *state, int64_t at_ns)
{
    uint32_t i = state->reset_count < MAX_RESETS ? state->reset_count : MAX_RESETS;
    while (i > 0 && state->resets[i - 1].at_ns > at_ns)
        i--;
    return i > 0 ? &state->resets[i - 1] : NULL;
}

/* The energy counted since the origin, in pJ x `*over`. */
static Wide counted(SensorSum *known, Waveform *wave, const Sensor *sensor, int64_t at_ns, int64_t *over)
{
    const Ticks *ticks = &sensor->ticks;
    *over = 1;
    if (at_ns <= sensor->origin_ns)
        return 0;
    if (ticks->latch_ns <= 0)
        return energy_until(wave, at_ns) - energy_until(wave, sensor->origin_ns);
    const int64_t k = last_tick(ticks, at_ns), tick = tick_ns(ticks, k);
    if (tick <= sensor->origin_ns)
        return 0;
    if (sensor->window_ns <= 0 || sensor->window_ns >= ticks->latch_ns)
        return energy_until(wave, tick) - energy_until(wave, sensor->origin_ns);
    *over = sensor->window_ns;
    return seen_until(known, sensor, wave, k);
}

/* When the counter was last updated, up to an instant. */
static int64_t update_ns(const Ticks *ticks, int64_t at_ns)
{
    return ticks->latch_ns > 0 ? tick_ns(ticks, last_tick(ticks, at_ns)) : at_ns;
}

static int touches(const Fault *fault, int64_t at_ns)
{
    return fault->start_ns <= at_ns && at_ns < fault->end_ns;
}

/* A counter that stands still shows what it did before. Faults are in time order. */
static int64_t shown_ns(const View *view, const Ticks *ticks, int64_t at_ns)
{
    for (uint32_t i = view->state.fault_count; i-- > 0;) {
        const Fault *fault = &view->board->faults[i];
        if ((fault->kind == FAULT_STALL || fault->kind == FAULT_LOSS) &&
            touches(fault, update_ns(ticks, at_ns)))
            at_ns = fault->start_ns - 1;
    }
    return at_ns;
}

/* The energy of the stretches in which the counter stood still and that it lost. */
static Wide lost(const View *view, SensorSum *known, Waveform *wave, const Sensor *sensor, int64_t at_ns)
{
    Wide sum = 0;
    int64_t over;
    for (uint32_t i = 0; i < view->state.fault_count; i++) {
        const Fault *fault = &view->board->faults[i];
        if (fault->kind == FAULT_LOSS && fault->end_ns <= update_ns(&sensor->ticks, at_ns))
            sum += counted(known, wave, sensor, fault->end_ns - 1, &over) -
                   counted(known, wave, sensor, fault->start_ns - 1, &over);
    }
    return sum;
}

/* By how much the counter is off since its origin. */
static int64_t fault_mj(const View *view, const Sensor *sensor, int64_t at_ns)
{
    int64_t sum = 0;
    for (uint32_t i = 0; i < view->state.fault_count; i++) {
        const Fault *fault = &view->board->faults[i];
        if (fault->kind == FAULT_OFFSET && fault->start_ns >= sensor->origin_ns &&
            touches(fault, update_ns(&sensor->ticks, at_ns)))
            sum += fault->offset_mj;
    }
    return sum;
}

static uint64_t gain_ppm(const State *state, uint32_t gain, uint32_t scope)
{
    return scope == SCOPE_MODULE ? (uint64_t)gain * state->module_factor_ppm / 1000000 : gain;
}

unsigned long long energy_mj(const View *view, uint32_t scope)
{
    const State *state = &view->state;
    const Ticks ticks = {state->latch_ns, state->latch_phase_ns, state->latch_jitter_ns, view->index};
    const int64_t unfrozen = view->now_ns < state->frozen_at_ns ? view->now_ns : state->frozen_at_ns;
    const int64_t at = shown_ns(view, &ticks, unfrozen);
    const Reset *reset = last_reset(state, at);
    int64_t origin = view->board->steps[0].start_ns, over;
    if (reset != NULL && reset->at_ns > origin)
        origin = reset->at_ns;
    const Sensor sensor = {ticks, state->sensor_window_ns, origin};

    Memo *memo = lock_memo(view->index);
    Waveform wave = {view->board->steps, state->step_count, &memo->steps};
    const Wide gone = lost(view, &memo->sensor, &wave, &sensor, at);
    const Wide sum = counted(&memo->sensor, &wave, &sensor, at, &over) - gone;
    unlock_memo(memo);

    /* mW x ns x ppm: divide once, at the end, so that the value is the floor of the exact product. */
    const Wide unit = (Wide)1000000000000000 * over;
    const uint64_t counted_mj = (uint64_t)(sum * (Wide)gain_ppm(state, state->energy_gain_ppm, scope) / unit);
    const int64_t offset_mj = state->energy_offset_mj - (reset != NULL ? reset->offset_mj : 0);
    return counted_mj + (uint64_t)(offset_mj + fault_mj(view, &sensor, at));
}

/* --- the power readings ----------------------------------------------------------------------------- */

/* The last power tick; power ticks have the counter's phase but no jitter. */
static int64_t power_instant(const State *state, int64_t now_ns)
{
    const Ticks ticks = {state->power_latch_ns, state->latch_phase_ns, 0, 0};
    return ticks.latch_ns > 0 ? tick_ns(&ticks, last_tick(&ticks, now_ns)) : now_ns;
}

unsigned power_mw(const View *view, int averaged, uint32_t scope)
{
    const State *state = &view->state;
    const int64_t window = averaged ? 1000000000 : state->power_window_ns;
    const int64_t at = power_instant(state, view->now_ns);
    Memo *memo = lock_memo(view->index);
    const Waveform wave = {view->board->steps, state->step_count, &memo->steps};
    const uint64_t mw =
        window > 0 ? (uint64_t)((energy_until(&wave, at) - energy_until(&wave, at - window)) / window)
                   : power_at(&wave, at);
    unlock_memo(memo);
    return (unsigned)(mw * gain_ppm(state, state->power_gain_ppm, scope) / 1000000);
}
