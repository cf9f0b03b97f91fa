# SPDX-License-Identifier: Apache-2.0
"""A project under git whose tests tell what they use: real commits, real sessions, joules that are known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.model.report import PairedReport
from pytest_llenergy.report.store import read_paired_report

#: What a measurement would have told: joules that ``work.py`` says, a little scattered.
CONFTEST = """
import os, re
import pytest_llenergy.api
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.metrics import summarise
from pytest_llenergy.model.record import MeterInfo, Procedure, Round
import work

SCATTER = (1, 1.002, 0.997, 1.001, 0.998, 1.002)
METER = MeterInfo(name="told", domain="cpu:told", kind="measured", source="told", scope="test",
                  update_period_s=0.1, resolution_j=0.001, accuracy="exact")
PROCEDURE = Procedure(warmup_iterations=0, settled=None, criterion="none", iterations=1, gap_s=0.1,
                      target=0.02, budget_s=1.0, measuring_s=2.0, reached=None)

def told(workload, plan, selection, lease, tell):
    selection.close()
    work.joules = 10.0
    workload.work(1)
    number = int(re.search(r"(\\d+)-(?:base|head)", os.environ["LLENERGY_AB_DONE"]).group(1))
    rounds = [
        Round(start_s=number + each, duration_s=2.0, energy_j=work.joules * SCATTER[(number + each) % 6],
              energy_u_j=0.001, energy_u_absolute_j=0.1)
        for each in range(plan.rounds)
    ]
    return Experiment(rounds, summarise(rounds, None), [METER], 0.1, PROCEDURE, [])

pytest_llenergy.api.measure = told
"""

WORK = """
joules = 10.0
EACH = 10.0

def work():
    use(EACH)

def use(amount):
    global joules
    joules = amount
"""

TESTS = """
from work import use, work

def test_a(energy):
    energy(work)
"""


@dataclass(frozen=True)
class Outcome:
    """What a command has told."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


class Project:
    """A repository in a directory."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        own = Path(pytest_llenergy.__file__).parents[1]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            # Of ours alone: a session of a test need not pay for others.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p pytest_llenergy.plugin -p no:cacheprovider",
            "PYTHONPATH": str(own),
            "COLUMNS": "120",
            **environment,
        }
        path.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        self.write("conftest.py", CONFTEST)
        self.write("work.py", WORK)
        self.write("test_some.py", TESTS)
        self.write("pytest.ini", "[pytest]\n")
        self.commit()

    def git(self, *args: str) -> str:
        names = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *names, *args], cwd=self.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def edit(self, name: str, before: str, after: str) -> None:
        text = (self.path / name).read_text()
        assert before in text
        self.write(name, text.replace(before, after))

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "more")
        return self.git("rev-parse", "HEAD")

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest_llenergy.cli", "ab", *args],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ab(self, *args: str) -> Outcome:
        process = self.start(*args)
        out, err = process.communicate(timeout=300)
        return Outcome(process.returncode, out, err)

    def paired(self) -> PairedReport:
        return read_paired_report(self.path / ".llenergy" / "ab.json")
