# SPDX-License-Identifier: Apache-2.0
"""Decide whether two records may be compared: same kind of device, same meters, same workload.

Devices and workload are described by facts: pairs of a name and a text. Device facts stay the same between
runs: no clock rate, temperature, free memory, host name, driver or UUID. Two GPUs of one model are comparable
although they may differ by 10 %, so another GPU is a note. Workload facts determine what is executed.
Versions of backends and libraries are left out because they are under test, and output tokens because they
are a result: ``work_differences`` finds output tokens and test code that differ too much for a verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import log, log1p
from operator import attrgetter
from statistics import median

import msgspec

from pytest_llenergy.record.environment import Board, Environment
from pytest_llenergy.record.goodput import has_flag
from pytest_llenergy.record.record import LOCALHOST, BoardSettings, Record, domain_kind, without_host
from pytest_llenergy.record.served import CUT_SHORT, SATURATED

#: Text of an unknown fact.
UNKNOWN = "unknown"

#: Fields that the facts are made of: records that are equal in these have no differences.
DEVICES_OF = attrgetter("devices", "boards", "meters", "gpu_settings")
WORK_OF = attrgetter(
    *("id", "params", "backend", "parallel", "devices", "fallback", "launch"),
    *("start_method", "ranks"),
)

#: What hosts are compared by, in the order in which each fact lists them.
HOST_OF = attrgetter("cpu_model", "machine", "logical_cpus", "memory_bytes")


@dataclass(frozen=True)
class MeasuredRecord:
    """A record and the environment in which it was measured."""

    record: Record
    environment: Environment | None


def device_facts(record: Record, environment: Environment | None, *, meters: bool = True) -> dict[str, str]:
    """Describe the devices of a test and, with ``meters``, how it was measured."""
    hosts = _measured_hosts(record, environment)
    facts = {"host": UNKNOWN}
    if None not in hosts:
        known = sorted((each.host for each in hosts if each is not None), key=HOST_OF)
        facts = {
            "cpu.model": _count_runs([each.cpu_model for each in known]),
            "cpu.machine": _count_runs([each.machine for each in known]),
            "cpu.count": _count_runs([str(each.logical_cpus) for each in known]),
            "host.memory": _count_runs([f"{round(each.memory_bytes / 2**30)} GiB" for each in known]),
        }
    gpus = [device for device in record.devices if device != "cpu"]
    facts["gpu.count"] = str(len(gpus))
    if len(hosts) > 1:
        facts["hosts"] = str(len(hosts))
    if gpus:
        boards = {each.uuid: each for each in (*_boards_of(hosts), *record.boards)}
        found = [boards.get(uuid) for uuid in gpus]
        limits = [each.power_limit_w if each else None for each in found]
        facts["gpu.name"] = _count_values(each.name if each else UNKNOWN for each in found)
        facts["gpu.memory"] = _count_values(
            f"{each.memory_bytes / 2**30:.1f} GiB" if each and each.memory_bytes is not None else UNKNOWN
            for each in found
        )
        facts["gpu.power_limit"] = _count_values(f"{watts:g} W" if watts else UNKNOWN for watts in limits)
        facts["gpu.mig"] = _count_values("yes" if uuid.startswith("MIG-") else "no" for uuid in gpus)
    if record.gpu_settings:
        facts["gpu.settings"] = _count_values(map(_describe_settings, record.gpu_settings))
    if meters and record.meters:
        domains = [domain_kind(each.domain) for each in record.meters]
        attributed = record.kind == "attributed"
        facts |= {
            "meter.kind": "attributed" if attributed else _count_values(each.kind for each in record.meters),
            "meter.name": _count_values(each.name for each in record.meters),
            "meter.source": _count_values(each.source for each in record.meters),
            # Without the UUIDs of GPUs and the names of hosts.
            "meter.domain": _count_values(
                kind if kind == "gpu" else without_host(each.domain)
                for kind, each in zip(domains, record.meters, strict=True)
            ),
        }
    elif meters:
        facts["meter"] = "none"
    return facts


def _describe_settings(board: BoardSettings) -> str:
    parts = []
    if board.power_limit_w is not None:
        # As the driver has rounded it.
        parts.append(f"power limit {board.power_limit_found_w or board.power_limit_w:g} W")
    if board.graphics_clock_mhz is not None:
        parts.append(f"graphics clock {' to '.join(map(str, dict.fromkeys(board.graphics_clock_mhz)))} MHz")
    return ", ".join(parts)


def _measured_hosts(record: Record, environment: Environment | None) -> list[Environment | None]:
    """Return the hosts of a test's ranks, None for each that is unknown; without ranks, pytest's own."""
    if environment is None or not record.ranks:
        return [environment]
    hosts = {LOCALHOST: environment, **environment.cluster_hosts}
    return [hosts.get(name) for name in dict.fromkeys(rank.host for rank in record.ranks)]


def _boards_of(hosts: Iterable[Environment | None]) -> list[Board]:
    return [board for host in hosts if host is not None for board in host.gpus]


def _count_values(values: Iterable[str]) -> str:
    """List distinct values, with counts if there are several: ``NVIDIA H200, NVIDIA L4 x2``."""
    return _count_runs(sorted(values))


def _count_runs(values: Iterable[str]) -> str:
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    if len(runs) == 1:
        return runs[0][0]
    return ", ".join(f"{value} x{count}" if count > 1 else value for value, count in runs)


def list_differences(base: Mapping[str, str], head: Mapping[str, str]) -> list[str]:
    """Return a line for each fact that differs, such as ``gpu.name: NVIDIA L4 -> NVIDIA H200``."""
    sides = [(name, base.get(name, "none"), head.get(name, "none")) for name in {**base, **head}]
    return [f"{name}: {before} -> {after}" for name, before, after in sides if before != after]


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

    Returns:
        One line for each difference; empty if the records are comparable in this respect.
    """
    hosts = _measured_hosts(base, base_on), _measured_hosts(head, head_on)
    if None in (*hosts[0], *hosts[1]):
        return [f"host: {UNKNOWN}"]
    # Usual, and quicker to see than to describe.
    kinds = [[(HOST_OF(each.host), each.gpus) for each in side if each is not None] for side in hosts]
    if kinds[0] == kinds[1] and DEVICES_OF(base) == DEVICES_OF(head):
        return []
    sides = [device_facts(*side, meters=meters) for side in ((base, base_on), (head, head_on))]
    return list_differences(*sides)


