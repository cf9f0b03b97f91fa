# SPDX-License-Identifier: Apache-2.0
"""``energy.max_load`` on a server that refuses loads, breaks the protocol, or dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.plugin.handles.loads import LoadMeasurement, describe_cut
from pytest_llenergy.record.record import Flag

from ..backends.servers.start import queueing
from ..compare.runs import round_of

pytest.importorskip("aiohttp")

Read = Callable[..., dict[str, Any]]

#: No load misses the limit, however busy the host is, so that the search measures 56.6 and 80 request/s, then
#: the highest in full.
SEARCH = """
from pytest_llenergy import slo

def test_it(energy, backend):
    energy.max_load(
        backend.serve, ["abc"], slo=slo(ttft=20, attainment=0.9), between=(40, 80), tolerance=1.0,
        num_requests=20, max_new_tokens=3, ignore_eos=True, max_failures={max_failures})
"""


@pytest.fixture
def search(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], Any]:
    """Return a function that runs a search on a server with an order for loads whose titles end so."""
    orders, measure = quick.path / "orders", LoadMeasurement._measure

    def search(given: Mapping[str, str], max_failures: int = 0) -> Any:
        def measure_as_ordered(self: Any, rate: float, plan: Any, title: str, *args: Any) -> None:
            name = f"{title}, {rate:.3g}"
            orders.write_text(next((order for end, order in given.items() if name.endswith(end)), ""))
            measure(self, rate, plan, title, *args)

        monkeypatch.setattr(LoadMeasurement, "_measure", measure_as_ordered)
        orders.write_text("")
        quick.makepyfile(SEARCH.format(max_failures=max_failures))
        command = queueing(slots=20, service=0.05, orders=orders)
        options = "--energy-report", "--energy-backend=server", f"--energy-server={command}"
        return quick.runpytest(*options)

    return search


def starts(path: Path) -> int:
    return len((path / "orders.starts").read_text().splitlines())


@pytest.mark.slow
def test_a_search_goes_on_below_a_load_that_the_server_refuses(
    search: Any, read_report: Read, quick: pytest.Pytester
) -> None:
    """With the same server, in short and in full measurements."""
    result = search({"maximum load, 80": "refuse"})
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    curve = record["load_curve"]
    (refused,) = [each for each in curve["points"] if each["refused"]]
    assert (refused["request_rate"], refused["within_slo"]) == (80, False)
    reason = "refused: server: request "
    assert refused["reason"].startswith(reason)
    assert curve["exceeded_at_requests_per_s"] == 80
    assert curve["max_load_requests_per_s"] == pytest.approx(3200**0.5)
    # Its full measurement is the record's.
    assert (record["status"], len(record["rounds"])) == ("measured", 3)
    assert starts(quick.path) == 1
    result.stdout.re_match_lines([r"80 .* refused$", f"80 request/s: {reason}.*503"])


def test_a_search_whose_full_measurements_are_all_refused_finds_no_maximum(
    search: Any, read_report: Read
) -> None:
    """The server has answered before, so that it works. The lowest rate is refused as well."""
    search({f"maximum load, {rate}": "refuse" for rate in (80, 56.6, 40)}).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    metric = record["metrics"]["max_load_requests_per_s"]
    assert (metric["value"], record["status"]) == (None, "measured")
    assert metric["reason"].startswith("even 40 request/s, the lowest rate, is not within the SLO")
    assert record["metrics"]["energy_per_output_token_j"]["reason"].startswith("refused: server: ")
    # A full measurement ends with the round that is refused.
    full = [point for point in record["load_curve"]["points"] if point["refused"]]
    assert [(point["request_rate"], point["rounds"]) for point in full] == [
        (80, 1), (pytest.approx(3200**0.5), 1), (40, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("max_failures", "advice"), [(0, "set max_failures"), (1, "raise max_failures")])
def test_a_search_whose_first_load_is_refused_fails_with_the_error(
    search: Any, read_report: Read, max_failures: int, advice: str
) -> None:
    result = search({"56.6": "refuse"}, max_failures)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"*BackendError: max_load: the load of 56.6 request/s: refused: *503*; {advice}, or search *"]
    )
    (point,) = read_report()["records"][0]["load_curve"]["points"]
    assert point["refused"]


def test_the_reason_of_a_load_that_ended_early_names_the_requests_that_failed() -> None:
    ended, failed, busy = (
        Flag(name=name, severity="warning", detail=detail)
        for name, detail in (("ended-early", "7 missed"), ("failed-request", "7 failed: 503"), ("busy", "x"))
    )
    assert describe_cut([round_of(1.0, flags=[failed])]) is None
    rounds = [round_of(1.0, flags=[failed]), round_of(1.0, flags=[busy, ended])]
    assert describe_cut(rounds) == "ended-early: 7 missed"
    rounds = [round_of(1.0), round_of(1.0, flags=[busy, ended, failed])]
    assert describe_cut(rounds) == "ended-early: 7 missed; failed-request: 7 failed: 503"


@pytest.mark.parametrize(
    ("order", "max_failures", "message"),
    [
        ("cache", 0, "BackendError: max_load: the load of 80 request/s: prefix cache hit: "),
        ("exit", 1000, "ServerError: server: "),
    ],
)
@pytest.mark.slow
def test_other_faults_are_no_sign_of_too_high_a_load(
    search: Any, read_report: Read, order: str, message: str, max_failures: int
) -> None:
    """Even if more requests have failed than may miss the SLO, which ends the load."""
    result = search({"maximum load, 80": order}, max_failures)
    result.assert_outcomes(failed=1)
    assert message in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    curve = read_report()["records"][0]["load_curve"]
    assert (curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]) == (None, None)
    # What held until then is kept.
    assert True in [point["within_slo"] for point in curve["points"]]
