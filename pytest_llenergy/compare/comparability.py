# SPDX-License-Identifier: Apache-2.0
"""Whether two records may be compared: same devices, same meters, same work."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from pytest_llenergy.model.environment import Board, Environment, Host
from pytest_llenergy.model.record import MeterInfo, Record, Round

# Was it measured on the same kind of devices, and in the same way?
#
# Only what stays as it is between two runs is a fact: never a clock rate, a temperature, free memory or a
# host name, which would make every run its own machine. The UUID of a board and the driver are told apart
# from them: two boards of one model are comparable, though they may draw 10 % more or less.

#: What stands for a fact that is not known.
UNKNOWN = "unknown"

#: Which devices of a meter's domain do not tell them apart from others of their kind.
GPU_DOMAIN = "gpu"

#: Flags of rounds during which others used the CPU, and the share of rounds from which that is noted.
DISTURBED = {"contended": "other processes worked", "stolen": "the hypervisor had other guests"}
DISTURBED_SHARE = 0.5


def device_facts(record: Record, environment: Environment | None, *, meters: bool = True) -> dict[str, str]:
    """What a test ran on and, with ``meters``, was measured with, in words."""
    facts = dict(host_facts(environment))
    gpus = [device for device in record.devices if device != "cpu"]
    facts["gpu.count"] = str(len(gpus))
    if gpus:
        found = [_find_board(uuid, record, environment) for uuid in gpus]
        limits = [_power_limit_w(board, environment) for board in found]
        facts["gpu.name"] = _count_values(board.name if board else UNKNOWN for board in found)
        facts["gpu.memory"] = _count_values(_memory_gib(board) for board in found)
        facts["gpu.power_limit"] = _count_values(f"{watts:g} W" if watts else UNKNOWN for watts in limits)
        facts["gpu.mig"] = _count_values("yes" if uuid.startswith("MIG-") else "no" for uuid in gpus)
    if meters:
        facts.update(meter_facts(record.meters))
    return facts


def host_facts(environment: Environment | None) -> Mapping[str, str]:
    """What the machine is."""
    return {"host": UNKNOWN} if environment is None else _host_facts(environment.host)


@lru_cache(maxsize=16)
def _host_facts(host: Host) -> dict[str, str]:
    return {
        "cpu.model": host.cpu_model,
        "cpu.machine": host.machine,
        "cpu.count": str(host.logical_cpus),
        "host.memory": f"{round(host.memory_bytes / 2**30)} GiB",
    }


def meter_facts(meters: Sequence[MeterInfo]) -> dict[str, str]:
    """Which meters have read which domains, and how."""
    if not meters:
        return {"meter": "none"}
    return {
        "meter.kind": _count_values(meter.kind for meter in meters),
        "meter.name": _count_values(meter.name for meter in meters),
        "meter.source": _count_values(meter.source for meter in meters),
        "meter.domain": _count_values(_domain(meter) for meter in meters),
    }


def list_differences(base: Mapping[str, str], head: Mapping[str, str]) -> list[str]:
    """One line for each fact that is not the same on both sides: ``gpu.name: NVIDIA L4 -> NVIDIA H200``."""
    names = list(dict.fromkeys([*base, *head]))
    return [
        f"{name}: {base.get(name, 'none')} -> {head.get(name, 'none')}"
        for name in names
        if base.get(name, "none") != head.get(name, "none")
    ]


def fingerprint(facts: Mapping[str, str]) -> str:
    """A short name for a set of facts: equal for equal ones."""
    return hashlib.sha256(msgspec.json.encode(dict(facts), order="sorted")).hexdigest()[:12]


def device_differences(
    base: Record,
    head: Record,
    base_on: Environment | None,
    head_on: Environment | None,
    *,
    meters: bool = True,
) -> list[str]:
    """Why the two did not run on the same kind of devices or, with ``meters``, were not measured in the same
    way.

    Empty where they did. A host that is not known is not the same.
    """
    if base_on is None or head_on is None:
        return [f"host: {UNKNOWN}"]
    same = base.boards == head.boards and base.devices == head.devices and base.meters == head.meters
    if same and host_facts(base_on) == host_facts(head_on) and base_on.gpus == head_on.gpus:
        return []
    return list_differences(
        device_facts(base, base_on, meters=meters), device_facts(head, head_on, meters=meters)
    )


def _disturbance_notes(base: Record, head: Record) -> list[str]:
    """That others used the CPU during half of the rounds or more, on either side."""
    notes = []
    for name, who in DISTURBED.items():
        told = []
        for side, record in (("base", base), ("head", head)):
            count = sum(any(flag.name == name for flag in round_.flags) for round_ in record.rounds)
            if record.rounds and count >= DISTURBED_SHARE * len(record.rounds):
                told.append(f"{count} of {len(record.rounds)} rounds of {side}")
        if told:
            notes.append(f"{name}: {who} during {' and '.join(told)}, which may be the difference")
    return notes


def comparison_notes(
    base: Record, head: Record, base_on: Environment | None, head_on: Environment | None
) -> list[str]:
    """What a reader should know of two that are comparable: others at work, other boards, another host."""
    notes = _disturbance_notes(base, head)
    boards = [device for device in base.devices if device != "cpu"]
    others = [device for device in head.devices if device != "cpu"]
    if sorted(boards) != sorted(others):
        notes.append(
            f"other boards of the same kind ({', '.join(boards)} -> {', '.join(others)}): "
            "these differ by 10 % and more, so this is no proof"
        )
    if base_on is None or head_on is None:
        return notes
    if not boards and base_on.host.name != head_on.host.name:
        notes.append(f"another host of the same kind ({base_on.host.name} -> {head_on.host.name})")
    if boards and base_on.driver != head_on.driver:
        notes.append(f"another driver ({base_on.driver or UNKNOWN} -> {head_on.driver or UNKNOWN})")
    return notes


def describe_devices(record: Record, environment: Environment | None) -> str:
    """Devices and meter in a line: ``1x NVIDIA H200 700 W, nvml (measured)``."""
    facts = device_facts(record, environment)
    if facts["gpu.count"] != "0":
        limit = facts["gpu.power_limit"]
        device = f"{facts['gpu.count']}x {facts['gpu.name']}{'' if limit == UNKNOWN else f' {limit}'}"
    else:
        device = facts.get("cpu.model", UNKNOWN)
    if "meter.name" not in facts:
        return f"{device}, no meter"
    return f"{device}, {facts['meter.name']} ({facts['meter.kind']})"


def _domain(meter: MeterInfo) -> str:
    """Its domain, without which of several equal boards it is of."""
    kind = meter.domain.partition(":")[0]
    return kind if kind == GPU_DOMAIN else meter.domain


def _find_board(uuid: str, record: Record, environment: Environment | None) -> Board | None:
    known = [*record.boards, *(environment.gpus if environment else ())]
    return next((board for board in known if board.uuid == uuid), None)


def _power_limit_w(board: Board | None, environment: Environment | None) -> float | None:
    """Its own, or that of the board that an instance is a part of (both have one PCI bus id)."""
    if board is None or board.power_limit_w is not None or environment is None:
        return board.power_limit_w if board else None
    whole = (each for each in environment.gpus if each.pci_bus_id == board.pci_bus_id)
    return next((each.power_limit_w for each in whole), None)


def _memory_gib(board: Board | None) -> str:
    if board is None or board.memory_bytes is None:
        return UNKNOWN
    return f"{board.memory_bytes / 2**30:.1f} GiB"


def _count_values(values: Iterable[str]) -> str:
    """Each once; with how often, where they are not all the same: ``NVIDIA H200, NVIDIA L4 x2``."""
    counts = Counter(values)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(
        f"{value} x{count}" if count > 1 else str(value) for value, count in sorted(counts.items())
    )


# Did both runs execute the same thing?
#
# Everything that decides what is executed is a fact. Versions of engines and libraries are recorded and are
# none: they are what is under test. Output tokens are a result.


def workload_facts(record: Record) -> dict[str, str]:
    """What a test executes, for people to read."""
    facts = {"id": record.id}
    facts |= {f"params.{name}": repr(value) for name, value in sorted(record.params.items())}
    backend = record.backend
    if backend is not None:
        facts["backend"] = backend.name
        facts["model"] = backend.model
        facts["model.revision"] = str(backend.model_revision)
        facts["dtype"] = str(backend.dtype)
        facts |= {f"options.{name}": repr(value) for name, value in sorted(backend.options.items())}
        facts["task"] = str(backend.task)
        facts |= {f"generation.{name}": repr(value) for name, value in sorted(backend.generation.items())}
        facts["prompts"] = str(backend.prompts_digest)
    degrees = record.parallel
    facts["parallel"] = ", ".join(f"{name} {getattr(degrees, name)}" for name in degrees.__struct_fields__)
    facts["devices"] = str(len(record.devices))
    facts["fallback"] = str(record.fallback)
    facts["launch"] = str(record.launch)
    facts["start_method"] = str(record.start_method)
    facts["ranks"] = str(len(record.ranks))
    facts["threads"] = ", ".join(sorted({str(rank.threads) for rank in record.ranks})) or "None"
    requests, tokens = _batch(record)
    facts["requests"] = requests
    facts["input tokens"] = tokens
    return facts


def workload_key(record: Record) -> str:
    """Equal for two tests that execute the same."""
    return fingerprint(workload_facts(record))


def workload_differences(base: Record, head: Record) -> list[str]:
    """What of the workload is not the same on both sides; empty where all is."""
    if _raw_workload(base) == _raw_workload(head) and _batch(base) == _batch(head):
        return []
    return list_differences(workload_facts(base), workload_facts(head))


def _raw_workload(record: Record) -> tuple[object, ...]:
    """The same facts unformatted, which is quicker to compare."""
    backend = record.backend
    engine = backend and (
        backend.name,
        backend.model,
        backend.model_revision,
        backend.dtype,
        backend.options,
        backend.task,
        backend.generation,
        backend.prompts_digest,
    )
    return (
        record.id,
        record.params,
        engine,
        record.parallel,
        len(record.devices),
        record.fallback,
        record.launch,
        record.start_method,
        [rank.threads for rank in record.ranks],
    )


def _batch(record: Record) -> tuple[str, str]:
    """Requests and input tokens of an iteration."""
    if not record.rounds:
        return "None", "None"
    first = record.rounds[0]
    return _per_iteration(first.requests, first), _per_iteration(
        first.tokens.input if first.tokens else None, first
    )


def _per_iteration(count: int | None, round_: Round) -> str:
    return "None" if count is None else f"{count / round_.iterations:g}"
