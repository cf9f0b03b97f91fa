# SPDX-License-Identifier: Apache-2.0
"""Joules by role: prefill and decode workers on simulated boards of known power."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..devices.test_run_gpus import BACKEND, CONFTEST
from ..nvml_sim.fixtures import Give
from ..nvml_sim.shapes import Burst
from ..nvml_sim.world import Board, World

Read = Callable[..., dict[str, Any]]

SERVING = BACKEND.replace("input_tokens=1, output_tokens=1", "input_tokens=30, output_tokens=4")

TEST = """
import pytest
@pytest.mark.gpus(4, roles={"prefill": [0, 2], "decode": [1, 3]})
def test_it(energy, backend):
    energy(backend.generate, ["a", "b", "c", "d"])
"""

NAMES = {
    "prefill": ("prefill_workers_energy_j", "prefill_workers_energy_per_input_token_j", 120),
    "decode": ("decode_workers_energy_j", "decode_workers_energy_per_output_token_j", 16),
}


@pytest.fixture(autouse=True)
def _few_plugins(few_plugins: None) -> None:
    """Start inner runs faster."""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\nenergy_rounds = 4\nenergy_warmup = 0\nenergy_budget = 0.1\nenergy_backend = sleepy\n"
    )
    pytester.makeconftest(CONFTEST)
    (pytester.path / "sleepy.py").write_text(SERVING)
    return pytester


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    """Two boards at constant power, and two that alternate between two powers."""
    waves: list[dict[str, Any]] = [
        {"power_w": 90.0},
        {"power_w": 240.0},
        {"burst": Burst(100, 300, 40_000_000, 0.5)},
        {"burst": Burst(50, 500, 60_000_000, 0.25)},
    ]
    boards = [Board(name="NVIDIA H100 80GB HBM3", latch_ns=20_000_000, **wave) for wave in waves]
    return nvml_children(World(tmp_path / "world", boards))


def test_each_role_has_the_joules_of_its_boards(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    suite.makepyfile(TEST)
    suite.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider").assert_outcomes(passed=1)
    (record,) = read_report()["records"]
    assert record["device_roles"] == {"prefill": [0, 2], "decode": [1, 3]}
    deviations = []
    for round_ in record["rounds"]:
        start_ns = round(round_["start_s"] * 1e9)
        end_ns = start_ns + round(round_["duration_s"] * 1e9)
        for index in range(4):
            part = round_["by_domain"][f"gpu:{world.board(index).uuid}"]
            truth = world.true_energy_j(index, start_ns, end_ns)
            deviations.append(abs(part["energy_j"] - truth) / part["energy_u_j"])
        parts = sum(each["energy_j"] for each in round_["by_domain"].values())
        assert math.isclose(parts, round_["energy_j"], rel_tol=1e-9)
    # Of 16 values, one may be off by more than three standard uncertainties.
    assert len(deviations) == 16
    assert sorted(deviations)[-2] <= 3
    assert max(deviations) <= 5
    metrics = record["metrics"]
    for role, (name, per_token, tokens) in NAMES.items():
        domains = [f"gpu:{world.board(index).uuid}" for index in record["device_roles"][role]]
        sums = [
            sum(round_["by_domain"][domain]["energy_j"] for domain in domains) / round_["iterations"]
            for round_ in record["rounds"]
        ]
        found = metrics[name]
        assert math.isclose(found["value"], statistics.median(sums), rel_tol=1e-6)
        assert 0 < found["uncertainty"] <= found["uncertainty_absolute"]
        assert math.isclose(metrics[per_token]["value"], found["value"] / tokens, rel_tol=1e-6)


@pytest.mark.slow
def test_roles_that_one_meter_reads_together_have_a_reason(
    suite: pytest.Pytester, world: World, read_report: Read
) -> None:
    suite.makepyfile(TEST.replace("gpus(4,", "gpus(5, fallback='cpu',").replace('"d"', '"d", "e"'))
    suite.runpytest_subprocess("--energy-report", "-p", "no:cacheprovider")
    (record,) = read_report()["records"]
    for name, per_token, _ in NAMES.values():
        for metric in (record["metrics"][name], record["metrics"][per_token]):
            assert metric["value"] is None
            assert "no meter reads cpu apart from the rest; read: cpu:" in metric["reason"]


@pytest.mark.parametrize(
    "roles",
    [
        "{'prefill': [0], 'decode': [2]}",
        "{'prefill': [0], 'decode': [0, 1]}",
        "{'prefill': [], 'decode': [1]}",
        "{'prefill': [0]}",
        "{'prefill': 0, 'decode': 1}",
        "[0, 1]",
    ],
)
def test_wrong_roles_are_refused(suite: pytest.Pytester, roles: str) -> None:
    mark = f"@pytest.mark.gpus(2, roles={roles})"
    suite.makepyfile(f"import pytest\n{mark}\ndef test_it(energy): energy(int)\n")
    result = suite.runpytest()
    result.assert_outcomes(errors=1)
    assert (
        f"roles is {roles}, needs for prefill and decode lists of positions below n=2" in result.stdout.str()
    )
