# SPDX-License-Identifier: Apache-2.0
"""``energy.load_curve`` and ``energy.max_load`` in real runs, on a server of known capacity."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.plugin.handles.loads import LoadMeasurement, make_point
from pytest_llenergy.record.load_curve import Slo, slo
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Flag, Procedure, Round
from pytest_llenergy.report.loads import describe_result

from ..backends.servers.start import llama, queueing
from ..record.test_goodput import load

pytest.importorskip("aiohttp")

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

#: Four slots of 0.05 s: 80 requests per second.
SERVER = queueing(slots=4, service=0.05)
OPTIONS = ["--energy-report", "--energy-backend=server"]

SEARCH = """
from pytest_llenergy import slo

def test_it(energy, backend):
    run = energy.max_load(
        backend.serve, ["abc"], slo=slo(ttft=0.2, attainment=0.9), max_new_tokens=3, {arguments})
    print(run)
"""


#: Tells an outer test of each point, with its warm-ups.
TELL_POINTS = """
from pytest_llenergy.plugin.handles.loads import LoadMeasurement
keep = LoadMeasurement._keep
def keep_and_tell(self, point, experiment):
    keep(self, point, experiment)
    with open("points", "a") as told:
        print(experiment.procedure.warmup_iterations, file=told)
LoadMeasurement._keep = keep_and_tell
"""


def tell_points(quick: pytest.Pytester) -> Path:
    """Let an inner run in a process of its own write a line for each point into the file returned."""
    conftest = quick.path / "conftest.py"
    conftest.write_text(f"{conftest.read_text()}{TELL_POINTS}")
    return quick.path / "points"


def run_search(quick: pytest.Pytester, arguments: str, *options: str, server: str = SERVER) -> Any:
    quick.makepyfile(SEARCH.format(arguments=arguments))
    return quick.runpytest(*OPTIONS, f"--energy-server={server}", *options)


def test_the_maximum_load_of_a_known_server_is_found(quick: pytest.Pytester, read_report: Read) -> None:
    """A queue that a short load leaves shorter than the limit shows only well above capacity.

    tests/measure/test_load_search.py and benchmarks/plugin/serving check 5 %, with longer loads.
    """
    result = run_search(quick, "between=(25, 640), tolerance=1.0, num_requests=60", "-s")
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    curve = record["load_curve"]
    found, above = curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]
    assert 55 < found < above < 160
    assert above / found < 1.5 * 1.001
    points = curve["points"]
    assert {found, above} <= {point["request_rate"] for point in points}
    assert curve["between"] == [25, 640]
    assert curve["slo"] == {"ttft_s": 0.2, "tpot_s": None, "e2e_s": None, "attainment": 0.9}
    # The rounds are those of the full measurement at the maximum, which is the last point. The options ask
    # for two, of which a disturbed one would decide.
    last = points[-1]
    assert (last["request_rate"], last["within_slo"], last["rounds"]) == (found, True, 3)
    metric = record["metrics"]["max_load_requests_per_s"]
    assert metric["value"] == found
    assert metric["uncertainty"] >= (above - found) / 3**0.5 * 0.999
    assert metric["uncertainty_absolute"] == curve["max_load_u_requests_per_s"] >= metric["uncertainty"]
    assert record["rounds"][0]["max_load"]["requests_per_s"] == found
    metrics = {name: each["value"] for name, each in record["metrics"].items()}
    assert last["slo_attainment"] >= 0.9
    good = [each for round_ in record["rounds"] for each in round_["served"]["good"]]
    assert last["slo_attainment"] == pytest.approx(sum(good) / len(good))
    seconds = sum(round_["duration_s"] for round_ in record["rounds"])
    assert last["goodput_requests_per_s"] == pytest.approx(sum(good) / seconds)
    joules = sum(round_["energy_j"] for round_ in record["rounds"])
    assert metrics["energy_per_good_request_j"] == pytest.approx(joules / sum(good))
    assert last["energy_per_output_token_u_j"] is not None
    assert record["times"]["other_loads_s"] > record["times"]["rounds_s"]
    # What differs from run to run is no part of the workload.
    asked = record["backend"]["generation"]
    assert (asked["request_rate"], asked["num_requests"]) == ("maximum from 25, 640", 60)
    text = " ".join(result.stdout.str().split())
    assert re.search(
        r"LoadRun of \d+ loads, maximum load [\d.]+ ± [\d.]+ request/s \([\d.]+ exceeds it\); Run of", text
    )
    assert re.search(
        r"test_it.*: maximum load [\d.]+ ± [\d.]+ request/s \(.*SLO:\s+TTFT <= 0.2 s\s+for\s+90\s+%", text
    )


def test_a_disabled_search_is_one_load_at_the_lowest_rate(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        SEARCH.format(arguments="between=(4, 400), num_requests=8") + "    run.curve\n    assert 0"
    )
    options = ["--energy-backend=server", f"--energy-server={SERVER}", "--energy-disable"]
    begin_s = time.monotonic()
    result = quick.runpytest(*options, "-s")
    result.assert_outcomes(skipped=1)
    # At the highest rate, 8 requests arrive within 0.02 s.
    assert time.monotonic() - begin_s > 1
    result.stdout.fnmatch_lines(["*<Run: --energy-disable: nothing was measured>*"])


@pytest.mark.slow
def test_the_maximum_load_of_llama_cpp_is_bracketed(quick: pytest.Pytester, read_report: Read) -> None:
    """The highest rate sends all requests at once, of which the last wait for several others on any CPU.

    A busy host may be too unsteady for a maximum, which the curve then explains.
    """
    pytest.importorskip("xllamacpp", reason="no module xllamacpp: pip install xllamacpp")
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            energy.max_load(
                backend.serve, ["The capital of France is", "hello world"], slo=slo(ttft=1, attainment=0.7),
                between=(0.5, 50), tolerance=1.0, budget=60, num_requests=24, max_new_tokens=32,
                ignore_eos=True)
        """
    )
    quick.runpytest(*OPTIONS, f"--energy-server={llama()}").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["backend"]["options"]["server"] == "llama.cpp"
    curve = record["load_curve"]
    found, above = curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]
    results = {point["request_rate"]: point["within_slo"] for point in curve["points"]}
    # Loads that ended early have no figures, and the reason.
    assert all(point["reason"] or point["energy_per_output_token_j"] > 0 for point in curve["points"])
    if found is None:
        assert curve["reason"]
    else:
        assert 0.5 <= found < above <= 50
        assert (results[found], results[above]) == (True, False)
        assert record["metrics"]["max_load_requests_per_s"]["value"] == found


