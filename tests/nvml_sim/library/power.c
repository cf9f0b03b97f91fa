/* SPDX-License-Identifier: Apache-2.0 */
/* The calls and fields for power, its limits and energy. */
#include "counter.h"
#include "view.h"

API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, milliwatts);
    if (result == OK && !(view.state.flags & FLAG_POWER_USAGE))
        result = NOT_SUPPORTED;
    if (result == OK)
        *milliwatts = power_mw(&view, (view.state.flags & FLAG_POWER_AVERAGED) != 0, SCOPE_GPU);
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

API nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, milliwatts);
    if (result == OK)
        *milliwatts = view.state.power_limit_default_mw;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *lowest,
                                                              unsigned *highest)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, highest == NULL ? NULL : lowest);
    if (result == OK) {
        *lowest = view.state.power_limit_min_mw;
        *highest = view.state.power_limit_max_mw;
    }
    return done(result);
}

API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts)
{
    View view;
    nvmlReturn_t result = begin_change(device, &view);
    if (result == OK &&
        (milliwatts < view.state.power_limit_min_mw || milliwatts > view.state.power_limit_max_mw))
        result = INVALID_ARGUMENT;
    if (result == OK)
        view.state.power_limit_mw = milliwatts;
    return end_change(&view, result);
}

static int answers_for(const State *state, uint32_t scope)
{
    return scope < 32 && (state->scope_mask >> scope & 1) != 0;
}

/* This call and field 83 have no scope: they apply to the GPU. */
static int has_gpu_energy(const State *state)
{
    return (state->flags & FLAG_ENERGY) != 0 && answers_for(state, SCOPE_GPU);
}

API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, millijoules);
    if (result == OK && !has_gpu_energy(&view.state))
        result = NOT_SUPPORTED;
    if (result == OK)
        *millijoules = energy_mj(&view, SCOPE_GPU);
    return done(result);
}

static int refuses(const State *state, uint32_t field)
{
    for (uint32_t i = 0; i < state->unsupported_count && i < MAX_UNSUPPORTED; i++)
        if (state->unsupported[i] == field)
            return 1;
    return 0;
}

static void fill_field(const View *view, FieldValue *value)
{
    static const uint32_t throttle_fields[THROTTLE_FIELDS] = {74, 76, 269, 270, 271};
    const State *state = &view->state;
    value->result = NOT_SUPPORTED;
    if (view->mig > 0 || refuses(state, value->field))
        return;
    switch (value->field) {
    case 83:
        if (!has_gpu_energy(state))
            return;
        value->value_type = TYPE_UNSIGNED_LONG_LONG;
        value->value.ull = energy_mj(view, SCOPE_GPU);
        break;
    case 191:
        if (!(state->flags & FLAG_ENERGY) || !answers_for(state, value->scope))
            return;
        value->value_type = TYPE_UNSIGNED_LONG_LONG;
        value->value.ull = energy_mj(view, value->scope);
        break;
    case 185:
    case 186:
        if (!answers_for(state, value->scope))
            return;
        value->value_type = TYPE_UNSIGNED_INT;
        value->value.ui = power_mw(view, value->field == 185, value->scope);
        break;
    default: {
        unsigned i = 0;
        while (i < THROTTLE_FIELDS && throttle_fields[i] != value->field)
            i++;
        if (i == THROTTLE_FIELDS)
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
        const int64_t age_ns = clock_ns(CLOCK_MONOTONIC) - view.now_ns;
        values[i].timestamp_us = (clock_ns(CLOCK_REALTIME) - age_ns) / 1000;
        fill_field(&view, &values[i]);
        values[i].latency_us = (clock_ns(CLOCK_MONOTONIC) - entered) / 1000;
    }
    return done(result);
}

/* Lets a test compute an ideal read of the counter at any time. */
API nvmlReturn_t nvml_sim_counter_mj(unsigned index, int64_t at_ns, unsigned scope,
                                     unsigned long long *millijoules)
{
    nvmlReturn_t result = begin_system(millijoules);
    if (result == OK && index >= world->board_count)
        result = INVALID_ARGUMENT;
    if (result == OK) {
        View view = {.index = index};
        take_snapshot(&view);
        view.now_ns = at_ns;
        *millijoules = energy_mj(&view, scope);
    }
    return done(result);
}

/* The same for the power readings: field 185 if `averaged`, else field 186. */
API nvmlReturn_t nvml_sim_power_mw(unsigned index, int64_t at_ns, unsigned averaged, unsigned scope,
                                   unsigned *milliwatts)
{
    nvmlReturn_t result = begin_system(milliwatts);
    if (result == OK && index >= world->board_count)
        result = INVALID_ARGUMENT;
    if (result == OK) {
        View view = {.index = index};
        take_snapshot(&view);
        view.now_ns = at_ns;
        *milliwatts = power_mw(&view, (int)averaged, scope);
    }
    return done(result);
}
