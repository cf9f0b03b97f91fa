# SPDX-License-Identifier: Apache-2.0
"""Which meters are opened, and the errors when none can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pytest_llenergy.energy.meters.base import Domain, Meter, MeterSpec, Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, check_names, open_meters
from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.record.base import EnergyKind

CPU = Targets()


@dataclass
class Constant:
    """A meter without domains that records whether it was closed."""

    name: str
    domains: tuple[Domain, ...] = ()
    poll_period_s: float = 1.0
    closed: int = 0

    def read(self) -> Sequence[float | str]:
        return []

    def close(self) -> None:
        self.closed += 1


class Bench:
    """Creates specs whose meters open or refuse, and keeps every meter that they open."""

    def __init__(self) -> None:
        self.opened: list[Constant] = []

    def spec(
        self,
        name: str,
        kind: EnergyKind = "measured",
        refusal: str | None = None,
        inapplicable: str | None = None,
        takes_argument: bool = False,
    ) -> MeterSpec:
        def open_(targets: Targets, argument: str = "") -> list[Meter]:
            if inapplicable is not None:
                raise MeterDoesNotApply(f"{name}: {inapplicable}")
            if refusal is not None:
                raise MeterError(f"{name}: {refusal}")
            self.opened.append(Constant(f"{name}:{argument}" if argument else name))
            return [self.opened[-1]]

        by_default = not takes_argument
        return MeterSpec(name, kind, open_, takes_argument=takes_argument, by_default=by_default)

    def specs(self, *specs: MeterSpec) -> dict[str, MeterSpec]:
        return {spec.name: spec for spec in specs}

    @property
    def names(self) -> list[str]:
        return [meter.name for meter in self.opened]


def test_all_measuring_meters_are_opened_and_no_estimate() -> None:
    bench = Bench()
    specs = bench.specs(bench.spec("guess", "estimated"), bench.spec("a"), bench.spec("b"))
    selection = open_meters((), specs, CPU)
    assert [meter.name for meter in selection.meters] == bench.names == ["a", "b"]
    assert selection.reasons == ()
    selection.close()
    assert [meter.closed for meter in bench.opened] == [1, 1]


def test_an_estimate_is_opened_only_if_nothing_measures() -> None:
    bench = Bench()
    specs = bench.specs(
        bench.spec("guess", "estimated"),
        bench.spec("a", refusal="no driver"),
        bench.spec("b", refusal="none"),
    )
    selection = open_meters((), specs, CPU)
    assert [meter.name for meter in selection.meters] == ["guess"]
    assert selection.reasons == ("a: no driver", "b: none")


def test_a_meter_that_does_not_apply_gives_no_reason() -> None:
    bench = Bench()
    specs = bench.specs(
        bench.spec("a", inapplicable="the test uses no GPU"),
        bench.spec("b", refusal="no permission"),
        bench.spec("guess", "estimated"),
    )
    assert open_meters((), specs, CPU).reasons == ("b: no permission",)
    with pytest.raises(MeterError, match=r"^no meter for the CPU of this host: a: the test uses no GPU$"):
        open_meters(["a"], specs, CPU)


class TestArguments:
    def test_an_argument_is_passed_on_unchanged(self) -> None:
        bench = Bench()
        specs = bench.specs(bench.spec("a"), bench.spec("command", takes_argument=True))
        selection = open_meters(["command:watts --of a,b:c"], specs, CPU)
        assert [meter.name for meter in selection.meters] == ["command:watts --of a,b:c"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("command", "meter command needs an argument: command:ARGUMENT"),
            ("command: ", "meter command needs an argument: command:ARGUMENT"),
            ("a:b", "meter a takes no argument, and 'b' was given"),
        ],
    )
    def test_a_missing_or_unexpected_argument_is_refused(self, name: str, message: str) -> None:
        bench = Bench()
        specs = bench.specs(bench.spec("a"), bench.spec("command", takes_argument=True))
        with pytest.raises(MeterError) as caught:
            check_names([name], specs)
        assert str(caught.value) == message


def test_required_measurement_lists_every_reason() -> None:
    bench = Bench()
    specs = bench.specs(
        bench.spec("a", refusal="no driver"),
        bench.spec("b", refusal="none"),
        bench.spec("guess", "estimated"),
    )
    with pytest.raises(MeterError) as caught:
        open_meters((), specs, CPU, require_measured=True)
    assert str(caught.value) == (
        "no meter that measures (--energy-require=measured) for the CPU of this host: a: no driver; b: none"
    )
    assert bench.names == []


def test_a_named_meter_that_fails_to_open_closes_the_others() -> None:
    bench = Bench()
    specs = bench.specs(bench.spec("a"), bench.spec("b", refusal="no permission"))
    with pytest.raises(MeterError, match=r"^no meter for the CPU of this host: b: no permission$"):
        open_meters(["a", "b"], specs, CPU)
    assert [meter.closed for meter in bench.opened] == [1]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MeterError, match=r"^unknown meter 'nvlm'; known: auto, nvml, rapl, estimate$"):
        check_names(["nvlm"], {spec: MeterRegistry()[spec] for spec in ("nvml", "rapl", "estimate")})
    with pytest.raises(MeterError, match=r"^unknown meter 'x'"):
        open_meters(["x"], MeterRegistry(), CPU)


def test_gpus_without_a_meter_are_named_and_not_estimated() -> None:
    with pytest.raises(MeterError) as caught:
        open_meters((), MeterRegistry(), Targets(("GPU-none",)))
    message = str(caught.value)
    assert message.startswith("no meter for GPUs GPU-none: nvml: ")
    assert "rapl: the test uses GPUs" in message
    assert message.endswith("estimate: models the CPU only, and the test uses GPUs")


def test_added_meters_follow_the_built_in_ones() -> None:
    bench = Bench()
    assert list(MeterRegistry([bench.spec("mine")]))[:3] == ["nvml", "rapl", "estimate"]
    assert MeterRegistry([bench.spec("mine")])["mine"].kind == "measured"


def test_meters_that_would_count_energy_twice_are_refused() -> None:
    with pytest.raises(MeterError, match=r"^a meter is named twice: estimate, estimate$"):
        open_meters(["estimate", "estimate"], MeterRegistry(), CPU)
    specs = {**MeterRegistry(), **Bench().specs(Bench().spec("mine"))}
    with pytest.raises(MeterError, match=r"^meter estimate covers what mine counts too; choose one of them$"):
        open_meters(["mine", "estimate"], specs, CPU)
