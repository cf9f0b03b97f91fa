# SPDX-License-Identifier: Apache-2.0
"""The layout of the world file. library/layout.h mirrors it and asserts every offset."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64

MAGIC = int.from_bytes(b"NVMLSIM1", "little")
VERSION = 6
MAX_BOARDS = 16
MAX_STEPS = 4096
MAX_PROCESSES = 32
MAX_MIG = 8
MAX_UNSUPPORTED = 16
MAX_RESETS = 32
MAX_FAULTS = 64
THROTTLE_FIELDS = (74, 76, 269, 270, 271)

PROCESS_COMPUTE = 0
PROCESS_GRAPHICS = 1
PROCESS_MPS = 2

FLAG_ENERGY = 1
FLAG_LOST = 2
FLAG_MIG_CAPABLE = 4
FLAG_MIG_ENABLED = 8
FLAG_POWER_AVERAGED = 16
FLAG_POWER_USAGE = 32
FLAG_PERSISTENCE = 64
FLAG_NO_PERMISSION = 128
FLAG_DELAY_BEFORE = 256
FLAG_PROCESSES = 512
FLAG_SETTINGS = 1024
FLAG_SETTINGS_DENIED = 2048

STEP_CONSTANT = 0
STEP_BURST = 1
STEP_RAMP = 2
STEP_NOISE = 3
STEP_DECAY = 4
#: A decay ends after this many periods.
DECAY_PERIODS = 24

FAULT_OFFSET = 0
FAULT_STALL = 1
FAULT_LOSS = 2
FAULT_LOST = 3

NEVER_NS = (1 << 63) - 1
NO_INSTANCE = 0xFFFFFFFF
UNKNOWN_MEMORY = (1 << 64) - 1


class Header(ctypes.Structure):
    """The header of the file; `init_result` is the NVML code that nvmlInit returns."""

    _fields_ = (
        ("magic", c_uint64),
        ("file_size", c_uint64),
        ("init_count", c_uint64),
        ("version", c_uint32),
        ("header_size", c_uint32),
        ("board_size", c_uint32),
        ("state_size", c_uint32),
        ("step_size", c_uint32),
        ("board_count", c_uint32),
        ("init_result", c_uint32),
        ("cuda_driver_version", c_int32),
        ("driver_version", c_char * 80),
        ("nvml_version", c_char * 80),
        ("reserved", c_uint8 * 3880),
    )


class Step(ctypes.Structure):
    """Power from `start_ns` until the next step; waveform.py defines the fields for each `kind`."""

    _fields_ = (
        ("start_ns", c_int64),
        ("period_ns", c_int64),
        ("high_ns", c_int64),
        ("seed", c_uint64),
        ("low_mw", c_uint32),
        ("high_mw", c_uint32),
        ("kind", c_uint32),
        ("padding", c_uint32),
    )


class Reset(ctypes.Structure):
    """The counter restarts at 0 at `at_ns`; `offset_mj` is the offset that no longer applies."""

    _fields_ = (
        ("at_ns", c_int64),
        ("offset_mj", c_int64),
    )


class Fault(ctypes.Structure):
    """Something wrong from `start_ns` to `end_ns`, of a `FAULT_*` kind; boards.py defines them."""

    _fields_ = (
        ("start_ns", c_int64),
        ("end_ns", c_int64),
        ("offset_mj", c_int64),
        ("kind", c_uint32),
        ("padding", c_uint32),
    )


class Process(ctypes.Structure):
    """One entry of a board's process list."""

    _fields_ = (
        ("used_memory", c_uint64),
        ("pid", c_uint32),
        ("kind", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
    )


class Mig(ctypes.Structure):
    """One MIG instance of a board."""

    _fields_ = (
        ("memory_total", c_uint64),
        ("memory_used", c_uint64),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("gpu_slices", c_uint32),
        ("compute_slices", c_uint32),
        ("uuid", c_char * 96),
    )


class State(ctypes.Structure):
    """The part of a board that is published atomically, including the number of valid steps."""

    _fields_ = (
        ("energy_offset_mj", c_int64),
        ("latch_ns", c_int64),
        ("latch_phase_ns", c_int64),
        ("latch_jitter_ns", c_int64),
        ("sensor_window_ns", c_int64),
        ("frozen_at_ns", c_int64),
        ("power_latch_ns", c_int64),
        ("power_window_ns", c_int64),
        ("call_delay_ns", c_int64),
        ("memory_total", c_uint64),
        ("memory_used", c_uint64),
        ("event_reasons", c_uint64),
        ("throttle_ns", c_uint64 * len(THROTTLE_FIELDS)),
        ("energy_gain_ppm", c_uint32),
        ("power_gain_ppm", c_uint32),
        ("module_factor_ppm", c_uint32),
        ("call_delay_every", c_uint32),
        ("step_count", c_uint32),
        ("flags", c_uint32),
        ("power_limit_mw", c_uint32),
        ("power_limit_min_mw", c_uint32),
        ("power_limit_max_mw", c_uint32),
        ("power_limit_default_mw", c_uint32),
        ("temperature_c", c_uint32),
        ("scope_mask", c_uint32),
        ("clocks_mhz", c_uint32 * 4),
        ("max_clocks_mhz", c_uint32 * 4),
        ("capability", c_uint32 * 2),
        ("architecture", c_uint32),
        ("unsupported_count", c_uint32),
        ("process_count", c_uint32),
        ("mig_count", c_uint32),
        ("reset_count", c_uint32),
        ("fault_count", c_uint32),
        ("unsupported", c_uint32 * MAX_UNSUPPORTED),
        ("memory_reserved_mib", c_uint32),
        ("locked_clocks_mhz", c_uint16 * 2),
        ("resets", Reset * MAX_RESETS),
        ("processes", Process * MAX_PROCESSES),
        ("migs", Mig * MAX_MIG),
        ("uuid", c_char * 96),
        ("name", c_char * 96),
        ("pci_bus_id", c_char * 32),
    )


class BoardRecord(ctypes.Structure):
    """One board: `seq & 1` selects the published slot, `calls` counts the answered queries."""

    _fields_ = (
        ("seq", c_uint64),
        ("calls", c_uint64),
        ("writing", c_uint64),
        ("slots", State * 2),
        ("steps", Step * MAX_STEPS),
        ("faults", Fault * MAX_FAULTS),
    )


# Names used in library/layout.h.
C_NAMES: dict[str, type[ctypes.Structure]] = {
    "Header": Header,
    "Step": Step,
    "Reset": Reset,
    "Fault": Fault,
    "Process": Process,
    "Mig": Mig,
    "State": State,
    "Board": BoardRecord,
}


def c_assertions() -> str:
    """Return the assertions for library/layout.h; print them after changing the layout."""
    lines = []
    for name, record in C_NAMES.items():
        lines.append(f"SIZE({name}, {ctypes.sizeof(record)});")
        lines += [f"AT({name}, {entry[0]}, {getattr(record, entry[0]).offset});" for entry in record._fields_]
    return "\n".join(lines)
