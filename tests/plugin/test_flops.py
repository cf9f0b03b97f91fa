# SPDX-License-Identifier: Apache-2.0
"""The mark ``energy_options(flops=True)``: operations are counted after the rounds, on request only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pytest_llenergy.record.report import json_schema

from ..conftest import TEN_WATTS

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

#: A backend that logs when its job runs and when its operations are requested.
NOTING = """
import time
from pathlib import Path
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.timeline import Flops
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def run(self):
        note("run")
        time.sleep(0.05)
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=1, output_tokens=1)]
        return Generation(texts=["a"], token_ids=[[1]], requests=requests)

def note(what):
    with Path(__file__).with_name("notes").open("a") as file:
        file.write(f"{what} {time.monotonic_ns()}\\n")

class Noting:
    def load(self, model, options, context):
        return BackendInfo(name="noting", version="1", model=model.label)
    def prepare(self, prompts, params):
        return Job()
    def flops(self, job, done):
        note("flops")
        job.run()
        hoard = bytearray(b"x") * (256 * 1024 * 1024)
        return Flops(count=1000, source="noted")
    def synchronize(self): pass
    def close(self): pass

SPEC = BackendSpec("noting", "noting:Noting", (), "", Capabilities())
"""
GIVEN = TEN_WATTS + "\nimport noting\ndef pytest_llenergy_backends(config):\n    return [noting.SPEC]\n"
COUNTING = "import pytest\n@pytest.mark.energy_options(flops=True)\n"
DECLINING = "@pytest.mark.energy_options(flops=False)\n"
TEST = "def test_it(energy, backend):\n    energy(backend.generate, ['a'], max_new_tokens=1)\n"
ARGS = ("--energy-report", "--energy-backend=noting", "--energy-model=random:llama-tiny")


@pytest.fixture
def noting(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    quick.makepyfile(noting=NOTING, test_it=TEST)
    quick.makeconftest(GIVEN)
    monkeypatch.setenv("PYTHONPATH", str(quick.path), prepend=":")
    quick.syspathinsert()
    return quick


def notes(noting: pytest.Pytester) -> list[tuple[str, int]]:
    lines = (noting.path / "notes").read_text().splitlines()
    return [(what, int(time_ns)) for what, time_ns in (line.split() for line in lines)]


def test_operations_are_counted_after_the_rounds(noting: pytest.Pytester, read_report: Read) -> None:
    noting.makepyfile(test_it=COUNTING + TEST)
    noting.runpytest_subprocess(*ARGS).assert_outcomes(passed=1)
    report = read_report()
    (record,) = report["records"]
    ended_ns = [(each["start_s"] + each["duration_s"]) * 1e9 for each in record["rounds"]]
    noted = notes(noting)
    assert [what for what, _ in noted].count("flops") == 1
    assert [what for what, _ in noted[-2:]] == ["flops", "run"]
    assert noted[-2][1] > max(ended_ns)
    # Memory of the counting pass does not count.
    assert record["metrics"]["peak_memory_bytes"]["value"] < 256 * 1024 * 1024
    assert record["rank_peak_memory_bytes"] == [record["metrics"]["peak_memory_bytes"]["value"]]
    # Operations and their source are in the record.
    jsonschema.validate(report, json_schema())
    metrics = record["metrics"]
    assert (metrics["flops"]["value"], metrics["flops"]["unit"]) == (1000, "FLOP")
    assert metrics["flops"]["source"] == "noted"
    energy, each = metrics["energy_j"], metrics["energy_per_flop_j"]
    assert each["value"] == pytest.approx(energy["value"] / 1000)
    assert each["uncertainty"] == pytest.approx(energy["uncertainty"] / 1000)


def test_operations_are_counted_on_request_only(noting: pytest.Pytester, read_report: Read) -> None:
    noting.runpytest_subprocess(*ARGS).assert_outcomes(passed=1)
    assert "flops" not in {what for what, _ in notes(noting)}
    assert not {"flops", "energy_per_flop_j"} & set(read_report()["records"][0]["metrics"])


@pytest.mark.parametrize(
    ("marks", "counted"),
    [
        (
            "pytestmark = pytest.mark.energy_options(flops=True)\n@pytest.mark.energy_options(rounds=1)\n{}",
            True,
        ),
        ("pytestmark = pytest.mark.energy_options(flops=True)\n" + DECLINING + "{}", False),
    ],
    ids=["beside", "off"],
)
def test_a_module_asks_for_counts_and_a_test_declines(
    noting: pytest.Pytester, read_report: Read, marks: str, counted: bool
) -> None:
    noting.makepyfile(test_it="import pytest\n" + marks.format(TEST))
    noting.runpytest_subprocess(*ARGS).assert_outcomes(passed=1)
    assert ("flops" in read_report()["records"][0]["metrics"]) is counted


def test_a_plain_function_has_no_count_but_a_reason(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(f"import time\n{COUNTING}def test_it(energy):\n    energy(time.sleep, 0.2)\n")
    quick.runpytest("--energy-report").assert_outcomes(passed=1)
    flops = read_report()["records"][0]["metrics"]["flops"]
    assert flops["value"] is None
    assert flops["reason"] == (
        "only the operations of a backend are counted; a function can use torch.utils.flop_counter itself"
    )


def test_a_budget_can_limit_energy_per_operation(noting: pytest.Pytester) -> None:
    mark = COUNTING + "@pytest.mark.energy_gate(metric='energy_per_flop_j', budget='10 pJ')\n"
    noting.makepyfile(test_it=mark + TEST)
    result = noting.runpytest_subprocess(*ARGS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*energy_per_flop_j is * [µnm]J, over the budget of 10 pJ*"])


@pytest.mark.slow
def test_transformers_counts_and_its_ranks_are_reused(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile(
        """
        import pytest
        @pytest.mark.energy_options(flops=True)
        @pytest.mark.parametrize("n", [3, 4])
        def test_it(energy, backend, n):
            backend = backend.with_options(dtype="float32")
            run = energy(backend.generate, ["hello world"], max_new_tokens=n, ignore_eos=True)
            assert run.flops > 1e7
            assert run.energy_per_flop_j > 0
        """
    )
    args = ("--energy-backend=transformers", "--energy-model=random:llama-tiny")
    quick.runpytest_subprocess("--energy-report", *args).assert_outcomes(passed=2)
    three, four = read_report()["records"]
    assert four["metrics"]["flops"]["value"] > three["metrics"]["flops"]["value"]
    assert four["ranks"][0]["pid"] == three["ranks"][0]["pid"]
