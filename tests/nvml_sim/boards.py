# SPDX-License-Identifier: Apache-2.0
"""Describe a simulated board as tests write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .shapes import Burst

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Process:
    """A process that holds the board, as a client of MPS if `mps`.

    `used_memory` is in bytes; None is what NVML reports as unknown.
    """

    pid: int
    used_memory: int | None = GIB
    graphics: bool = False
    mps: bool = False
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True)
class MigInstance:
    """One MIG device. Memory is in bytes; with 0 slices the driver reports no attributes."""

    uuid: str
    memory_total: int = 10 * GIB
    memory_used: int = 0
    gpu_instance: int = 1
    compute_instance: int = 0
    gpu_slices: int = 1
    compute_slices: int = 1


@dataclass(frozen=True, kw_only=True)
class Board:
    """One board. Names carry the unit: `_w` watts, `_ns` nanoseconds, `_mj` millijoules, memory in bytes.

    `power_w` or `burst` is the power from the world's start until `World.set_power` says otherwise.
    Empty `uuid` and `pci_bus_id` are filled in by the world from the board's position.

    **Counter.** It says `energy_offset_mj + floor(energy_gain * counted energy)`, brought up to date only
    at its ticks: tick k is at `latch_phase_ns + k * latch_ns + j` of CLOCK_MONOTONIC, where j is a fixed
    draw of k from 0 up to, not including, `latch_jitter_ns`. `latch_ns=0` makes it continuous. The
    counted energy is the true one, except for a part-time sensor, with `0 < sensor_window_ns < latch_ns`:
    at each tick that adds the mean power over the last `sensor_window_ns`, taken for the whole time since
    the tick before (or since the world's start or the last `World.reset_counter`, if that came later).

    Changing a gain, an offset, a latch or a window on a live board acts on the whole past, so the counter
    jumps. That is how it is made to step back by some mJ now: `update(i, energy_offset_mj=lower)`. To
    start it again at 0, now or at a given time, there is `World.reset_counter`.

    **Power.** Field 185 is the mean over the last second; field 186 is the power at the instant, or with
    `power_window_ns` the mean over that much time before it; `nvmlDeviceGetPowerUsage` is the one or the
    other by `power_usage_averaged`. All are brought up to date every `power_latch_ns` on the counter's
    phase, without jitter; 0 means always.

    **What answers.** `energy_supported=False` refuses all three energy calls, `unsupported_fields` refuses
    single field codes, and `scopes` lists the scope ids for which fields 185, 186 and 191 answer. Field 83
    and `nvmlDeviceGetTotalEnergyConsumption` mean scope 0, the GPU, and answer only if that is listed;
    `nvmlDeviceGetPowerUsage` goes by `power_usage_supported` alone. A Grace Hopper board is thus
    `scopes=(1,)`. Scope 1, the module, reads `module_factor` times the power and energy of the board.
    `processes_supported=False` refuses the lists of processes, as for want of permission. `lost` and
    `no_permission` make every query of the board fail with codes 15 and 4; its handle is a query.

    **Memory.** `memory_used` is what is allocated. `memory_reserved`, in whole MiB, is what the driver keeps
    for itself, which version 1 of `nvmlDeviceGetMemoryInfo` counts as used and version 2 does not.

    **Slow calls.** Every `call_delay_every`-th query of the board, over all processes, as counted by
    `World.calls`, sleeps for `call_delay_ns`; 0 and 1 mean every query. `call_delay_before=True` sleeps
    before the value is taken, so it is that of the end of the call; False sleeps afterwards, so the value
    (and a field's timestamp) is that of the call's start.
    """

    uuid: str = ""
    name: str = "NVIDIA Sim 100"
    pci_bus_id: str = ""
    memory_total: int = 80 * GIB
    memory_used: int = 4 * MIB
    memory_reserved: int = 0
    power_limit_w: float = 700.0
    power_limit_min_w: float = 200.0
    power_limit_max_w: float = 700.0
    power_limit_default_w: float = 700.0
    power_w: float = 60.0
    burst: Burst | None = None
    energy_supported: bool = True
    energy_offset_mj: int = 1_000_000
    energy_gain: float = 1.0
    latch_ns: int = 100_000_000
    latch_phase_ns: int = 0
    latch_jitter_ns: int = 0
    sensor_window_ns: int = 0
    frozen: bool = False
    power_gain: float = 1.0
    power_latch_ns: int = 0
    power_window_ns: int = 0
    power_usage_supported: bool = True
    power_usage_averaged: bool = True
    unsupported_fields: tuple[int, ...] = ()
    scopes: tuple[int, ...] = (0,)
    module_factor: float = 1.0
    call_delay_ns: int = 0
    call_delay_every: int = 0
    call_delay_before: bool = True
    lost: bool = False
    no_permission: bool = False
    processes: tuple[Process, ...] = ()
    processes_supported: bool = True
    throttle_ns: Mapping[int, int] = field(default_factory=dict)
    event_reasons: int = 0
    temperature_c: int = 40
    clocks_mhz: tuple[int, int, int, int] = (1980, 1980, 2619, 1545)
    max_clocks_mhz: tuple[int, int, int, int] = (1980, 1980, 2619, 1545)
    persistence: bool = True
    compute_capability: tuple[int, int] = (9, 0)
    architecture: int = 9
    mig_capable: bool = True
    mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()

    def __post_init__(self) -> None:
        if self.latch_jitter_ns and not 0 <= self.latch_jitter_ns < self.latch_ns:
            raise ValueError(
                f"latch_jitter_ns must be below latch_ns={self.latch_ns}, got {self.latch_jitter_ns}"
            )
        for name in ("latch_ns", "sensor_window_ns", "power_latch_ns", "power_window_ns", "call_delay_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
