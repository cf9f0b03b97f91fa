# SPDX-License-Identifier: Apache-2.0
"""One environment of several: those of hosts of one kind, or of several Pythons on one host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pytest_llenergy.model.environment import Environment


def joined(known: Sequence[Environment]) -> Environment:
    """Of one kind of machine: every board, so that records find theirs, and every name."""
    boards = {board.uuid: board for each in known for board in each.gpus}
    names = list(dict.fromkeys(name for each in known for name in each.packages))
    return msgspec.structs.replace(
        known[0],
        host=msgspec.structs.replace(known[0].host, name=_joined(each.host.name for each in known)),
        gpus=list(boards.values()),
        driver=_joined(each.driver for each in known) or None,
        python=_joined(each.python for each in known),
        packages={name: _joined(each.packages.get(name, "none") for each in known) for name in names},
    )


def differing(one: Environment, other: Environment) -> str:
    """What makes two machines different ones, in words."""
    here, there = _facts(one), _facts(other)
    return "; ".join(f"{name}: {here[name]} -> {there[name]}" for name in here if here[name] != there[name])


def _facts(environment: Environment) -> dict[str, str]:
    host = environment.host
    boards = sorted(f"{board.name} {board.power_limit_w or '?'} W" for board in environment.gpus)
    return {
        "CPU": f"{host.cpu_model} ({host.machine})",
        "cores": str(host.logical_cpus),
        "memory": f"{round(host.memory_bytes / 2**30)} GiB",
        "GPUs": ", ".join(boards) or "none",
        "GPUs missing": str(len(environment.gpus_missing)),
    }


def _joined(values: Iterable[str | None]) -> str:
    """Each once, ``2.9, 2.8``."""
    return ", ".join(dict.fromkeys(value for value in values if value))
