# SPDX-License-Identifier: Apache-2.0
"""Comparisons and gates of served loads of which requests failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparability import (
    work_differences,
    workload_differences,
    workload_key,
)
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Flag, Record, Round, Tokens
from pytest_llenergy.record.served import ServedRequests

from ..backends.servers.start import scripted
from .runs import LEVEL, record_of, report_of, round_of

ASKED = 10
SATURATED = Flag(name="saturated", severity="warning", detail="5 of 10 requests failed")


def load(joules: float, failed: int = 0, *, output: int = 8, prompt: int = 5, **changes: Any) -> Round:
    """A round of ten requests, of which some failed and the others were good."""
    answered = ASKED - failed
    served = ServedRequests(
        sent_s=[0.1] * answered,
        time_to_first_token_s=[0.1] * answered,
        end_to_end_latency_s=[0.5] * answered,
        output_tokens=[output] * answered,
        failures=["server: 503"] * failed,
        good=[True] * answered,
    )
    tokens = Tokens(input=prompt * answered, output=output * answered)
    flags = [SATURATED] if failed > 1 else []
    made = round_of(joules, served=served, requests=answered, tokens=tokens, iterations=1, flags=flags)
    return msgspec.structs.replace(made, **changes)


def loads(failed: Sequence[int] = (0,) * 6, **changes: Any) -> Record:
    return record_of(rounds=[load(j, count, **changes) for j, count in zip(LEVEL, failed, strict=True)])


WHOLE, SHEDDING = loads(), loads((5,) * 6)


def gated(base: Record, head: Record, metric: str) -> Comparison:
    (found,) = compare_reports(
        report_of(base), report_of(head), ("base", "head"), [Criterion(metric, gated=True)]
    ).comparisons
    return found


@pytest.mark.parametrize("place", range(6))
def test_a_failed_request_in_any_round_is_no_other_workload(place: int) -> None:
    one = loads([int(number == place) for number in range(6)])
    assert workload_key(one) == workload_key(WHOLE)
    for base, head in ((WHOLE, one), (one, WHOLE)):
        assert workload_differences(base, head) == []
        assert work_differences(base, head, 0.03) == []
        assert gated(base, head, "energy_j").verdict == "unchanged"


@pytest.mark.parametrize("metric", ["goodput_requests_per_s", "slo_attainment"])
def test_a_head_that_sheds_load_regresses_by_its_goodput(metric: str) -> None:
    assert gated(WHOLE, SHEDDING, metric).verdict == "regressed"
    assert gated(SHEDDING, WHOLE, metric).verdict == "improved"


def test_lengths_of_answered_requests_are_compared() -> None:
    (line,) = work_differences(WHOLE, loads((1, 0) * 3, output=7), 0.03)
    assert line == "output tokens per answered request: 8 -> 7 (-12%)"
    (line,) = work_differences(WHOLE, loads(prompt=6), 0.03)
    assert line == "input tokens per answered request: 5 -> 6 (+20%)"


@pytest.mark.slow
def test_gates_compare_the_goodput_of_a_server_that_begins_to_shed_load(quick: pytest.Pytester) -> None:
    pytest.importorskip("aiohttp")
    quick.makepyfile(
        """
        from pytest_llenergy import slo

        def test_it(energy, backend):
            energy(
                backend.serve, ["abc"], request_rate=160.0, num_requests=40, max_new_tokens=2,
                max_failures=39, slo=slo(e2e=20.0))
        """
    )
    # The same command on both sides: another one is another workload.
    program = Path(quick.path / "serve.sh")
    command = f"--energy-server=sh {program} {{port}}"
    for name, settings in (("base.json", {"slots": 40}), ("head.json", {"slots": 1, "queue": 1})):
        server = scripted(first=0.02, step=0.02, **settings)
        program.write_text(f"exec {server.replace(quote('{port}'), '$1')}\n")
        arguments = ["--energy-backend=server", command, "--energy-rounds=4", f"--energy-report={name}"]
        gate = ["--energy-compare=base.json", "--energy-fail-on=slo_attainment:5%"]
        result = quick.runpytest(*arguments, *(gate if name == "head.json" else []))
    # Few rounds on a busy host may be inconclusive.
    result.stdout.re_match_lines([r".*(regressed|inconclusive) .* 1 +0\.\d+ +-\d\d\.\d%.*"])
