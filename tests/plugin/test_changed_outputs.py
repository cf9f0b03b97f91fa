# SPDX-License-Identifier: Apache-2.0
"""A run that saves energy with other outputs than its baseline fails its gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main

from .inner import COMPARE

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

#: A backend whose weights are the variable WEIGHTS: each token follows from them and all tokens before it.
BACKEND = """
import os, time, zlib
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

SPEC = BackendSpec(
    name="letters", factory="letters:Letters", requires=(), install="-",
    capabilities=Capabilities(data=True),
)

class Letters:
    def load(self, model, options, context):
        self.weights = os.environ["WEIGHTS"].encode()
        return BackendInfo(name="letters", version="1", model=model.label)

    def prepare(self, prompts, params):
        self.prompts, self.params = prompts, params
        return self

    def run(self):
        time.sleep(0.05)

    def result(self, outcome):
        rows = []
        for prompt in self.prompts:
            state, row = prompt.encode(), []
            for place in range(self.params.max_new_tokens):
                weights = self.weights if place >= 4 else b"first tokens"
                row.append(zlib.crc32(weights + state) % 1000)
                state += bytes(str(row[-1]), "ascii")
            rows.append(row)
        requests = [RequestTimeline(input_tokens=9, output_tokens=len(row)) for row in rows]
        return Generation(texts=list(map(str, rows)), token_ids=rows, requests=requests)

    def synchronize(self):
        pass

    def close(self):
        pass
"""

TEST = """
def test_it(energy, backend):
    energy(backend.generate, ["Name three rivers.", "What is a clock?"], max_new_tokens=10)
"""

GATE = "--energy-fail-on=mean_power_w:3%"


@pytest.fixture
def letters(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester with a baseline at 10 W; later runs draw 8 W."""
    hook = "\ndef pytest_llenergy_backends(config):\n    from letters import SPEC\n    return [SPEC]\n"
    suite.makeconftest((suite.path / "conftest.py").read_text() + hook)
    suite.makepyfile(letters=BACKEND, test_some=TEST)
    monkeypatch.setenv("WEIGHTS", "a")
    run(suite, "--energy-report=base.json").assert_outcomes(passed=1)
    monkeypatch.setenv("WATTS", "8")
    return suite


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest("--energy-backend=letters", "--energy-model=random:llama-tiny", *options)


def test_the_same_outputs_make_a_saving_an_improvement(letters: pytest.Pytester, read_report: Read) -> None:
    run(letters, COMPARE, GATE, "--energy-report").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    (found,) = record["comparisons"]
    assert found["verdict"] == "improved"
    assert [note for note in found["notes"] if note.startswith("outputs")] == []
    assert [len(each) for each in record["outputs"]] == [20, 20]
    assert record["outputs"] == read_report("base.json")["records"][0]["outputs"]
    assert "rivers" not in json.dumps(record)


def test_a_function_that_generates_itself_has_no_outputs_to_compare(
    letters: pytest.Pytester, read_report: Read
) -> None:
    (letters.path / "test_some.py").write_text(
        "def test_it(energy, backend):\n"
        "    run = energy(lambda: backend.generate(['Name three rivers.'], max_new_tokens=2))\n"
        "    assert len(run.result.token_ids[0]) == 2\n"
    )
    run(letters, "--energy-report").assert_outcomes(passed=1)
    assert read_report()["records"][0]["outputs"] == []


def test_other_weights_are_caught(
    letters: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    read_report: Read,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first four of ten tokens do not depend on the weights."""
    monkeypatch.setenv("WEIGHTS", "b")
    result = run(letters, COMPARE, GATE, "--energy-report=head.json")
    result.assert_outcomes(failed=1)
    line = "energy_gate: mean_power_w is not comparable: outputs differ: agreement 0.40 < 0.95, so it is no "
    result.stdout.fnmatch_lines([f"*{line}improvement*"])
    assert read_report("head.json")["records"][0]["failed_gate"]
    capsys.readouterr()
    command = ["compare", "base.json", "head.json", "--fail-on=mean_power_w:3%"]
    assert main(command) == 3
    assert "outputs differ: agreement 0.40 < 0.95" in capsys.readouterr().out
    assert Path("head.json").exists()


@pytest.mark.parametrize(("scores", "passed"), [("1 0", True), ("0 0", False)])
def test_scores_decide_in_place_of_tokens(
    letters: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    read_report: Read,
    scores: str,
    passed: bool,
) -> None:
    """Other weights change the tokens on both; what counts is whether the answers are as good."""
    test = (letters.path / "test_some.py").read_text()
    score = "    energy.metric('accuracy', list(map(float, os.environ['SCORES'].split())), better='more')\n"
    (letters.path / "test_some.py").write_text(f"import os\n{test}\n{score}")
    monkeypatch.setenv("SCORES", "1 0")
    monkeypatch.setenv("WATTS", "10")
    run(letters, "--energy-report=base.json").assert_outcomes(passed=1)
    metrics = read_report("base.json")["records"][0]["metrics"]
    assert metrics["accuracy"]["value"] == 0.5
    for name, value in {"SCORES": scores, "WATTS": "8", "WEIGHTS": "b"}.items():
        monkeypatch.setenv(name, value)
    result = run(letters, COMPARE, GATE)
    result.assert_outcomes(passed=int(passed), failed=int(not passed))
    if not passed:
        result.stdout.fnmatch_lines(
            ["*not comparable: outputs differ: accuracy 0 < 0.95 × 0.5, so it is no *"]
        )