def test_a_search_that_brackets_nothing_has_no_value(quick: pytest.Pytester, read_report: Read) -> None:
    result = run_search(quick, "between=(200, 300), tolerance=1.0, num_requests=600")
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    metric = record["metrics"]["max_load_requests_per_s"]
    assert metric["value"] is None
    assert metric["reason"] == (
        "even 200 request/s, the lowest rate, is not within the SLO; search lower rates"
    )
    assert record["load_curve"]["max_load_requests_per_s"] is None
    assert record["status"] == "measured"
    for point in record["load_curve"]["points"]:
        # Each ended early, and has no figure of the part that was sent.
        assert (point["within_slo"], point["slo_attainment"], point["end_to_end_latency_p99_s"]) == (
            False,
            None,
            None,
        )
        assert point["reason"].startswith("ended-early: the load ended with ")
    token = record["metrics"]["energy_per_output_token_j"]
    assert token["value"] is None
    assert token["reason"].startswith("ended-early: ")
    rows = [line for line in result.outlines if re.match(r"[\d.]+k? .* exceeds$", line)]
    assert len(rows) == len(record["load_curve"]["points"])


def test_a_search_that_is_within_the_slo_throughout_has_a_lower_bound(
    quick: pytest.Pytester, read_report: Read
) -> None:
    result = run_search(quick, "between=(20, 25), tolerance=0.8, num_requests=10")
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["metrics"]["max_load_requests_per_s"]["value"] is None
    curve = record["load_curve"]
    assert (curve["max_load_requests_per_s"], curve["exceeded_at_requests_per_s"]) == (25, None)
    text = " ".join(result.stdout.str().split())
    assert ": maximum load >= 25 request/s; even 25 request/s, the highest rate," in text


