# SPDX-License-Identifier: Apache-2.0
"""Registry of meters, and the selection of meters for a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from pytest_llenergy.energy.meters.base import Domain, Meter, MeterSpec, Targets
from pytest_llenergy.errors import MeterDoesNotApply, MeterError

if TYPE_CHECKING:
    from pytest_llenergy.record.entry_points import BrokenEntryPoint, LoadedEntryPoints

#: Modules of this package, each with a ``SPEC`` of its name.
BUILTIN = ("nvml", "rapl", "estimate", "amd", "hwmon", "command")

ENTRY_POINTS = "pytest_llenergy.meters"


class MeterRegistry(Mapping[str, MeterSpec]):
    """Meters by name: built-in, from entry points (group ``pytest_llenergy.meters``), then ``extra``.

    A meter is imported when it is looked up. Later sources override earlier ones of the same name, except
    that an entry point cannot replace a built-in meter.

    Looking up a meter that is not built in raises ``MeterError`` if an entry point does not provide a
    ``MeterSpec``; with ``skip_broken`` such entry points are only listed in ``broken``. ``installed`` are the
    meters from entry points, if they were loaded before.
    """

    def __init__(
        self,
        extra: Sequence[MeterSpec] = (),
        *,
        skip_broken: bool = False,
        installed: LoadedEntryPoints[MeterSpec] | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in extra}
        self._skip_broken = skip_broken
        self._installed = installed

    def __getitem__(self, name: str) -> MeterSpec:
        if name not in self._specs:
            if name in BUILTIN:
                module = import_module(f"pytest_llenergy.energy.meters.{name}")
                self._specs[name] = module.SPEC
            else:
                self._specs[name] = self._from_packages()[name]
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*BUILTIN, *self._from_packages(), *self._specs]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def broken(self) -> tuple[BrokenEntryPoint, ...]:
        """Entry points that do not provide a ``MeterSpec``."""
        return self._load_entry_points().broken

    def _from_packages(self) -> dict[str, MeterSpec]:
        installed = self._load_entry_points()
        if installed.broken and not self._skip_broken:
            raise MeterError("; ".join(each.reason for each in installed.broken))
        return installed.plugins

    def _load_entry_points(self) -> LoadedEntryPoints[MeterSpec]:
        if self._installed is None:
            # It imports importlib.metadata, which takes longer than all the rest.
            from pytest_llenergy.record.entry_points import load_entry_points

            self._installed = load_entry_points(ENTRY_POINTS, MeterSpec)
        return self._installed


class Selection(NamedTuple):
    """Open meters, and for each applicable meter that could not be opened the reason.

    ``processes`` work for the test although this process did not start them.
    """

    meters: tuple[Meter, ...]
    reasons: tuple[str, ...]
    processes: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the meters."""
        for meter in self.meters:
            meter.close()


def check_names(names: Sequence[str], specs: Mapping[str, MeterSpec]) -> None:
    """Check names of the form ``NAME`` or ``NAME:ARGUMENT``.

    Raises:
        MeterError: If a name is invalid.
    """
    if len(set(names)) < len(names):
        raise MeterError(f"a meter is named twice: {', '.join(names)}")
    for name in names:
        meter, colon, argument = name.partition(":")
        if meter not in specs:
            raise MeterError(f"unknown meter {meter!r}; known: auto, {', '.join(specs)}")
        if specs[meter].takes_argument and not argument.strip():
            raise MeterError(f"meter {meter} needs an argument: {meter}:ARGUMENT")
        if colon and not specs[meter].takes_argument:
            raise MeterError(f"meter {meter} takes no argument, and {argument!r} was given")


def check_arguments(names: Sequence[str], specs: Mapping[str, MeterSpec]) -> None:
    """Check the arguments of names as in ``check_names``. Raises ``MeterError`` for an invalid one."""
    for name in names:
        check = _spec(name, specs).check
        if check is not None:
            check(name.partition(":")[2])


def open_meters(
    names: Sequence[str], specs: Mapping[str, MeterSpec], targets: Targets, *, require_measured: bool = False
) -> Selection:
    """Open the meters that can read the targets.

    Args:
        names: Meters that the user selected, all of which must open. Empty selects every meter that measures
            the targets, or the estimates if nothing can be measured.
        specs: The known meters.
        targets: The devices of the test.
        require_measured: Whether estimates are not accepted.

    Raises:
        MeterError: No acceptable meter opens; the message has every reason.
    """
    check_names(names, specs)
    wanted = list(names) or [name for name, spec in specs.items() if spec.by_default]
    meters: list[Meter] = []
    reasons: list[str] = []
    inapplicable: list[str] = []
    for name in sorted(wanted, key=lambda name: _spec(name, specs).kind == "estimated"):
        spec = _spec(name, specs)
        if spec.kind == "estimated" and (require_measured or (meters and not names)):
            continue
        try:
            argument = (name.partition(":")[2],) if spec.takes_argument else ()
            meters += spec.open(targets, *argument)
        except MeterDoesNotApply as error:
            inapplicable.append(str(error))
        except MeterError as error:
            reasons.append(str(error))
    overlap = _overlap(meters)
    if meters and not overlap and not (names and (reasons or inapplicable)):
        return Selection(tuple(meters), tuple(reasons), targets.processes)
    for meter in meters:
        meter.close()
    if overlap:
        raise MeterError(overlap)
    details = "; ".join([*reasons, *inapplicable]) or "none was tried"
    required = " that measures (--energy-require=measured)" if require_measured else ""
    raise MeterError(f"no meter{required} for {_describe(targets)}: {details}")


def _spec(name: str, specs: Mapping[str, MeterSpec]) -> MeterSpec:
    return specs[name.partition(":")[0]]


def _overlap(meters: Sequence[Meter]) -> str | None:
    """Return why the joules of these meters cannot be added, or ``None`` if nothing is counted twice."""
    covers_others = [meter.name for meter in meters if any(each.covers_others for each in meter.domains)]
    if not covers_others or len(meters) == 1:
        return None
    others = ", ".join(dict.fromkeys(meter.name for meter in meters if meter.name != covers_others[0]))
    return f"meter {covers_others[0]} covers what {others or 'another'} counts too; choose one of them"


def _describe(targets: Targets) -> str:
    return f"GPUs {', '.join(targets.gpus)}" if targets.gpus else "the CPU of this host"


class MeterFacts(NamedTuple):
    """A meter for one target: ``cpu``, a UUID, or None for a meter that needs an argument."""

    name: str
    target: str | None
    available: bool
    detail: str


def list_meters(targets: Targets) -> Iterator[MeterFacts]:
    """Open every known meter for the CPU, or for one GPU, and describe what it reads."""
    for name, meter in MeterRegistry(skip_broken=True).items():
        if not meter.takes_argument:
            yield from _open_meter(name, meter, targets)
        elif not targets.gpus:
            yield MeterFacts(name, None, False, f"by name only, --energy-meter={name}:ARGUMENT")


def _open_meter(name: str, meter: MeterSpec, targets: Targets) -> Iterator[MeterFacts]:
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
            yield MeterFacts(name, target, True, _describe_domain(domain))


def _describe_domain(domain: Domain) -> str:
    """Return what a domain reads, how often it ticks, its coverage in time, and its flags."""
    period = f", every {domain.update_period_s * 1e3:.4g} ms" if domain.update_period_s else ""
    sees = f", sees {domain.coverage:.0%} of the time" if domain.coverage < 1 else ""
    odd = "".join(f"; {flag.name}: {flag.detail}" for flag in domain.flags)
    return f"{domain.kind}, {domain.name} by {domain.source}{period}{sees}{odd}"
