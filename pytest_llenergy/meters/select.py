# SPDX-License-Identifier: Apache-2.0
"""Which meters read a test: everything that measures, and a model only where nothing does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters import estimate, nvml, rapl
from pytest_llenergy.meters.protocol import Meter, MeterSpec, Targets

BUILTIN = (nvml.SPEC, rapl.SPEC, estimate.SPEC)
ENTRY_POINTS = "pytest_llenergy.meters"


@dataclass(frozen=True)
class Selection:
    """Open meters, and for each that could not be opened the reason."""

    meters: tuple[Meter, ...]
    reasons: tuple[str, ...]

    def close(self) -> None:
        """Close the meters unread."""
        for meter in self.meters:
            meter.close()


def known_meters(extra: Sequence[MeterSpec] = ()) -> dict[str, MeterSpec]:
    """Built-in meters, those of entry points (group ``pytest_llenergy.meters``), then ``extra``."""
    specs = {spec.name: spec for spec in BUILTIN}
    for point in entry_points(group=ENTRY_POINTS):
        specs[point.name] = point.load()
    specs.update((spec.name, spec) for spec in extra)
    return specs


def check_names(names: Sequence[str], specs: Mapping[str, MeterSpec]) -> None:
    """Raises ``MeterError`` for a name that is not known."""
    for name in names:
        if name not in specs:
            raise MeterError(f"unknown meter {name!r}; known: auto, {', '.join(specs)}")


def open_meters(
    names: Sequence[str], specs: Mapping[str, MeterSpec], targets: Targets, *, require_measured: bool = False
) -> Selection:
    """Open what can read the targets.

    ``names`` empty means automatic: every meter that measures the targets; where there is none, the
    estimates. Meters named by the user must open. Raises ``MeterError`` naming every reason when no
    meter opens, or none that measures with ``require_measured``.
    """
    check_names(names, specs)
    wanted = [specs[name] for name in names] or list(specs.values())
    meters: list[Meter] = []
    reasons: list[str] = []
    for spec in sorted(wanted, key=lambda spec: spec.kind == "estimated"):
        if spec.kind == "estimated" and (require_measured or (meters and not names)):
            continue
        try:
            meters.append(spec.open(targets))
        except MeterError as error:
            reasons.append(str(error))
    if meters and not (names and reasons):
        return Selection(tuple(meters), tuple(reasons))
    for meter in meters:
        meter.close()
    found = "; ".join(reasons) or "none was tried"
    required = " that measures (--energy-require=measured)" if require_measured else ""
    raise MeterError(f"no meter{required} for {_describe(targets)}: {found}")


def _describe(targets: Targets) -> str:
    return f"GPUs {', '.join(targets.gpus)}" if targets.gpus else "the CPU of this host"