def test_a_search_sends_more_requests_where_so_few_show_nothing(
    quick: pytest.Pytester, read_report: Read
) -> None:
    run_search(quick, "between=(60, 70), tolerance=0.8, num_requests=10").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    points = record["load_curve"]["points"]
    # Several times on a busy machine, where requests take longer.
    decided = next(place for place, point in enumerate(points) if not point["short"])
    tried = points[: decided + 1]
    assert (tried[0]["requests"], tried[0]["within_slo"]) == (10, None)
    assert {point["request_rate"] for point in tried} == {points[0]["request_rate"]}
    assert all(b["requests"] >= 2 * a["requests"] for a, b in pairwise(tried))
    assert all(point["requests"] > 10 for point in points[1:])
    assert points[decided]["within_slo"] is not None


def test_a_load_that_does_not_fit_into_the_budget_is_not_begun(quick: pytest.Pytester) -> None:
    result = run_search(quick, "between=(10, 20), num_requests=400, budget=3")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*PlanError: max_load: the search ended after its budget of 3 s; *"])


@pytest.mark.slow
def test_the_full_measurement_after_the_budget_keeps_the_reason(
    quick: pytest.Pytester, read_report: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of 600 s ends with the first load."""
    keep = LoadMeasurement._keep

    def keep_and_spend(self: LoadMeasurement, *args: Any) -> None:
        keep(self, *args)
        self._begin_s -= 1000

    monkeypatch.setattr(LoadMeasurement, "_keep", keep_and_spend)
    arguments = "between=(40, 80), tolerance=1.0, num_requests=20"
    run_search(quick, arguments, server=queueing(slots=20, service=0.05)).assert_outcomes(passed=1)
    curve = read_report()["records"][0]["load_curve"]
    assert curve["max_load_requests_per_s"] == pytest.approx(3200**0.5)
    assert curve["reason"].startswith("the search ended after its budget of 600 s")


@pytest.mark.parametrize("warmups", ["0", "2"])
@pytest.mark.slow
def test_the_first_load_of_a_search_has_the_warm_ups_asked_for(quick: pytest.Pytester, warmups: str) -> None:
    quick.makepyfile(SEARCH.format(arguments="between=(40, 60), num_requests=20, tolerance=1.0"))
    told = tell_points(quick)
    quick.runpytest_subprocess(
        *OPTIONS, f"--energy-server={SERVER}", f"--energy-warmup={warmups}"
    ).assert_outcomes(passed=1)
    first, *others = told.read_text().split()
    assert first == warmups
    assert set(others) == {"0"}


def test_a_curve_of_short_loads_has_no_result(quick: pytest.Pytester, read_report: Read) -> None:
    """Eight requests at five times the capacity are answered in time, and show nothing."""
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            energy.load_curve(
                backend.serve, ["abc"], request_rates=[400], num_requests=8, max_new_tokens=3,
                slo=slo(ttft=1))
        """
    )
    result = quick.runpytest(*OPTIONS, f"--energy-server={SERVER}")
    result.assert_outcomes(passed=1)
    (point,) = read_report()["records"][0]["load_curve"]["points"]
    assert (point["within_slo"], point["short"], point["slo_attainment"]) == (None, True, 1.0)
    result.stdout.fnmatch_lines(["400 * short-load"])


