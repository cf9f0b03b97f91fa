# SPDX-License-Identifier: Apache-2.0
"""How one test is measured: the mark ``energy_options`` and the arguments of ``energy.pedantic``.

The arguments of ``pedantic`` override the mark, and the mark overrides the options of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.options.table import Settings
from pytest_llenergy.options.values import seconds, share, whole_number
from pytest_llenergy.record.defaults import FLOOR_ROUNDS, ROUNDS

if TYPE_CHECKING:
    # Collection parses marks, and needs nothing that measures.
    from pytest_llenergy.measure.round_plan import RoundPlan
    from pytest_llenergy.ranks.calls import TokensPerCall

#: What ``energy.pedantic`` does without a mark: one round of one call, as with pytest-benchmark.
PEDANTIC: Mapping[str, Any] = {"rounds": 1, "warmup": 0, "iterations": 1, "exact": True}


def parse_round_options(
    rounds: int | None,
    warmup: int | str | None,
    target: float | str | None,
    budget: float | None,
    iterations: int | None,
) -> dict[str, Any]:
    """Return the given settings of the mark ``energy_options`` as fields of a ``RoundPlan``.

    Raises:
        PlanError: A value is invalid, or none is given.
    """
    fields: dict[str, Any] = {}
    for name, value in (("rounds", rounds), ("iterations", iterations)):
        if value is not None:
            fields[name] = whole_number(name, value, 1)
    if warmup is not None:
        fields["warmup"] = None if warmup == "auto" else whole_number("warmup", warmup, 0)
    if target is not None:
        fields["target"] = _converted("target", target, share, (int, float, str))
    if budget is not None:
        fields["budget_s"] = _converted("budget", budget, seconds, (int, float))
    if not fields:
        raise PlanError("names no setting; add one, such as rounds=10, or remove the mark")
    return fields


def _converted(name: str, value: Any, read: Any, kinds: tuple[type, ...]) -> float:
    """Read a value as its command-line option does; True is no number."""
    try:
        return float(read(str(value) if isinstance(value, kinds) else ""))
    except ValueError as error:
        raise PlanError(f"{name} is {value!r}, {error}") from None


def plan_rounds(settings: Settings, changes: Mapping[str, Any]) -> RoundPlan:
    """Return how a test is measured by the options of the run and the fields that it ``changes``."""
    from pytest_llenergy.measure.round_plan import RoundPlan, least_gap_s

    rounds = changes.get("rounds", settings.rounds)
    plan = RoundPlan(
        rounds=rounds or ROUNDS,
        warmup=settings.warmup,
        gap_s=least_gap_s(changes.get("budget_s", settings.budget)),
        target=settings.target,
        budget_s=settings.budget,
        requests=settings.requests,
        # A number that somebody gave is kept, whatever it takes, as with pytest-benchmark.
        floor=FLOOR_ROUNDS if rounds is None else None,
    )
    return replace(plan, **changes)


def plan_pedantic_rounds(
    plan: RoundPlan,
    rounds: int | None,
    warmup_rounds: int | None,
    iterations: int | None,
    *,
    has_setup: bool,
) -> RoundPlan:
    """Return a plan with the numbers that ``energy.pedantic`` was given; None keeps that of the plan.

    Raises:
        LLEnergyError: A number is invalid, or a round with a set-up would have several calls.
    """
    given = {"rounds": (rounds, 1), "iterations": (iterations, 1), "warmup_rounds": (warmup_rounds, 0)}
    try:
        numbers: dict[str, Any] = {
            name: whole_number(name, *each) for name, each in given.items() if each[0] is not None
        }
    except PlanError as error:
        raise LLEnergyError(f"energy.pedantic: {error}") from None
    warmed_up = numbers.pop("warmup_rounds", None)
    plan = replace(plan, **numbers)
    if warmed_up is not None:
        iterations = plan.iterations or 1
        plan = replace(plan, warmup=warmed_up * iterations, warmup_block=iterations)
    if has_setup and (plan.iterations != 1 or plan.warmup is None):
        raise LLEnergyError(
            "energy.pedantic: setup prepares one call: use iterations=1 and a number of warmup_rounds, or "
            "prepare in the function"
        )
    return plan


@dataclass
class Arguments:
    """The arguments of a measured call, and what runs before and after each round.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        tokens: Tokens of each call.
        setup: Called before each round; may return ``(args, kwargs)``.
        teardown: Called after each round with the arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: TokensPerCall
    setup: Callable[[], Any] | None = None
    teardown: Callable[..., Any] | None = None
    _given: tuple[tuple[Any, ...], Mapping[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._given = self.args, self.kwargs

    def prepare(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Call ``setup``, and return the arguments of the next round.

        Raises:
            LLEnergyError: It returned something else, or some were given as well.
        """
        __tracebackhide__ = True
        made = self.setup() if self.setup is not None else None
        if not made:
            self.args, self.kwargs = self._given
            return self._given
        if any(self._given) or not (isinstance(made, tuple | list) and len(made) == 2):
            raise LLEnergyError(
                f"energy.pedantic: setup returned {type(made).__name__}, needs None, or (args, kwargs) where "
                "energy.pedantic itself got no arguments"
            )
        self.args, self.kwargs = tuple(made[0]), made[1]
        return self.args, self.kwargs

    def clean_up(self) -> None:
        """Call ``teardown``."""
        __tracebackhide__ = True
        if self.teardown is not None:
            self.teardown(*self.args, **self.kwargs)

    def check_for_ranks(self) -> None:
        """Raise ``LLEnergyError`` if ``setup`` or ``teardown`` would not run where the call runs."""
        for name, function in (("setup", self.setup), ("teardown", self.teardown)):
            if function is not None:
                raise LLEnergyError(
                    f"energy.pedantic: {name} runs in pytest's own process, but the call runs in the ranks; "
                    "do that work inside the called function"
                )
