# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libamd_smi.so: two boards behind the real amdsmi package.

The counter of the first board gains 100 000 counts with every call; that of the second never moves.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

SOURCE = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void *handle;
int amdsmi_init(uint64_t flags) { return 0; }
int amdsmi_shut_down(void) { puts("shut down"); fflush(stdout); return 0; }
int amdsmi_get_socket_handles(uint32_t *count, handle *handles) {
    *count = 1;
    if (handles) handles[0] = (handle)1;
    return 0;
}
int amdsmi_get_processor_handles(handle socket, uint32_t *count, handle *handles) {
    *count = 2;
    if (handles) { handles[0] = (handle)10; handles[1] = (handle)11; }
    return 0;
}
int amdsmi_get_gpu_device_uuid(handle board, uint32_t *length, char *uuid) {
    strcpy(uuid, board == (handle)10 ? "moves" : "stands");
    return 0;
}
int amdsmi_get_gpu_asic_info(handle board, char *info) {
    if (board != (handle)10) return 2;
    strcpy(info, "AMD Instinct MI300X");
    strcpy(info + 532, "0xA1B2");
    return 0;
}
int amdsmi_get_gpu_device_bdf(handle board, uint64_t *bdf) {
    *bdf = board == (handle)10 ? 0xc1 << 8 : 0xc2 << 8;
    return 0;
}
int amdsmi_get_gpu_vram_usage(handle board, uint32_t *usage) {
    if (board != (handle)10) return 2;
    usage[0] = 196592;
    usage[1] = 300;
    return 0;
}
int amdsmi_get_power_cap_info(handle board, uint32_t sensor, uint64_t *cap) {
    if (board != (handle)10) return 2;
    *cap = 750000000;
    return 0;
}
int amdsmi_get_gpu_process_list(handle board, uint32_t *count, char *processes) {
    *count = board == (handle)10;
    if (*count) *(uint32_t *)(processes + 256) = 4711;
    return 0;
}
int amdsmi_get_energy_count(handle board, uint64_t *count, float *resolution, uint64_t *timestamp) {
    static uint64_t moving;
    *count = board == (handle)10 ? (moving += 100000) : 7;
    *resolution = 15.3f;
    *timestamp = 0;
    return 0;
}
"""

#: The package looks up every function on import; functions not defined above return "not supported" (2).
MISSING = "int {}(void) {{ return 2; }}\n"


def build(directory: Path, wrapper: Path) -> Path:
    """Build a ROCm directory (for ``ROCM_PATH``) with every function that ``amdsmi_wrapper.py`` looks up."""
    names = set(re.findall(r"_libraries\['libamd_smi.so'\]\.(\w+)", wrapper.read_text()))
    missing = (MISSING.format(name) for name in sorted(names) if f"int {name}(" not in SOURCE)
    code = directory / "amd_smi.c"
    code.write_text(SOURCE + "".join(missing))
    (directory / "lib").mkdir()
    compiler = shutil.which("cc")
    assert compiler
    output = directory / "lib" / "libamd_smi.so"
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", output, code], check=True)
    return directory
