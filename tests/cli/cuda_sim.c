/* SPDX-License-Identifier: Apache-2.0
 * A stand-in for libcuda.so.1: cuInit returns the code in CUDA_SIM_INIT. Names and texts are those of CUDA 13. */
#include <stdlib.h>

static const struct { int code; const char *name, *words; } errors[] = {
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int cuInit(unsigned flags) {
    const char *code = getenv("CUDA_SIM_INIT");
    (void)flags;
    return code ? atoi(code) : 0;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

static int find(int code) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return (int)i;
    return -1;
}

int cuGetErrorName(int code, const char **text) {
    int i = find(code);
    *text = i < 0 ? NULL : errors[i].name;
    return i < 0 ? 1 : 0;
}

int cuGetErrorString(int code, const char **text) {
    int i = find(code);
    *text = i < 0 ? NULL : errors[i].words;
    return i < 0 ? 1 : 0;
}
