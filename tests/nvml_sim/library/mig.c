/* SPDX-License-Identifier: Apache-2.0 */
/* MIG: the mode, and the instances of a board. */
#include <string.h>

#include "view.h"

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, pending == NULL ? NULL : current);
    if (result == OK && !(view.state.flags & FLAG_MIG_CAPABLE))
        result = NOT_SUPPORTED;
    if (result == OK)
        *current = *pending = (view.state.flags & FLAG_MIG_ENABLED) != 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, count);
    if (result == OK)
        *count = view.state.flags & FLAG_MIG_CAPABLE ? MAX_MIG : 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    View view;
    nvmlReturn_t result = begin_board(device, &view, mig);
    if (result == OK && !(view.state.flags & FLAG_MIG_CAPABLE))
        result = NOT_SUPPORTED;
    if (result == OK && index >= MAX_MIG)
        result = INVALID_ARGUMENT;
    if (result == OK && (!(view.state.flags & FLAG_MIG_ENABLED) || index >= view.state.mig_count))
        result = NOT_FOUND;
    if (result == OK)
        *mig = handle_for(view.index, index + 1);
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    View view;
    nvmlReturn_t result = begin(mig, &view, device);
    if (result == OK && view.mig == 0)
        result = INVALID_ARGUMENT;
    if (result == OK)
        *device = handle_for(view.index, 0);
    return done(result);
}

API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig)
{
    View view;
    nvmlReturn_t result = begin(device, &view, is_mig);
    if (result == OK)
        *is_mig = view.mig > 0;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    View view;
    nvmlReturn_t result = begin(device, &view, id);
    if (result == OK && view.mig == 0)
        result = NOT_SUPPORTED;
    if (result == OK)
        *id = view.state.migs[view.mig - 1].gpu_instance;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    View view;
    nvmlReturn_t result = begin(device, &view, id);
    if (result == OK && view.mig == 0)
        result = NOT_SUPPORTED;
    if (result == OK)
        *id = view.state.migs[view.mig - 1].compute_instance;
    return done(result);
}

/* Answers only for MIG devices, as the driver does. */
API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, Attributes *attributes)
{
    View view;
    nvmlReturn_t result = begin(device, &view, attributes);
    const Mig *mig = result == OK && view.mig > 0 ? &view.state.migs[view.mig - 1] : NULL;
    if (result == OK && (mig == NULL || mig->gpu_slices == 0))
        result = NOT_SUPPORTED;
    if (result == OK) {
        memset(attributes, 0, sizeof *attributes);
        attributes->gpu_slices = mig->gpu_slices;
        attributes->compute_slices = mig->compute_slices;
        attributes->memory_mib = mig->memory_total >> 20;
    }
    return done(result);
}
