# SPDX-License-Identifier: Apache-2.0
"""What people read of a test on two hosts: on the terminal, on the page, and in flags and errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pytest_llenergy.report.rounds import describe_host_energy

from .agents import ROOT
from .two_hosts import WORK, TwoHosts

DISTURBED = (
    WORK
    + """
from pathlib import Path
from tests.nvml_sim import Process, World

ROUNDS = []

def work():
    ROUNDS.append(1)
    if os.environ["LOCAL_RANK"] == "0":
        # A program of another user: on n2 in all rounds, on n1 in the first.
        present = platform.node() == "n2" or len(ROUNDS) == 1
        path = PATHS[os.environ["CUDA_VISIBLE_DEVICES"]]
        World.open(Path(path)).update(0, processes=(Process(1, 2 << 30),) if present else ())
    time.sleep(0.3)

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.parallel(data=4)
@pytest.mark.energy_options(rounds=3, iterations=1, warmup=0)
def test_it(workers, energy):
    energy(workers.call(work))
"""
)


@pytest.mark.slow
def test_each_host_has_its_joules_and_its_flags(two_hosts: TwoHosts) -> None:
    paths = {f"GPU-{host.name}-0": str(host.world.path) for host in two_hosts.hosts}
    output = two_hosts.run(DISTURBED.replace("PATHS", repr(paths)), "-v", "--energy-busy=skip")
    (record,) = two_hosts.report.records
    flag = next(each for each in record.flags if each.name == "gpu-processes")
    # That of the first round; each round has its own.
    assert re.match(r"3 of 3 rounds: n[12]: GPU-n[12]-0 is used by", flag.detail), record.flags
    in_last = [each.detail[:4] for each in record.rounds[-1].flags if each.name == "gpu-processes"]
    assert in_last == ["n2: "], record.rounds[-1].flags
    assert record.reason is not None
    assert record.reason.startswith("n2: GPU-n2-0"), record.reason
    # 100 and 150 watts on each.
    assert re.search(r"^round +s +energy ± u +n1 ± u +n2 ± u", output, re.MULTILINE), output
    number = r"([0-9.]+) ± ([0-9.]+) J"
    first = re.search(rf"^1 +\S+ +{number} +{number} +{number}", output, re.MULTILINE)
    assert first is not None, output
    total, total_u, n1, n1_u, n2, n2_u = map(float, first.groups())
    assert n1 == pytest.approx(250 * record.rounds[0].duration_s, rel=0.1)
    assert n1 + n2 == pytest.approx(total, rel=0.01)
    # All three contain the accuracy of the source, which is the same for both hosts.
    assert n1_u + n2_u == pytest.approx(total_u, rel=0.2)
    assert "gpu-processes,gpu-processes" not in output
    page = two_hosts.directory / "page.html"
    command = [sys.executable, "-m", "pytest_llenergy.cli", "report", "energy.json", "-o", str(page)]
    subprocess.run(
        [*command, "--format=html"], cwd=two_hosts.directory, env={"PYTHONPATH": str(ROOT)}, check=True
    )
    text = page.read_text()
    assert all(each in text for each in ("GPU-n1-1", "GPU-n2-0", "n1 ± u", "n2 ± u"))


WITHOUT_METER = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
@pytest.mark.energy_options(rounds=2, iterations=1, warmup=0)
def test_it(workers, energy):
    energy(workers.call(where, 0.3))
"""
)


@pytest.mark.slow
def test_the_joules_of_a_host_are_shown_if_another_has_no_meter(two_hosts: TwoHosts) -> None:
    second = two_hosts.hosts[1].world
    for board in range(2):
        second.update(
            board, energy_supported=False, power_usage_supported=False, unsupported_fields=(83, 185, 186)
        )
    output = two_hosts.run(WITHOUT_METER, "-v")
    (record,) = two_hosts.report.records
    assert record.metrics["energy_j"].value is None
    assert re.search(r"^round +s +n1 ± u +", output, re.MULTILINE), output
    assert re.search(r"^1 +0\.3\d* +7\d(\.\d+)? ± \S+ J", output, re.MULTILINE), output
    assert describe_host_energy(record.rounds[0], "n2") == "no meter"
