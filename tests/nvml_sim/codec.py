# SPDX-License-Identifier: Apache-2.0
"""Between `Board` as a test writes it and the records in the world file."""

from __future__ import annotations

from . import layout
from .boards import Board, Burst, MigInstance, Process
from .waveform import Segment


def milliwatts(watts: float) -> int:
    """Watts rounded to whole mW, the resolution of the world."""
    value = round(watts * 1000)
    if not 0 <= value < 1 << 32:
        raise ValueError(f"power out of range: {watts} W")
    return value


def segment_of(power: float | Burst, start_ns: int) -> Segment:
    """The waveform segment for a constant power in watts or a burst."""
    if isinstance(power, Burst):
        high_ns = round(power.period_ns * power.duty)
        return Segment(start_ns, milliwatts(power.low_w), milliwatts(power.high_w), power.period_ns, high_ns)
    return Segment(start_ns, milliwatts(power))


def write_step(step: layout.Step, segment: Segment) -> None:
    """Store a segment."""
    step.start_ns, step.low_mw, step.high_mw, step.period_ns, step.high_ns = segment


def read_step(step: layout.Step) -> Segment:
    """Load a segment."""
    return Segment(step.start_ns, step.low_mw, step.high_mw, step.period_ns, step.high_ns)


def encode(board: Board, now_ns: int, previous: layout.State | None = None) -> layout.State:
    """The state record for a board. A counter frozen in `previous` stays frozen at the same instant."""
    state = layout.State()
    was_frozen = previous is not None and previous.frozen_at_ns != layout.NEVER_NS
    state.step_count = previous.step_count if previous is not None else 1
    if not board.frozen:
        state.frozen_at_ns = layout.NEVER_NS
    else:
        state.frozen_at_ns = previous.frozen_at_ns if previous is not None and was_frozen else now_ns
    state.energy_offset_mj = board.energy_offset_mj
    state.latch_ns, state.latch_phase_ns = board.latch_ns, board.latch_phase_ns
    state.power_latch_ns, state.call_delay_ns = board.power_latch_ns, board.call_delay_ns
    state.memory_total, state.memory_used = board.memory_total, board.memory_used
    state.event_reasons = board.event_reasons
    state.energy_gain_ppm, state.power_gain_ppm = _ppm(board.energy_gain), _ppm(board.power_gain)
    state.flags = sum(flag for flag, attribute in _FLAGS.items() if getattr(board, attribute))
    state.power_limit_mw = milliwatts(board.power_limit_w)
    state.temperature_c = board.temperature_c
    state.scope_mask = sum(1 << scope for scope in set(board.scopes))
    state.clocks_mhz[:] = board.clocks_mhz
    state.capability[:] = board.compute_capability
    state.architecture = board.architecture
    state.uuid, state.name = board.uuid.encode(), board.name.encode()
    state.pci_bus_id = board.pci_bus_id.encode()
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
        state.processes[position] = layout.Process(used, process.pid, process.graphics, *instances)
    state.mig_count = _count("mig_instances", board.mig_instances, layout.MAX_MIG)
    for position, mig in enumerate(board.mig_instances):
        state.migs[position] = layout.Mig(
            mig.memory_total, mig.memory_used, mig.gpu_instance, mig.compute_instance, mig.uuid.encode()
        )


def decode(state: layout.State, first: Segment) -> Board:
    """The board that a state record and its first waveform segment describe."""
    burst = None
    if first.period_ns:
        duty = first.high_ns / first.period_ns
        burst = Burst(first.low_mw / 1000, first.high_mw / 1000, first.period_ns, duty)
    flags = {attribute: bool(state.flags & flag) for flag, attribute in _FLAGS.items()}
    return Board(
        uuid=state.uuid.decode(),
        name=state.name.decode(),
        pci_bus_id=state.pci_bus_id.decode(),
        memory_total=state.memory_total,
        memory_used=state.memory_used,
        power_limit_w=state.power_limit_mw / 1000,
        power_w=first.low_mw / 1000,
        burst=burst,
        energy_offset_mj=state.energy_offset_mj,
        energy_gain=state.energy_gain_ppm / 1e6,
        latch_ns=state.latch_ns,
        latch_phase_ns=state.latch_phase_ns,
        frozen=state.frozen_at_ns != layout.NEVER_NS,
        power_gain=state.power_gain_ppm / 1e6,
        power_latch_ns=state.power_latch_ns,
        unsupported_fields=tuple(state.unsupported[: state.unsupported_count]),
        scopes=tuple(scope for scope in range(32) if state.scope_mask >> scope & 1),
        call_delay_ns=state.call_delay_ns,
        processes=tuple(_process(entry) for entry in state.processes[: state.process_count]),
        throttle_ns=dict(zip(layout.THROTTLE_FIELDS, state.throttle_ns, strict=True)),
        event_reasons=state.event_reasons,
        temperature_c=state.temperature_c,
        clocks_mhz=tuple(state.clocks_mhz),
        compute_capability=tuple(state.capability),
        architecture=state.architecture,
        mig_instances=tuple(_mig(entry) for entry in state.migs[: state.mig_count]),
        **flags,
    )


_FLAGS = {
    layout.FLAG_ENERGY: "energy_supported",
    layout.FLAG_LOST: "lost",
    layout.FLAG_MIG_CAPABLE: "mig_capable",
    layout.FLAG_MIG_ENABLED: "mig_enabled",
    layout.FLAG_POWER_AVERAGED: "power_usage_averaged",
    layout.FLAG_POWER_USAGE: "power_usage_supported",
    layout.FLAG_PERSISTENCE: "persistence",
}


def _ppm(factor: float) -> int:
    return round(factor * 1_000_000)


def _instance(number: int | None) -> int:
    return layout.NO_INSTANCE if number is None else number


def _count(what: str, items: tuple[object, ...], limit: int) -> int:
    if len(items) > limit:
        raise ValueError(f"at most {limit} {what}, got {len(items)}")
    return len(items)


def _process(entry: layout.Process) -> Process:
    return Process(
        pid=entry.pid,
        used_memory=None if entry.used_memory == layout.UNKNOWN_MEMORY else entry.used_memory,
        graphics=bool(entry.graphics),
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
    )
