# SPDX-License-Identifier: Apache-2.0
"""A capability row in words, the same in the terminal and in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_llenergy.backends.capabilities import DEGREES, Capabilities

UNKNOWN = "not said"
NEVER_RUN = "not run on hardware"


@dataclass(frozen=True)
class Fact:
    """One field of a row. ``name`` is that of the field, ``source`` how it is known."""

    name: str
    title: str
    value: str
    reason: str | None = None
    source: str = UNKNOWN

    @property
    def text(self) -> str:
        """The value, with the reason where the row gives one."""
        return f"{self.value}: {self.reason}" if self.reason else self.value


def facts(row: Capabilities) -> Iterator[Fact]:
    """Every field that a test can ask for or a reader must know, in the order of the table."""
    for name, title, value in _values(row):
        yield Fact(name, title, value, row.reasons.get(name), row.sources.get(name, UNKNOWN))


def _values(row: Capabilities) -> Iterator[tuple[str, str, str]]:
    yield "launch", "launch", _launch(row)
    yield "managed_by", "devices shared out by", row.managed_by
    yield "cpu", "CPU", _yes(row.cpu)
    yield "gpu", "NVIDIA GPUs", _yes(row.gpu)
    for kind in DEGREES:
        yield kind, kind, _yes(getattr(row, kind))
    yield "tasks", "tasks", _list(row.tasks)
    yield "batching", "batching", _list(row.batching)
    yield "prefix_cache", "prefix cache", row.prefix_cache
    yield "caches", "key-value caches", _list(row.caches)
    yield "timestamps", "timestamps", _timestamps(row)
    yield "options", "load options", _list(row.options)
    yield "hardware", "run on", row.hardware or NEVER_RUN


def _launch(row: Capabilities) -> str:
    if row.launch == "ranks":
        return "ranks, one a device"
    if not row.data:
        return "engine"
    return f"engine; copies by {'the plugin' if row.replicas == 'plugin' else 'the engine'}"


def _timestamps(row: Capabilities) -> str:
    if row.timestamps == "none":
        return "none"
    return f"each {row.timestamps}, {'exact' if row.exact else 'not exact'}; {row.clock}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _list(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "none"
