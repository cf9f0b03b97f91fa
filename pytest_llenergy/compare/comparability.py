# SPDX-License-Identifier: Apache-2.0
"""Decide whether two records may be compared: same kind of device, same meters, same workload.

Devices and workload are described by facts: pairs of a name and a text. Device facts stay the same between
runs: no clock rate, temperature, free memory or host name, which would make every run incomparable. The UUID
of a board and the driver are not facts either: two boards of one model are comparable although they may draw
10 % more or less, so a difference in these is a note. Workload facts determine what is executed. Versions of
backends and libraries are left out because they are under test, and output tokens because they are a result;
``work_differences`` finds output tokens and test code that differ too much for a verdict. Number types are
compared where both records have them, but are no part of ``workload_key``, which groups records of several
versions. The requests of a served load are known by its parameters and prompts; its tokens are those of the
answered requests, which ``work_differences`` compares.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import log, log1p
from statistics import fmean, median

import msgspec

from pytest_llenergy.record.environment import Board, Environment, Host
from pytest_llenergy.record.record import (
    LOCALHOST,
    BoardSettings,
    MeterInfo,
    Record,
    Round,
    domain_kind,
    without_host,
)
from pytest_llenergy.record.served import CUT_SHORT, SATURATED

#: Text of an unknown fact.
UNKNOWN = "unknown"

#: Kind of domain whose full name has the UUID of a board.
GPU_DOMAIN = "gpu"

#: What the flag ``contended`` means.
CPU_SHARED = "others used the CPU"

#: A disturbance of more than this share of the rounds of a side matters.
MAJORITY = 0.5


def device_facts(record: Record, environment: Environment | None, *, meters: bool = True) -> dict[str, str]:
    """Describe the devices of a test and, with ``meters``, how it was measured.

    Args:
        record: The record of the test.
        environment: Machine of the test; None if unknown.
        meters: Whether to include the meters.
    """
    facts = dict(_facts_of_hosts(record, environment))
    gpus = [device for device in record.devices if device != "cpu"]
    facts["gpu.count"] = str(len(gpus))
    if (hosts := _count_hosts(record)) > 1:
        facts["hosts"] = str(hosts)
    if gpus:
        found = [_find_board(uuid, record, environment) for uuid in gpus]
        limits = [_power_limit_w(board, record, environment) for board in found]
        facts["gpu.name"] = _count_values(board.name if board else UNKNOWN for board in found)
        facts["gpu.memory"] = _count_values(_memory_gib(board) for board in found)
        facts["gpu.power_limit"] = _count_values(f"{watts:g} W" if watts else UNKNOWN for watts in limits)
        facts["gpu.mig"] = _count_values("yes" if uuid.startswith("MIG-") else "no" for uuid in gpus)
    if record.gpu_settings:
        facts["gpu.settings"] = _count_values(map(describe_settings, record.gpu_settings))
    if meters:
        facts.update(meter_facts(record.meters))
        if record.kind == "attributed":
            facts["meter.kind"] = "attributed"
    return facts


def _count_hosts(record: Record) -> int:
    """Return on how many hosts the ranks of a test ran."""
    return len({rank.host for rank in record.ranks})


def describe_settings(board: BoardSettings) -> str:
    """Describe the settings of a board in a few words: ``power limit 250 W, graphics clock 1200 MHz``."""
    parts = []
    if board.power_limit_w is not None:
        # As the driver has rounded it.
        parts.append(f"power limit {board.power_limit_found_w or board.power_limit_w:g} W")
    if board.graphics_clock_mhz is not None:
        parts.append(f"graphics clock {' to '.join(map(str, dict.fromkeys(board.graphics_clock_mhz)))} MHz")
    return ", ".join(parts)


def host_facts(environment: Environment | None) -> Mapping[str, str]:
    """Describe the CPU and the memory of the host."""
    return {"host": UNKNOWN} if environment is None else _host_facts(environment.host)


def _measured_hosts(record: Record, environment: Environment | None) -> list[Environment | None]:
    """Return the hosts of a test's ranks, None for each that is unknown; without ranks, pytest's own."""
    if environment is None:
        return [None]
    names = dict.fromkeys(rank.host for rank in record.ranks)
    hosts = {LOCALHOST: environment, **environment.cluster_hosts}
    return [hosts.get(name) for name in names] or [environment]


def _facts_of_hosts(record: Record, environment: Environment | None) -> Mapping[str, str]:
    """Describe the hosts of a test. The values of unlike hosts are in one order, whatever their names."""
    hosts = [host_facts(each) for each in _measured_hosts(record, environment)]
    if len(hosts) == 1:
        return hosts[0]
    if {"host": UNKNOWN} in hosts:
        return {"host": UNKNOWN}
    hosts.sort(key=lambda facts: tuple(facts.values()))
    return {name: _list_values([facts[name] for facts in hosts]) for name in hosts[0]}


def _list_values(values: Sequence[str]) -> str:
    """List values in their order, equal neighbours once with their number: ``64 x3, 96``."""
    if len(set(values)) == 1:
        return values[0]
    runs = ((value, len(list(same))) for value, same in groupby(values))
    return ", ".join(f"{value} x{count}" if count > 1 else value for value, count in runs)


@lru_cache(maxsize=16)
def _host_facts(host: Host) -> dict[str, str]:
    return {
        "cpu.model": host.cpu_model,
        "cpu.machine": host.machine,
        "cpu.count": str(host.logical_cpus),
        "host.memory": f"{round(host.memory_bytes / 2**30)} GiB",
    }


def meter_facts(meters: Sequence[MeterInfo]) -> dict[str, str]:
    """Describe which meters read which domains, and how."""
    if not meters:
        return {"meter": "none"}
    return {
        "meter.kind": _count_values(meter.kind for meter in meters),
        "meter.name": _count_values(meter.name for meter in meters),
        "meter.source": _count_values(meter.source for meter in meters),
        "meter.domain": _count_values(_domain(meter) for meter in meters),
    }


def list_differences(base: Mapping[str, str], head: Mapping[str, str]) -> list[str]:
    """Return a line for each fact that differs, such as ``gpu.name: NVIDIA L4 -> NVIDIA H200``."""
    names = list(dict.fromkeys([*base, *head]))
    return [
        f"{name}: {base.get(name, 'none')} -> {head.get(name, 'none')}"
        for name in names
        if base.get(name, "none") != head.get(name, "none")
    ]


def fingerprint(facts: Mapping[str, str]) -> str:
    """Return a short hash of facts, equal for equal facts."""
    return hashlib.sha256(msgspec.json.encode(dict(facts), order="sorted")).hexdigest()[:12]


def device_differences(
    base: Record,
    head: Record,
    base_on: Environment | None,
    head_on: Environment | None,
    *,
    meters: bool = True,
) -> list[str]:
    """List how the devices of two records and, with ``meters``, their meters differ.

    An unknown host differs from every other. Hosts of a cluster are compared by what they are, not by name.

    Args:
        base: The record of the baseline.
        head: The record to compare with it.
        base_on: Machine of the baseline; None if unknown.
        head_on: Machine of the head; None if unknown.
        meters: Whether to compare the meters too.

    Returns:
        One line for each difference; empty if the records are comparable in this respect.
    """
    base_hosts, head_hosts = _measured_hosts(base, base_on), _measured_hosts(head, head_on)
    if base_on is None or head_on is None or None in base_hosts or None in head_hosts:
        return [f"host: {UNKNOWN}"]
    same = base.boards == head.boards and base.devices == head.devices and base.meters == head.meters
    same = same and base.gpu_settings == head.gpu_settings and _count_hosts(base) == _count_hosts(head)
    same = same and _facts_of_hosts(base, base_on) == _facts_of_hosts(head, head_on)
    if same and _list_boards(base_hosts) == _list_boards(head_hosts):
        return []
    return list_differences(
        device_facts(base, base_on, meters=meters), device_facts(head, head_on, meters=meters)
    )


def _disturbance_notes(base: Record, head: Record) -> list[str]:
    """Return notes if others used the CPU during most of the rounds of a side."""
    disturbed = []
    for side, record in (("base", base), ("head", head)):
        count = sum(any(flag.name == "contended" for flag in round_.flags) for round_ in record.rounds)
        if record.rounds and count > MAJORITY * len(record.rounds):
            disturbed.append(f"{count} of {len(record.rounds)} rounds of {side}")
    if not disturbed:
        return []
    rounds = " and ".join(disturbed)
    return [f"contended: {CPU_SHARED} during {rounds}, which may explain the difference"]


def comparison_notes(
    base: Record, head: Record, base_on: Environment | None, head_on: Environment | None
) -> list[str]:
    """Return notes on comparable records: disturbed rounds, different boards, driver or host.

    Args:
        base: The record of the baseline.
        head: The record to compare with it.
        base_on: Machine of the baseline; None if unknown.
        head_on: Machine of the head; None if unknown.
    """
    notes = _disturbance_notes(base, head)
    boards = [device for device in base.devices if device != "cpu"]
    head_boards = [device for device in head.devices if device != "cpu"]
    if sorted(boards) != sorted(head_boards):
        notes.append(
            f"different boards of the same model ({', '.join(boards)} -> {', '.join(head_boards)}): "
            "such boards can differ by 10 % or more"
        )
    sides = [_measured_hosts(base, base_on), _measured_hosts(head, head_on)]
    if any(None in hosts for hosts in sides):
        return notes
    names, drivers = [], []
    for hosts in sides:
        known = [host for host in hosts if host is not None]
        names.append(_join({host.host.name for host in known}))
        drivers.append(_join({host.driver or UNKNOWN for host in known}))
    if not boards and names[0] != names[1]:
        notes.append(f"different host{'s' * (len(sides[0]) > 1)} of the same kind ({' -> '.join(names)})")
    if boards and drivers[0] != drivers[1]:
        notes.append(f"different driver ({' -> '.join(drivers)})")
    return notes


def _join(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


def describe_devices(record: Record, environment: Environment | None) -> str:
    """Describe devices and meter in one line: ``1x NVIDIA H200 700 W, nvml (measured)``."""
    facts = device_facts(record, environment)
    if facts["gpu.count"] != "0":
        limit = facts["gpu.power_limit"]
        device = f"{facts['gpu.count']}x {facts['gpu.name']}{'' if limit == UNKNOWN else f' {limit}'}"
    else:
        device = facts.get("cpu.model", UNKNOWN)
    if "hosts" in facts:
        device += f" on {facts['hosts']} hosts"
    if "meter.name" not in facts:
        return f"{device}, no meter"
    return f"{device}, {facts['meter.name']} ({facts['meter.kind']})"


def _domain(meter: MeterInfo) -> str:
    """The domain without its host and without the UUID of a board."""
    kind = domain_kind(meter.domain)
    return kind if kind == GPU_DOMAIN else without_host(meter.domain)


def _find_board(uuid: str, record: Record, environment: Environment | None) -> Board | None:
    known = [*record.boards, *_list_boards(_measured_hosts(record, environment))]
    return next((board for board in known if board.uuid == uuid), None)


def _list_boards(hosts: Iterable[Environment | None]) -> list[Board]:
    return [board for host in hosts if host is not None for board in host.gpus]


def _power_limit_w(board: Board | None, record: Record, environment: Environment | None) -> float | None:
    """The limit of the board; for a MIG instance, of the board with the same PCI bus id."""
    if board is None or board.power_limit_w is not None:
        return board.power_limit_w if board else None
    boards = _list_boards(_measured_hosts(record, environment))
    whole = (each for each in boards if each.pci_bus_id == board.pci_bus_id)
    return next((each.power_limit_w for each in whole), None)


def _memory_gib(board: Board | None) -> str:
    if board is None or board.memory_bytes is None:
        return UNKNOWN
    return f"{board.memory_bytes / 2**30:.1f} GiB"


def _count_values(values: Iterable[str]) -> str:
    """List distinct values, with counts if there are several: ``NVIDIA H200, NVIDIA L4 x2``."""
    counts = Counter(values)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(
        f"{value} x{count}" if count > 1 else str(value) for value, count in sorted(counts.items())
    )


def workload_facts(record: Record) -> dict[str, str]:
    """Describe what a test executes."""
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
    if record.device_roles:
        facts["device_roles"] = ", ".join(f"{role} {each}" for role, each in record.device_roles.items())
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
    """Return a short hash of the workload, equal for tests that execute the same."""
    return fingerprint(workload_facts(record))


def work_differences(base: Record, head: Record, tolerance: float, *, saturation: bool = True) -> list[str]:
    """Return why equal workloads may be different work: an edited test, a saturated server on one side, or
    answers of another length, and prompts of a served load.

    Args:
        base: The record of the baseline.
        head: The record to compare with it.
        tolerance: Relative change of the tokens from which on they differ.
        saturation: Whether a saturated server makes a difference; False for metrics whose result it is.
    """
    differences = []
    # Reports of earlier versions have none.
    if base.source_digest is not None and base.source_digest != head.source_digest:
        differences.append("the benchmark itself changed")
    sides = ("base", base), ("head", head)
    saturated = [_describe_saturation(side, record) for side, record in sides]
    if saturation and (saturated[0] is None) != (saturated[1] is None):
        differences += [each for each in saturated if each is not None]
    return differences + _token_differences(base, head, tolerance)


def partial_loads(base: Record, head: Record) -> list[str]:
    """Return which sides have a load that ended before it was complete, and why."""
    found = []
    for side, record in (("base", base), ("head", head)):
        cut = [flag for each in record.rounds for flag in each.flags if flag.name in CUT_SHORT]
        found += [f"a load of {side} {flag.name}: {flag.detail}" for flag in cut[:1]]
    return found


def _describe_saturation(side: str, record: Record) -> str | None:
    """Return that the load of a side was saturated in most rounds, and how; ``None`` if it was not."""
    details = [flag.detail for each in record.rounds for flag in each.flags if flag.name == SATURATED]
    if not details or len(details) <= MAJORITY * len(record.rounds):
        return None
    return f"only {side} is saturated, in {len(details)} of {len(record.rounds)} rounds ({details[0]})"


def _token_differences(base: Record, head: Record, tolerance: float) -> list[str]:
    if _is_search(base) or _is_search(head):
        return []
    names, unit = ["output"], "iteration"
    served = _is_served(base) and _is_served(head)
    if served:
        names, unit = ["input", "output"], "answered request"
        # The requests without an answer may have been longer than the others, or shorter.
        tolerance += _unanswered_share(base, head)
    elif not any(each.requests for record in (base, head) for each in record.rounds):
        # Those of a function's calls, as the test tells them.
        names = ["input", "output"]
    differences = []
    for name in names:
        before, after = (_median_tokens(each, name, per_request=served) for each in (base, head))
        if before and after and abs(log(after / before)) > log1p(tolerance):
            change = after / before - 1
            differences.append(f"{name} tokens per {unit}: {before:g} -> {after:g} ({change:+.0%})")
    return differences


def _median_tokens(record: Record, name: str, *, per_request: bool) -> float | None:
    """Return the input or output tokens of an iteration, or of an answered request."""
    counts = []
    for each in record.rounds:
        parts = len(each.served.sent_s) if per_request and each.served is not None else each.iterations
        if each.tokens is not None and parts:
            counts.append(getattr(each.tokens, name) / parts)
    return median(counts) if counts else None


def _unanswered_share(base: Record, head: Record) -> float:
    """Return the share of requests without an answer, of both sides together.

    That includes turns of a conversation that were not sent because an earlier one failed.
    """
    answered, asked = [], []
    for record in (base, head):
        loads = [(each.served, each.iterations) for each in record.rounds if each.served is not None]
        answered.append(fmean(len(served.sent_s) / count for served, count in loads))
        asked += [(len(served.sent_s) + len(served.failures)) / count for served, count in loads]
    return sum(1 - each / max(asked) for each in answered) if any(asked) else 0.0


def workload_differences(base: Record, head: Record) -> list[str]:
    """Return a line for each difference between the workloads of two records."""
    precisions = _precision_facts(base), _precision_facts(head)
    # Reports of earlier versions have none.
    differ = list_differences(*precisions) if all(precisions) else []
    if _raw_workload(base) == _raw_workload(head) and _batch(base) == _batch(head):
        return differ
    before, after = workload_facts(base), workload_facts(head)
    if all(precisions) and precisions[0]["precision.weights"] != precisions[1]["precision.weights"]:
        # These say the same as what was loaded.
        for facts in (before, after):
            facts.pop("dtype", None)
            facts.pop("options.dtype", None)
    return [*list_differences(before, after), *differ]


def _precision_facts(record: Record) -> dict[str, str]:
    """Describe the number types of a backend; empty if they are unknown."""
    precision = record.backend.precision if record.backend is not None else None
    if precision is None:
        return {}
    return {f"precision.{name}": str(getattr(precision, name)) for name in precision.__struct_fields__}


def _raw_workload(record: Record) -> tuple[object, ...]:
    """The workload facts unformatted, which are faster to compare."""
    backend = record.backend
    configuration = backend and (
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
        configuration,
        record.parallel,
        len(record.devices),
        record.device_roles,
        record.fallback,
        record.launch,
        record.start_method,
        [rank.threads for rank in record.ranks],
    )


def _batch(record: Record) -> tuple[str, str]:
    """Requests and input tokens of an iteration, in the first round.

    ``None`` of a served load, where they depend on the requests that failed, and of a function, whose calls
    may differ.
    """
    if not record.rounds or _is_served(record) or record.rounds[0].requests is None:
        return "None", "None"
    first = record.rounds[0]
    return _per_iteration(first.requests, first), _per_iteration(
        first.tokens.input if first.tokens else None, first
    )


def _is_served(record: Record) -> bool:
    return any(each.served is not None for each in record.rounds)


def _is_search(record: Record) -> bool:
    """Whether the load is the one that a search ended with, whose length depends on the rate it found."""
    return record.load_curve is not None and record.load_curve.between is not None


def _per_iteration(count: int | None, round_: Round) -> str:
    return "None" if count is None else f"{count / round_.iterations:g}"