def note_other_gpus(base: Record, head: Record) -> list[str]:
    """Return a note if comparable records are of different GPUs."""
    before, after = (
        ", ".join(sorted(device for device in each.devices if device != "cpu")) for each in (base, head)
    )
    if before == after:
        return []
    return [f"different GPUs of the same model ({before} -> {after}), which can differ by 10 % or more"]


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


def workload_facts(record: Record) -> dict[str, str]:
    """Describe what a test executes."""
    facts = {"id": record.id}
    facts |= {f"params.{name}": repr(value) for name, value in sorted(record.params.items())}
    backend = record.backend
    if backend is not None:
        facts |= {"backend": backend.name, "model": backend.model}
        facts |= {"model.revision": str(backend.model_revision), "dtype": str(backend.dtype)}
        facts |= {f"options.{name}": repr(value) for name, value in sorted(backend.options.items())}
        facts |= {"task": str(backend.task), "prompts": str(backend.prompts_digest)}
        facts |= {f"generation.{name}": repr(value) for name, value in sorted(backend.generation.items())}
        types = backend.precision
        if types is not None:
            facts |= {f"precision.{name}": str(getattr(types, name)) for name in types.__struct_fields__}
    degrees = record.parallel
    facts["parallel"] = ", ".join(f"{name} {getattr(degrees, name)}" for name in degrees.__struct_fields__)
    facts["devices"] = str(len(record.devices))
    facts |= {name: str(getattr(record, name)) for name in ("fallback", "launch", "start_method")}
    facts["ranks"] = str(len(record.ranks))
    facts["threads"] = ", ".join(sorted({str(rank.threads) for rank in record.ranks})) or "None"
    facts["requests"], facts["input tokens"] = _batch(record)
    return facts


def _batch(record: Record) -> tuple[str, str]:
    """Requests and input tokens of an iteration, in the first round.

    ``None`` of a served load, whose answered requests ``work_differences`` compares, and of a function, whose
    calls may differ.
    """
    first = record.rounds[0] if record.rounds else None
    if first is None or first.requests is None or _is_served(record):
        return "None", "None"
    tokens = "None" if first.tokens is None else f"{first.tokens.input / first.iterations:g}"
    return f"{first.requests / first.iterations:g}", tokens


def workload_key(record: Record) -> str:
    """Return a short hash of the workload, equal for tests that execute the same."""
    return fingerprint(workload_facts(record))


def workload_differences(base: Record, head: Record) -> list[str]:
    """Return a line for each difference between the workloads of two records."""
    if WORK_OF(base) == WORK_OF(head) and _batch(base) == _batch(head):
        return []
    return list_differences(workload_facts(base), workload_facts(head))


def work_differences(base: Record, head: Record, tolerance: float) -> list[str]:
    """Return why equal workloads may be different work: an edited test, or answers of another length."""
    # Reports of other tools have none.
    edited = base.source_digest is not None and base.source_digest != head.source_digest
    return ["the benchmark itself changed"] * edited + _token_differences(base, head, tolerance)


def load_differences(base: Record, head: Record) -> list[str]:
    """Return which sides have a load that ended early, or a server that only there did not keep up."""
    found, saturated = [], []
    for side, record in (("base", base), ("head", head)):
        flags = [flag for each in record.rounds for flag in each.flags]
        cut = [f"a load of {side} {flag.name}: {flag.detail}" for flag in flags if flag.name in CUT_SHORT]
        found += cut[:1]
        details = [flag.detail for flag in flags if flag.name == SATURATED]
        if 2 * sum(has_flag(each, SATURATED) for each in record.rounds) > len(record.rounds):
            saturated.append(f"only {side} is saturated ({details[0]})")
    return found + (saturated if len(saturated) == 1 else [])


def _token_differences(base: Record, head: Record, tolerance: float) -> list[str]:
    # Loads that a search ended with are as long as the rate that it found makes them.
    curves = [each.load_curve for each in (base, head) if each.load_curve is not None]
    if any(each.between is not None for each in curves):
        return []
    counts = [[(each.tokens, each.iterations, each.served) for each in side.rounds] for side in (base, head)]
    if counts[0] == counts[1]:
        return []
    names, unit = ["output"], "iteration"
    served = _is_served(base) and _is_served(head)
    if served:
        names, unit = ["input", "output"], "answered request"
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


def _is_served(record: Record) -> bool:
    return any(each.served is not None for each in record.rounds)
