# SPDX-License-Identifier: Apache-2.0
"""Tests with a ``gpus`` mark on simulated boards: the real pynvml with a stand-in for the driver.

A backend without a framework runs in the ranks, so that everything except CUDA is real.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim.boards import MigInstance
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import Board, World

Read = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

BACKEND = """
import os
import time
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def __init__(self, prompts): self.prompts = prompts
    def run(self): time.sleep(0.5)
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=1, output_tokens=1) for _ in self.prompts]
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        ids = [[0] for _ in self.prompts]
        return Generation(texts=[visible] * len(self.prompts), token_ids=ids, requests=requests)

class Sleepy:
    def load(self, model, options, context):
        return BackendInfo(name="sleepy", version="1", model=model.label)
    def prepare(self, prompts, params): return Job(prompts)
    def synchronize(self): pass
    def close(self): pass

SPEC = BackendSpec("sleepy", "sleepy:Sleepy", (), "pip install sleepy", Capabilities(data=True, gpu=True))
"""

ONE = """
import pytest
@pytest.mark.gpus(1)
def test_it(energy, backend):
    energy(backend.generate, ["a"])
"""

CONFTEST = "def pytest_llenergy_backends(config):\n    import sleepy\n    return [sleepy.SPEC]\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 2\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = sleepy\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(BACKEND)
    return pytester


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    boards = [
        Board(name="NVIDIA H200", power_w=100, latch_ns=50_000_000),
        Board(name="NVIDIA L40S", power_w=40, latch_ns=50_000_000),
    ]
    return nvml_children(World(tmp_path / "world", boards))


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    # A separate process, because a loaded driver library cannot be replaced.
    return suite.runpytest_subprocess("--energy-report", "-rs", "-p", "no:cacheprovider", *args)


def test_the_leased_board_is_measured(suite: pytest.Pytester, world: World, read_report: Read) -> None:
    suite.makepyfile(
        """
        import pytest
        @pytest.mark.gpus(1, name="L40S")
        def test_second(energy, backend, gpus):
            run = energy(backend.generate, ["a"])
            assert run.result.texts == [gpus.visible_devices] == list(gpus.uuids)
            assert (gpus.names, gpus.indices) == (("NVIDIA L40S",), (1,))
        @pytest.mark.gpus(2)
        def test_both(energy, backend, gpus):
            run = energy(backend.generate, ["a", "b"])
            assert run.result.texts == list(gpus.uuids)
        """
    )
    run(suite).assert_outcomes(passed=2)
    second, both = read_report()["records"]
    uuids = [board["uuid"] for board in read_report()["environment"]["gpus"]]
    assert second["devices"] == [uuids[1]]
    assert [rank["device"] for rank in both["ranks"]] == uuids
    for record, watts in ((second, 40), (both, 140)):
        assert {meter["name"] for meter in record["meters"]} == {"nvml"}
        assert {(meter["kind"], meter["exclusive"]) for meter in record["meters"]} == {("measured", True)}
        assert 0 <= record["lease_wait_s"] < 60
        assert all(round_["temperature_start_c"] is not None for round_ in record["rounds"])
        # On a busy machine, a board may not be read near the edges of a round.
        known = [round_ for round_ in record["rounds"] if round_["energy_j"] is not None]
        for round_ in known:
            assert abs(round_["energy_j"] - watts * round_["duration_s"]) <= 4 * round_["energy_u_j"]
        assert min(round_["energy_u_j"] / round_["energy_j"] for round_ in known) < 0.15
    assert set(both["rounds"][0]["by_domain"]) == {f"gpu:{uuid}" for uuid in uuids}


def test_a_board_without_readings_gives_a_reason_instead_of_energy(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    world.update(0, energy_supported=False, scopes=(), power_usage_supported=False)
    suite.makepyfile(
        "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy, backend):\n"
        "    assert energy(backend.generate, ['a']).duration_s > 0.4\n"
    )
    run(suite).assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["status"] == "invalid"
    assert record["rounds"][0]["energy_j"] is None
    assert "reports neither energy nor power" in record["reason"]
    required = run(suite, "--energy-require=measured")
    required.assert_outcomes(failed=1)
    required.stdout.fnmatch_lines(
        ["MeterError: no meter that measures (--energy-require=measured) for GPUs *"]
    )


def test_a_leased_instance_excludes_a_lease_of_its_whole_board(
    suite: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MIG instance is a GPU for its rank, but its energy is that of the whole board."""
    world.update(1, mig_enabled=True, mig_instances=(MigInstance("MIG-a"), MigInstance("MIG-b")))
    suite.makepyfile(
        f"""
        import pytest
        from tests.devices.lockers import lockers
        @pytest.mark.gpus(1)
        def test_it(gpus):
            assert gpus.devices == ("MIG-a",)
            assert gpus.visible_devices == "MIG-a"
            board = "{world.board(1).uuid}"
            with lockers() as make:
                assert "held by process" in make().refused(board)
                assert set(make().take("MIG-b", (board, True), wait_s=0.0)) == {{"MIG-b", board}}
        """
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, os.environ.get("PYTHONPATH", "")))))
    run(suite, "--energy-gpus=MIG-a").assert_outcomes(passed=1)


def test_a_backend_without_gpu_support_is_skipped_instead_of_run_on_the_cpu(
    suite: pytest.Pytester, world: World
) -> None:
    (suite.path / "sleepy.py").write_text(BACKEND.replace("gpu=True", "gpu=False"))
    suite.makepyfile(ONE)
    result = run(suite)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*sleepy does not run on GPUs here"])