@pytest.mark.slow
def test_a_curve_has_a_point_for_each_rate(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            run = energy.load_curve(
                backend.serve, ["abc"], request_rates=[300, 60, 30], num_requests=30, max_new_tokens=3,
                slo=slo(ttft=0.2, tpot=5, attainment=0.9))
            assert [point.request_rate for point in run.curve.points] == [300, 60, 30]
            assert run.requests_per_s < 65
        """
    )
    result = quick.runpytest(*OPTIONS, f"--energy-server={SERVER}")
    result.assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    fast, middle, slow = record["load_curve"]["points"]
    assert (fast["within_slo"], middle["within_slo"], slow["within_slo"]) == (False, True, True)
    assert fast["time_to_first_token_p99_s"] > 0.2 > slow["time_to_first_token_p99_s"]
    assert fast["requests_per_s"] < 85
    for point in (fast, middle, slow):
        assert (point["requests"], point["rounds"]) == (30, 2)
        assert point["energy_per_output_token_j"] > 0
        assert 0.02 < point["time_per_output_token_p50_s"] < 0.1
    # Ten watts for half of the tokens per second.
    assert slow["energy_per_output_token_j"] > middle["energy_per_output_token_j"]
    # The highest rate within the SLO.
    assert record["metrics"]["requests_per_s"]["value"] == pytest.approx(middle["requests_per_s"], rel=0.1)
    assert record["backend"]["generation"]["request_rate"] == "300, 60, 30"
    assert "max_load_requests_per_s" not in record["metrics"]
    result.stdout.fnmatch_lines(["*test_it*: 3 loads; SLO: TTFT <= 0.2 s, TPOT <= 5 s for 90 %"])


def experiment_of(rounds: list[Round]) -> Experiment:
    procedure = Procedure(
        warmup_iterations=1,
        settled=None,
        criterion="fixed",
        iterations=1,
        gap_s=0.0,
        target=0.0,
        budget_s=0.0,
        measuring_s=0.0,
        reached=None,
    )
    return Experiment(rounds, compute_metrics(rounds, None), [], None, procedure, [])


def test_the_figures_of_a_point_are_over_the_same_requests() -> None:
    """Three rounds of 20 good requests, and one in which all are late."""
    limits = slo(ttft=0.2, attainment=0.9)
    fine, late = (load([(wait_s, None, 3.0, 1)] * 20, limits=limits) for wait_s in (0.1, 2.0))
    rounds = [fine, late, fine, fine]
    point = make_point(10.0, experiment_of(rounds), limits)
    assert (point.slo_attainment, point.within_slo) == (0.75, False)
    assert point.time_to_first_token_p99_s == 2.0
    # Each round takes 8 s.
    assert (point.requests_per_s, point.goodput_requests_per_s) == (2.5, 1.875)
    assert describe_result(point) == "exceeds"


@pytest.mark.parametrize(("flagged", "result"), [(2, "saturated"), (1, "within")])
def test_a_point_of_which_half_of_the_rounds_are_saturated_is_not_within(flagged: int, result: str) -> None:
    limits = slo(ttft=1.0)
    saturated = Flag(name="saturated", severity="warning", detail="x")
    made = [load(limits=limits, flags=[saturated] * (place < flagged)) for place in range(4)]
    point = make_point(10.0, experiment_of(made), limits)
    assert (point.within_slo, describe_result(point)) == (result == "within", result)


@pytest.mark.parametrize("limits", [slo(ttft=1.0), None], ids=["slo", "none"])
def test_a_point_of_which_half_of_the_rounds_are_short_has_no_result(limits: Slo | None) -> None:
    short = Flag(name="short-load", severity="note", detail="x")
    made = [load(limits=limits, flags=[short] * (place < 2)) for place in range(4)]
    point = make_point(10.0, experiment_of(made), limits)
    assert (point.within_slo, describe_result(point)) == (None, "short-load")
    sustained = make_point(10.0, experiment_of(made[1:]), limits)
    assert describe_result(sustained) == ("within" if limits is not None else "sustained")


def test_goodput_of_a_plain_load(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            run = energy(
                backend.serve, ["abc"], request_rate=300.0, num_requests=40, max_new_tokens=3,
                slo=slo(ttft=0.1))
            assert 0 < run.slo_attainment < 1
            assert run.energy_per_good_request_j > run.energy_per_request_j
        """
    )
    quick.runpytest(*OPTIONS, f"--energy-server={SERVER}").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    served = record["rounds"][0]["served"]
    good = [each <= 0.1 for each in served["time_to_first_token_s"]]
    assert served["good"] == good
    assert record["backend"]["generation"]["slo"] == "TTFT <= 0.1 s for 99 %"
    assert record["load_curve"] is None


