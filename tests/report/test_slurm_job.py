# SPDX-License-Identifier: Apache-2.0
"""The Slurm job in the report: its number, nodes and tasks, and no account or user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pytest_llenergy.record.report import Report, SlurmJob
from pytest_llenergy.report.html.page import render_report
from pytest_llenergy.report.merge import NamedReport, merge_reports
from pytest_llenergy.report.provenance import find_slurm_job

from ..compare.runs import record_of, report_of

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "1"}
SECRET = {"SLURM_JOB_ACCOUNT": "secret-project", "SLURM_JOB_USER": "secret-name"}


def test_report_of_a_run_in_a_job(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, read_report: Callable[..., dict[str, Any]]
) -> None:
    quick.makepyfile("def test_it(energy): energy(sum, [1])")
    for name, value in {**JOB, **SECRET}.items():
        monkeypatch.setenv(name, value)
    quick.runpytest("--energy-report").assert_outcomes(passed=1)
    assert read_report()["run"]["slurm"] == {"id": "4711", "nodes": "n[1-2]", "tasks": 1}
    assert "secret" not in (quick.path / "energy.json").read_text()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({**JOB, "SLURM_NTASKS": ""}, SlurmJob(id="4711", nodes="n[1-2]")),
        ({**JOB, "SLURM_NTASKS": "many"}, SlurmJob(id="4711", nodes="n[1-2]")),
        ({**JOB, "SLURM_JOB_ID": "secret-name"}, None),
        ({"SLURM_JOB_ID": "4711"}, None),
    ],
)
def test_job_of_an_environment(environment: dict[str, str], job: SlurmJob | None) -> None:
    assert find_slurm_job(environment) == job


def shard(name: str, job: SlurmJob | None) -> Report:
    report = report_of(record_of(name))
    return msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, slurm=job))


@pytest.mark.parametrize(("other", "kept"), [("4711", True), ("4712", False), (None, False)])
def test_merged_runs_keep_the_job_that_they_share(other: str | None, kept: bool) -> None:
    job = SlurmJob(id="4711", nodes="n[1-2]", tasks=1)
    second = None if other is None else msgspec.structs.replace(job, id=other)
    parts = [NamedReport("a", shard("t.py::a", job)), NamedReport("b", shard("t.py::b", second))]
    assert merge_reports(parts).run.slurm == (job if kept else None)


def test_page_names_the_job_if_there_is_one() -> None:
    job = SlurmJob(id="4711", nodes="n[1-2]")
    assert "run slurm nodes" in render_report(shard("t.py::a", job))
    assert "run slurm" not in render_report(shard("t.py::a", None))
