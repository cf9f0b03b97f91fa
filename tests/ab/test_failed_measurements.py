# SPDX-License-Identifier: Apache-2.0
"""A measurement that fails in a later round: none of its rounds counts, and the comparison says why."""

from __future__ import annotations

import json

import pytest

from pytest_llenergy.cli import main

from ..conftest import TEN_WATTS
from ..ranks.no_torch import without_torch
from .project import Project

#: Work that fails in the third round of session 3, the second one of the head.
TESTS = """
import os, time
import pytest

FAILS = "/003-head" in os.environ["LLENERGY_AB_DONE"]
pytestmark = pytest.mark.energy_options(iterations=1, warmup=0)
calls = []

def step(fail):
    time.sleep(0.1)
    calls.append(0)
    if FAILS and len(calls) == 3:
        fail()

def refuse():
    raise ValueError("no more")

def die():
    os.kill(os.getpid(), 9)

def test_loses_a_rank(workers, energy):
    energy.metric("answers", 4, better="more")
    energy(workers.call(step, die))

def test_expects_the_error(energy, energy_meter):
    try:
        energy(step, refuse)
    except ValueError:
        with energy_meter("too_short"):
            pass

def test_works(energy):
    energy(time.sleep, 0.1)
"""

#: No preemption makes a window without work as long as a tick.
METER = TEN_WATTS.replace("_s=0.001", "_s=0.02")

OPTIONS = ["-p", "no:cacheprovider", "--energy-meter=ten-watts"]

#: Why the comparison of a test is invalid.
REASONS = {
    "test_loses_a_rank": "(session 3: Failed: WorkerError: rank 0 of 1 (cpu, pid ",
    "test_expects_the_error": "(session 3: not resolvable: ",
}


@pytest.mark.clock
@pytest.mark.slow
def test_no_round_of_a_measurement_that_fails_later_counts(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("conftest.py", METER)
    project.write("test_some.py", TESTS)
    without_torch(project.path)
    project.commit()
    ab = ["--base=HEAD", "--head=HEAD", "--pairs=6", "--rounds-per-session=3", "--metric=energy_j"]
    done = project.ab(*ab, "--", "pytest", *OPTIONS)
    assert done.status == 5, done
    paired = project.paired()
    assert [session.side for session in paired.sessions] == ["base", "head", "head", "base"]
    records = {each.id.partition("::")[2]: each for each in paired.head.records}
    assert main(["compare", str(project.path / ".llenergy" / "ab.json"), "--format=json"]) == 5
    shown = json.loads(capsys.readouterr().out)["comparisons"]
    found = {each["id"].partition("::")[2]: each for each in shown}
    text = " ".join(done.out.split())
    for name, reason in REASONS.items():
        comparison, record = found[name], records[name]
        assert comparison["verdict"] == "invalid"
        assert comparison["reason"].startswith(f"the head test is invalid {reason}")
        assert (comparison["n_base"], comparison["n_head"], comparison["head"]) == (0, 0, None)
        assert comparison["base"] is not None
        assert f"invalid: test_some.py::{name}: the head test is invalid {reason}" in text
        assert (record.status, record.metrics, record.custom) == ("invalid", {}, {})
    # Nothing that was measured is lost.
    kept = [flag.name for round_ in records["test_loses_a_rank"].rounds for flag in round_.flags]
    assert kept.count("unfinished") == 1
    assert "head: failed in sessions: test_some.py::test_loses_a_rank (1 of 2)" in paired.compared.notes
    # Another test of the same sessions.
    assert found["test_works"]["verdict"] != "invalid"
    assert min(found["test_works"]["n_base"], found["test_works"]["n_head"]) >= 6