#: Calls, and a part of the line that each gives.
INVALID = (
    (
        "max_load(backend.generate, ['a'], slo=S, between=(1, 2))",
        "max_load: needs backend.serve, found BackendHandle.generate",
    ),
    (
        "load_curve(backend.serve, ['a'], request_rates=[1], slo={'ttft_s': 1})",
        "slo is {'ttft_s': 1}, needs pytest_llenergy.slo(",
    ),
    (
        "max_load(backend.serve, ['a'], slo=0.5, between=(1, 2))",
        "slo is 0.5, needs pytest_llenergy.slo(",
    ),
    ("max_load(backend.serve, ['a'], slo=S, between=(2, 1))", "max_load: between is (2, 1), needs"),
    ("max_load(backend.serve, ['a'], slo=S, between=(1, 2), budget=0)", "max_load: budget is 0, needs"),
    (
        "max_load(backend.serve, ['a'], slo=S, between=(1, 2), budget=float('inf'))",
        "max_load: budget is inf, needs a finite number of seconds above 0",
    ),
    (
        "max_load(backend.serve, ['a'], slo=S, between=(1, 2), num_requests='9')",
        "serve: num_requests: Expected `int | null`, got `str`",
    ),
    # A load of these limits does not fit, and the mistake comes first.
    (
        "max_load(backend.serve, ['a'], slo=slo(ttft=1e4), between=(1, 2), nonsense=3)",
        "serve: unknown argument nonsense; known: ",
    ),
    ("max_load(backend.serve, [], slo=slo(ttft=1e4), between=(1, 2))", "serve: prompts must be a list"),
    (
        "max_load(backend.serve, ['a'], slo=S, between=(1, 2), num_requests=99)",
        "num_requests is 99, needs 100",
    ),
    (
        "max_load(backend.serve, ['a'], slo=S, between=(1, 2), budget=20)",
        "takes 21 s with TTFT <= 1 s for 99",
    ),
    ("max_load(backend.serve, ['a'], slo=S, between=(1, 2), trace=[1])", "max_load: leave out trace"),
    ("load_curve(backend.serve, ['a'], request_rates=[])", "load_curve: request_rates is [], needs"),
    ("load_curve(backend.serve, ['a'], request_rates=[1], concurrency=2)", "leave out concurrency"),
    ("load_curve(backend.serve, ['a'], request_rates=[1], slow=2)", "serve: unknown argument slow"),
    ("load_curve(backend.serve, Request(prompt='a'), request_rates=[1])", "serve: prompts must be a"),
)


def test_invalid_arguments_are_refused(quick: pytest.Pytester) -> None:
    tests = "".join(
        f"def test_{number}(energy, backend): energy.{call}\n" for number, (call, _) in enumerate(INVALID)
    )
    quick.makepyfile(
        "from pytest_llenergy import slo\nfrom pytest_llenergy.backends.traffic import Request\n"
        "S = slo(ttft=1)\n" + tests
    )
    result = quick.runpytest(*OPTIONS, f"--energy-server={SERVER}")
    result.assert_outcomes(failed=len(INVALID))
    shown = result.stdout.str()
    assert [message for _, message in INVALID if message not in shown] == []


def test_points_before_a_broken_load_are_kept(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        def test_it(energy, backend):
            energy.load_curve(
                backend.serve, ["abc"], request_rates=[20, 30], num_requests=10, max_new_tokens=3)
        """
    )
    # The second load breaks: the first sends ten requests in each of two rounds.
    server = queueing(slots=4, service=0.1, breaks=20)
    quick.runpytest(*OPTIONS, f"--energy-server={server}").assert_outcomes(failed=1)
    (record,) = read_report()["records"]
    whole, broken = record["load_curve"]["points"]
    assert (whole["request_rate"], whole["rounds"]) == (20, 2)
    assert (broken["request_rate"], broken["within_slo"]) == (30, None)
    assert broken["reason"].startswith("BackendError: server: request 1 of 10")
    assert record["status"] == "failed"
    assert record["metrics"]["energy_j"]["value"] > 0


@pytest.mark.parametrize(
    "options", [[], pytest.param(["-n1"], marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_points_are_kept_on_ctrl_c(quick: pytest.Pytester, read_report: Read, options: list[str]) -> None:
    quick.makepyfile(SEARCH.format(arguments="between=(10, 60), tolerance=0.01, num_requests=20"))
    told = tell_points(quick)
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--energy-server={SERVER}", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True
    ) as run:
        while not (told.exists() and len(told.read_text().split()) >= 2):
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)
        text = run.communicate()[0]
    assert "KeyboardInterrupt" in text
    (record,) = read_report()["records"]
    curve = record["load_curve"]
    assert len(curve["points"]) >= 2
    assert all(point["reason"] or point["energy_per_output_token_j"] > 0 for point in curve["points"][:2])
    assert (curve["max_load_requests_per_s"], curve["reason"]) == (None, "the search did not end")
    assert (record["status"], record["reason"]) == ("failed", "interrupted before all loads were measured")
