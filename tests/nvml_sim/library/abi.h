/* SPDX-License-Identifier: Apache-2.0 */
/* The ABI of NVML: constants and record layouts as in nvml.h. */
#ifndef NVML_SIM_ABI_H
#define NVML_SIM_ABI_H

#include "layout.h"

#define API __attribute__((visibility("default")))

typedef int nvmlReturn_t;
typedef const void *nvmlDevice_t;

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25
};

enum { TYPE_UNSIGNED_INT = 1, TYPE_UNSIGNED_LONG_LONG = 3 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;

typedef struct {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    int value_type;
    nvmlReturn_t result;
    union {
        double d;
        unsigned ui;
        unsigned long long ull;
    } value;
} FieldValue;

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
    unsigned gpu_slices, compute_slices;
    unsigned long long memory_mib;
} Attributes;

SIZE(PciInfo, 68);
SIZE(Memory, 24);
SIZE(Memory2, 40);
SIZE(ProcessInfo, 24);
SIZE(FieldValue, 40);
SIZE(Attributes, 40);

#endif
