# SPDX-License-Identifier: Apache-2.0
"""What can measure and what can run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_llenergy.backends.capabilities import Capabilities
from pytest_llenergy.backends.registry import found_backends
from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.meters.known import KnownMeters
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets
from pytest_llenergy.model.installed import Broken


@dataclass(frozen=True)
class MeterFacts:
    """A meter for one target, ``cpu`` or a UUID; ``None`` for one that has to be told what to read."""

    name: str
    target: str | None
    available: bool
    detail: str


@dataclass(frozen=True)
class EngineFacts:
    """A backend; ``missing`` is why it cannot run, and what to do. ``framework`` is what it runs in."""

    name: str
    missing: str | None
    framework: str | None = None


@dataclass(frozen=True)
class EngineRow:
    """A backend with its capability row. ``missing`` is why it cannot run here, ``install`` what mends it."""

    name: str
    missing: str | None
    install: str
    managed_by: str
    capabilities: Capabilities


def broken() -> tuple[Broken, ...]:
    """Entry points of others that give no backend; every test that asks for a backend fails by one."""
    return found_backends()[1]


def broken_meters() -> tuple[Broken, ...]:
    """Entry points of others that give no meter; no test can be measured until they are mended."""
    return KnownMeters().broken


def rows() -> Iterator[EngineRow]:
    """The row of every known backend."""
    for name, backend in found_backends()[0].items():
        row = backend.capabilities
        yield EngineRow(name, backend.missing(), backend.install, row.managed_by, row)


def engines() -> Iterator[EngineFacts]:
    """Every known backend."""
    for name, backend in found_backends()[0].items():
        yield EngineFacts(name, backend.missing(), backend.capabilities.framework)


def meters(uuids: Sequence[str]) -> Iterator[MeterFacts]:
    """Every known meter, opened for the CPU and for each GPU that it applies to."""
    for name, meter in KnownMeters(whole_only=True).items():
        if meter.takes_argument:
            yield MeterFacts(name, None, False, f"by name only, --energy-meter={name}:ARGUMENT")
            continue
        for targets in [Targets(), *(Targets((uuid,)) for uuid in uuids)]:
            yield from _opened(name, meter, targets)


def _opened(name: str, meter: MeterSpec, targets: Targets) -> Iterator[MeterFacts]:
    target = targets.gpus[0] if targets.gpus else "cpu"
    try:
        found = meter.open(targets)
    except MeterDoesNotApply:
        return
    except MeterError as error:
        yield MeterFacts(name, target, False, str(error))
        return
    for each in found:
        each.close()
        for domain in each.domains:
            yield MeterFacts(name, target, True, _domain(domain))


def _domain(domain: Domain) -> str:
    """What it reads, how often it ticks, how much of the time it looks, what is odd."""
    period = f", every {domain.update_period_s * 1e3:.4g} ms" if domain.update_period_s else ""
    sees = f", sees {domain.coverage:.0%} of the time" if domain.coverage < 1 else ""
    odd = "".join(f"; {flag.name}: {flag.detail}" for flag in domain.flags)
    return f"{domain.kind}, {domain.name} by {domain.source}{period}{sees}{odd}"
