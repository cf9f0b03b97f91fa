# SPDX-License-Identifier: Apache-2.0
"""Goodput and its energy, counted by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.errors import BackendError, PlanError
from pytest_llenergy.record.goodput import attainment, is_mostly, mark_good_requests, worst_latency_ratio
from pytest_llenergy.record.load_curve import Slo, slo
from pytest_llenergy.record.metrics import ROUND_METRICS, compute_metrics
from pytest_llenergy.record.record import Flag, Round, Tokens
from pytest_llenergy.record.served import ServedRequests

FAMILY = (
    "goodput_requests_per_s",
    "slo_attainment",
    "energy_per_good_request_j",
    "energy_per_output_token_at_slo_j",
)
LIMITS = slo(ttft=0.5, tpot=0.05, e2e=10.0)

#: TTFT, TPOT, E2E (seconds) and output tokens of four requests: good, late, slow and good with one token.
REQUESTS = ((0.5, 0.05, 3.0, 50), (0.6, 0.02, 2.0, 40), (0.1, 0.06, 6.0, 90), (0.2, None, 0.2, 1))


def load(
    requests: Sequence[tuple[float, float | None, float, int]] = REQUESTS,
    energy_j: float | None = 200.0,
    limits: Slo | None = LIMITS,
    flags: Sequence[Flag] = (),
) -> Round:
    """A round of two seconds per request."""
    columns = {
        "time_to_first_token_s": [each[0] for each in requests],
        "time_per_output_token_s": [each[1] for each in requests],
        "end_to_end_latency_s": [each[2] for each in requests],
    }
    served = ServedRequests(
        sent_s=[float(place) for place in range(len(requests))],
        output_tokens=[each[3] for each in requests],
        **columns,  # type: ignore[arg-type]
    )
    round_ = Round(
        start_s=0.0,
        duration_s=8.0,
        energy_j=energy_j,
        energy_u_j=2.0 if energy_j is not None else None,
        energy_u_absolute_j=4.0 if energy_j is not None else None,
        tokens=Tokens(input=4, output=sum(each[3] for each in requests)),
        requests=len(requests),
        served=served,
        flags=list(flags),
    )
    return mark_good_requests(round_, limits)


def values(*rounds: Round) -> dict[str, float | None]:
    metrics = compute_metrics(rounds, None)
    return {name: metrics[name].value for name in FAMILY}


def test_a_request_is_good_if_it_meets_every_limit() -> None:
    """A latency that equals its limit meets it, and one token has no time per output token."""
    served = load().served
    assert served is not None
    assert served.good == [True, False, False, True]


def test_goodput_counts_good_requests_and_the_joules_of_the_whole_load() -> None:
    assert values(load(), load()) == {
        "goodput_requests_per_s": pytest.approx(2 / 8),
        "slo_attainment": pytest.approx(0.5),
        "energy_per_good_request_j": pytest.approx(100.0),
        "energy_per_output_token_at_slo_j": pytest.approx(200 / 51),
    }


@pytest.mark.parametrize(
    ("limits", "good"), [(slo(ttft=0.5), 3), (slo(tpot=0.05), 3), (slo(e2e=3.0), 3), (slo(e2e=0.1), 0)]
)
def test_limits_can_be_left_out(limits: Slo, good: int) -> None:
    assert attainment(load(limits=limits)) == good / 4


def test_a_load_without_good_requests_has_a_reason_and_no_energy_for_each() -> None:
    metrics = compute_metrics([load(limits=slo(ttft=0.01))] * 2, None)
    assert metrics["goodput_requests_per_s"].value == 0
    assert metrics["slo_attainment"].value == 0
    for name in FAMILY[2:4]:
        assert metrics[name].value is None
        assert metrics[name].reason == "2 of 2 rounds: no request met every limit of the SLO"


def test_a_round_without_good_requests_leaves_their_joules_without_a_value() -> None:
    """The other rounds alone would hide its joules."""
    metrics = compute_metrics([load(), load(), load([(1.0, 0.01, 2.0, 5)] * 4)], None)
    for name in FAMILY[2:4]:
        assert metrics[name].value is None
        assert metrics[name].reason == "1 of 3 rounds: no request met every limit of the SLO"


def test_joules_of_good_requests_are_those_of_all_rounds_together() -> None:
    one = load([(0.1, 0.01, 2.0, 5), *[(1.0, 0.01, 2.0, 5)] * 3])
    found = values(load(), load(), one)
    assert found["energy_per_good_request_j"] == pytest.approx(600 / 5)
    assert found["energy_per_output_token_at_slo_j"] == pytest.approx(600 / 107)


def test_uncertainties_come_from_the_rounds() -> None:
    metrics = compute_metrics([load(energy_j=joules) for joules in (190.0, 200.0, 210.0)], None)
    relative = {}
    for name in ("energy_j", *FAMILY[2:]):
        metric = metrics[name]
        assert metric.value is not None
        assert metric.uncertainty is not None
        assert metric.uncertainty_absolute is not None
        relative[name] = metric.uncertainty / metric.value
        assert metric.uncertainty_absolute > metric.uncertainty
    assert list(relative.values()) == pytest.approx([relative["energy_j"]] * 3, rel=0.02)


def test_a_load_without_joules_has_goodput() -> None:
    metrics = compute_metrics([load(energy_j=None)] * 2, None)
    assert metrics["goodput_requests_per_s"].value == pytest.approx(0.25)
    assert metrics["energy_per_good_request_j"].value is None


def test_a_load_without_an_slo_has_none_of_these_metrics() -> None:
    metrics = compute_metrics([load(limits=None)], None)
    assert not set(FAMILY) & set(metrics)
    assert "requests_per_s" in metrics


def test_failed_requests_are_never_good() -> None:
    if "failures" not in ServedRequests.__struct_fields__:
        pytest.skip("served loads have no failed requests")
    round_ = load()
    assert round_.served is not None
    failed = msgspec.structs.replace(round_.served, failures=["503"] * 4)
    assert attainment(msgspec.structs.replace(round_, served=failed)) == 2 / 8


def test_better_is_more_goodput_and_less_energy() -> None:
    directions = {name: METRICS[name].better for name in (*FAMILY, "max_load_requests_per_s")}
    assert directions == {
        "goodput_requests_per_s": "more",
        "slo_attainment": "more",
        "energy_per_good_request_j": "less",
        "energy_per_output_token_at_slo_j": "less",
        "max_load_requests_per_s": "more",
    }
    assert set(directions) <= set(ROUND_METRICS)


def test_the_ratio_to_the_limits_is_that_of_the_share_that_counts() -> None:
    requests = [(place / 100, None, 1.0, 1) for place in range(1, 101)]
    assert worst_latency_ratio([load(requests)], slo(ttft=0.99, attainment=0.99)) == pytest.approx(1.0)
    assert worst_latency_ratio([load(requests)], slo(ttft=1.8, attainment=0.9)) == pytest.approx(0.5)
    assert worst_latency_ratio([load(requests)], slo(tpot=1.0)) == 0


def test_a_load_is_saturated_if_half_of_its_rounds_are() -> None:
    flagged = load(flags=[Flag(name="saturated", severity="warning", detail="x")])
    assert is_mostly("saturated", [flagged, flagged, load()])
    assert is_mostly("saturated", [flagged, load()])
    assert not is_mostly("saturated", [flagged, load(), load()])
    assert not is_mostly("saturated", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "slo needs a limit: ttft, tpot or e2e, in seconds"),
        ({"ttft": -1}, "slo: ttft is -1, needs seconds, more than 0"),
        ({"e2e": math.nan}, "slo: e2e is nan, needs seconds, more than 0"),
        ({"ttft": math.inf}, "slo: ttft is inf, needs seconds, more than 0; leave it out for no limit"),
        ({"tpot": 1e31}, "slo: tpot is 1e+31, needs seconds, more than 0; leave it out for no limit"),
        ({"tpot": "50 ms"}, "slo: tpot is '50 ms', needs a number"),
        ({"ttft": 1, "attainment": 99}, "slo: attainment is 99, needs a share above 0 and up to 1, such as"),
    ],
)
def test_invalid_limits_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        slo(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_an_slo_is_a_parameter_of_serve() -> None:
    from pytest_llenergy.backends.tasks import ServeParams

    params = ServeParams.parse({"request_rate": 2.0, "slo": LIMITS})
    assert msgspec.convert(msgspec.to_builtins(params), ServeParams) == params
    assert params.primitives()["slo"] == "TTFT <= 0.5 s, TPOT <= 0.05 s, E2E <= 10 s for 99 %"
    with pytest.raises(BackendError, match=r"^serve: slo: Expected"):
        ServeParams.parse({"request_rate": 2.0, "slo": 0.5})


def test_the_package_offers_it() -> None:
    import pytest_llenergy

    assert pytest_llenergy.slo is slo
    with pytest.raises(AttributeError, match="has no attribute 'slos'"):
        _ = pytest_llenergy.slos
