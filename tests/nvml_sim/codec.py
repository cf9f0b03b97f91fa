# SPDX-License-Identifier: Apache-2.0
"""Convert between `Board`, as tests write it, and the records in the world file."""

from __future__ import annotations

from typing import Any

from . import layout
from .boards import Board, Fault, MigInstance, Process
from .shapes import Burst, Decay, Noise, Power, Ramp
from .waveform import Segment


def milliwatts(watts: float) -> int:
    """Round watts to whole mW, the resolution of the world."""
    value = round(watts * 1000)
    if not 0 <= value < 1 << 32:
        raise ValueError(f"power out of range: {watts} W")
    return value


def segment_of(power: Power, start_ns: int) -> Segment:
    """Return the waveform segment of a constant power in watts or of a shape."""
    if isinstance(power, Burst):
        high_ns = round(power.period_ns * power.duty)
        low_mw, high_mw = milliwatts(power.low_w), milliwatts(power.high_w)
        return Segment(start_ns, low_mw, high_mw, power.period_ns, high_ns, kind=layout.STEP_BURST)
    if isinstance(power, Ramp):
        from_mw, to_mw = milliwatts(power.from_w), milliwatts(power.to_w)
        return Segment(start_ns, from_mw, to_mw, power.duration_ns, kind=layout.STEP_RAMP)
    if isinstance(power, Decay):
        from_mw, to_mw = milliwatts(power.from_w), milliwatts(power.to_w)
        return Segment(start_ns, from_mw, to_mw, power.half_ns, kind=layout.STEP_DECAY)
    if isinstance(power, Noise):
        low_mw, high_mw = milliwatts(power.low_w), milliwatts(power.high_w)
        noise = (power.period_ns, 0, power.seed, layout.STEP_NOISE)
        return Segment(start_ns, low_mw, high_mw, *noise)
    return Segment(start_ns, milliwatts(power))


def write_step(step: layout.Step, segment: Segment) -> None:
    """Store a segment."""
    for name, value in segment._asdict().items():
        setattr(step, name, value)


def read_step(step: layout.Step) -> Segment:
    """Load a segment."""
    return Segment(*(getattr(step, name) for name in Segment._fields))


def fault_of(fault: Fault) -> layout.Fault:
    """Return the record of a fault."""
    return layout.Fault(fault.start_ns, fault.end_ns, fault.offset_mj, _FAULTS[fault.kind])


def encode(board: Board, previous: layout.State | None = None) -> layout.State:
    """Return the state record of a board, with the steps, resets, faults and freezing time of `previous`.

    If the board freezes only now, the caller sets the freezing time.
    """
    state = layout.State()
    state.step_count, state.frozen_at_ns = 1, layout.NEVER_NS
    if previous is not None:
        state.step_count, state.reset_count = previous.step_count, previous.reset_count
        state.resets[:] = previous.resets
        state.fault_count = previous.fault_count
        if board.frozen:
            state.frozen_at_ns = previous.frozen_at_ns
    for name in _AS_IS:
        setattr(state, name, getattr(board, name))
    state.memory_reserved_mib = board.memory_reserved >> 20
    for name, attribute in _WATTS.items():
        setattr(state, name, milliwatts(getattr(board, attribute)))
    for name, attribute in _FACTORS.items():
        setattr(state, name, round(getattr(board, attribute) * 1_000_000))
    for name in _TEXTS:
        setattr(state, name, getattr(board, name).encode())
    for name, attribute in _TUPLES.items():
        getattr(state, name)[:] = getattr(board, attribute)
    state.flags = sum(flag for flag, attribute in _FLAGS.items() if getattr(board, attribute))
    state.scope_mask = sum(1 << scope for scope in set(board.scopes))
    _encode_lists(state, board)
    return state


def _encode_lists(state: layout.State, board: Board) -> None:
    unknown = set(board.throttle_ns) - set(layout.THROTTLE_FIELDS)
    if unknown:
        raise ValueError(f"not throttle fields: {sorted(unknown)}; known: {layout.THROTTLE_FIELDS}")
    state.throttle_ns[:] = [board.throttle_ns.get(code, 0) for code in layout.THROTTLE_FIELDS]
    state.unsupported_count = _count("unsupported_fields", board.unsupported_fields, layout.MAX_UNSUPPORTED)
    for position, code in enumerate(board.unsupported_fields):
        state.unsupported[position] = code
    state.process_count = _count("processes", board.processes, layout.MAX_PROCESSES)
    for position, process in enumerate(board.processes):
        used = layout.UNKNOWN_MEMORY if process.used_memory is None else process.used_memory
        instances = (_instance(process.gpu_instance), _instance(process.compute_instance))
        state.processes[position] = layout.Process(used, process.pid, _kind(process), *instances)
    state.mig_count = _count("mig_instances", board.mig_instances, layout.MAX_MIG)
    for position, mig in enumerate(board.mig_instances):
        instances, slices = (mig.gpu_instance, mig.compute_instance), (mig.gpu_slices, mig.compute_slices)
        state.migs[position] = layout.Mig(
            mig.memory_total, mig.memory_used, *instances, *slices, mig.uuid.encode()
        )


