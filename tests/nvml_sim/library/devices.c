/* SPDX-License-Identifier: Apache-2.0 */
/* The system and its devices: versions, enumeration, identity. */
#include <stdio.h>
#include <string.h>

#include "view.h"

API const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    nvmlReturn_t result = begin_system(version);
    return done(result == OK ? copy_text(version, length, world->driver_version) : result);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    nvmlReturn_t result = begin_system(version);
    return done(result == OK ? copy_text(version, length, world->nvml_version) : result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t result = begin_system(version);
    if (result == OK)
        *version = world->cuda_driver_version;
    return done(result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    nvmlReturn_t result = begin_system(count);
    if (result == OK)
        *count = world->board_count;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    nvmlReturn_t result = begin_system(device);
    if (result == OK && index >= world->board_count)
        result = INVALID_ARGUMENT;
    if (result == OK) {
        View view = {.index = index};
        result = fill_view(&view);
    }
    if (result == OK)
        *device = handle_for(index, 0);
    return done(result);
}

/* Boards are searched in order, and a lost board is reported only if it is the one asked for. */
static nvmlReturn_t find(int (*matches)(const View *, const void *), const void *key, nvmlDevice_t *device)
{
    for (unsigned index = 0; index < world->board_count; index++) {
        View view = {.index = index};
        nvmlReturn_t state = fill_view(&view);
        unsigned instances = view.state.flags & FLAG_MIG_ENABLED ? view.state.mig_count : 0;
        for (view.mig = 0; view.mig <= instances; view.mig++) {
            if (!matches(&view, key))
                continue;
            if (state == OK)
                *device = handle_for(index, view.mig);
            return state;
        }
    }
    return NOT_FOUND;
}

static const char *uuid_of(const View *view)
{
    return view->mig > 0 ? view->state.migs[view->mig - 1].uuid : view->state.uuid;
}

static int uuid_matches(const View *view, const void *key) { return strcmp(uuid_of(view), key) == 0; }

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = begin_system(device);
    if (result == OK)
        result = uuid == NULL ? INVALID_ARGUMENT : find(uuid_matches, uuid, device);
    return done(result);
}

static int parse_bus_id(const char *text, unsigned parts[3])
{
    return sscanf(text, "%x:%x:%x", &parts[0], &parts[1], &parts[2]) == 3;
}

static int bus_id_matches(const View *view, const void *key)
{
    unsigned parts[3];
    return view->mig == 0 && parse_bus_id(view->state.pci_bus_id, parts) &&
           memcmp(parts, key, sizeof parts) == 0;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    unsigned parts[3];
    nvmlReturn_t result = begin_system(device);
    if (result == OK && (bus_id == NULL || !parse_bus_id(bus_id, parts)))
        result = INVALID_ARGUMENT;
    return done(result == OK ? find(bus_id_matches, parts, device) : result);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    View view;
    nvmlReturn_t result = begin(device, &view, uuid);
    return done(result == OK ? copy_text(uuid, length, uuid_of(&view)) : result);
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    View view;
    nvmlReturn_t result = begin(device, &view, name);
    return done(result == OK ? copy_text(name, length, view.state.name) : result);
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    View view;
    nvmlReturn_t result = begin(device, &view, index);
    if (result == OK)
        *index = view.mig > 0 ? view.mig - 1 : view.index;
    return done(result);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, PciInfo *info)
{
    View view;
    unsigned parts[3];
    nvmlReturn_t result = begin_board(device, &view, info);
    if (result == OK && !parse_bus_id(view.state.pci_bus_id, parts))
        result = NOT_FOUND;
    if (result == OK) {
        memset(info, 0, sizeof *info);
        info->domain = parts[0];
        info->bus = parts[1];
        info->device = parts[2];
        snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", parts[0] & 0xFFFF,
                 parts[1] & 0xFF, parts[2] & 0xFF);
        snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", parts[0], parts[1] & 0xFF,
                 parts[2] & 0xFF);
    }
    return done(result);
}