def decode(state: layout.State, first: Segment) -> Board:
    """Return the board that a state record and its first waveform segment describe."""
    burst = None
    if first.kind == layout.STEP_BURST:
        duty = first.high_ns / first.period_ns
        burst = Burst(first.low_mw / 1000, first.high_mw / 1000, first.period_ns, duty)
    fields: dict[str, Any] = {name: getattr(state, name) for name in _AS_IS}
    fields |= {attribute: getattr(state, name) / 1000 for name, attribute in _WATTS.items()}
    fields |= {attribute: getattr(state, name) / 1e6 for name, attribute in _FACTORS.items()}
    fields |= {name: getattr(state, name).decode() for name in _TEXTS}
    fields |= {attribute: tuple(getattr(state, name)) for name, attribute in _TUPLES.items()}
    fields |= {attribute: bool(state.flags & flag) for flag, attribute in _FLAGS.items()}
    return Board(
        memory_reserved=state.memory_reserved_mib << 20,
        power_w=first.low_mw / 1000,
        burst=burst,
        frozen=state.frozen_at_ns != layout.NEVER_NS,
        unsupported_fields=tuple(state.unsupported[: state.unsupported_count]),
        scopes=tuple(scope for scope in range(32) if state.scope_mask >> scope & 1),
        processes=tuple(_process(entry) for entry in state.processes[: state.process_count]),
        throttle_ns=dict(zip(layout.THROTTLE_FIELDS, state.throttle_ns, strict=True)),
        mig_instances=tuple(_mig(entry) for entry in state.migs[: state.mig_count]),
        **fields,
    )


_FLAGS = {
    layout.FLAG_ENERGY: "energy_supported",
    layout.FLAG_LOST: "lost",
    layout.FLAG_MIG_CAPABLE: "mig_capable",
    layout.FLAG_MIG_ENABLED: "mig_enabled",
    layout.FLAG_POWER_AVERAGED: "power_usage_averaged",
    layout.FLAG_POWER_USAGE: "power_usage_supported",
    layout.FLAG_PERSISTENCE: "persistence",
    layout.FLAG_NO_PERMISSION: "no_permission",
    layout.FLAG_DELAY_BEFORE: "call_delay_before",
    layout.FLAG_PROCESSES: "processes_supported",
    layout.FLAG_SETTINGS: "settings_supported",
    layout.FLAG_SETTINGS_DENIED: "settings_denied",
}
_FAULTS = {
    "offset": layout.FAULT_OFFSET,
    "stall": layout.FAULT_STALL,
    "loss": layout.FAULT_LOSS,
    "lost": layout.FAULT_LOST,
}
# Fields with the same name and value in `State` and `Board`.
_AS_IS = (
    *("energy_offset_mj", "latch_ns", "latch_phase_ns", "latch_jitter_ns", "sensor_window_ns"),
    *("power_latch_ns", "power_window_ns", "call_delay_ns", "call_delay_every"),
    *("memory_total", "memory_used", "event_reasons", "temperature_c", "architecture"),
)
_TEXTS = ("uuid", "name", "pci_bus_id")
# Names in `State` to names in `Board`.
_WATTS = {
    "power_limit_mw": "power_limit_w",
    "power_limit_min_mw": "power_limit_min_w",
    "power_limit_max_mw": "power_limit_max_w",
    "power_limit_default_mw": "power_limit_default_w",
}
_FACTORS = {
    "energy_gain_ppm": "energy_gain",
    "power_gain_ppm": "power_gain",
    "module_factor_ppm": "module_factor",
}
_TUPLES = {
    "clocks_mhz": "clocks_mhz",
    "max_clocks_mhz": "max_clocks_mhz",
    "locked_clocks_mhz": "locked_clocks_mhz",
    "capability": "compute_capability",
}


def _instance(number: int | None) -> int:
    return layout.NO_INSTANCE if number is None else number


def _count(what: str, items: tuple[object, ...], limit: int) -> int:
    if len(items) > limit:
        raise ValueError(f"at most {limit} {what}, got {len(items)}")
    return len(items)


def _kind(process: Process) -> int:
    if process.mps:
        return layout.PROCESS_MPS
    return layout.PROCESS_GRAPHICS if process.graphics else layout.PROCESS_COMPUTE


def _process(entry: layout.Process) -> Process:
    return Process(
        pid=entry.pid,
        used_memory=None if entry.used_memory == layout.UNKNOWN_MEMORY else entry.used_memory,
        graphics=entry.kind == layout.PROCESS_GRAPHICS,
        mps=entry.kind == layout.PROCESS_MPS,
        gpu_instance=None if entry.gpu_instance == layout.NO_INSTANCE else entry.gpu_instance,
        compute_instance=None if entry.compute_instance == layout.NO_INSTANCE else entry.compute_instance,
    )


def _mig(entry: layout.Mig) -> MigInstance:
    return MigInstance(
        uuid=entry.uuid.decode(),
        memory_total=entry.memory_total,
        memory_used=entry.memory_used,
        gpu_instance=entry.gpu_instance,
        compute_instance=entry.compute_instance,
        gpu_slices=entry.gpu_slices,
        compute_slices=entry.compute_slices,
    )
