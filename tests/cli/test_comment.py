# SPDX-License-Identifier: Apache-2.0
"""``llenergy comment``: one comment per job, and none that is out of date, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import exit_code
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import PairedReport, encode_paired_report

from ..compare.runs import UNSURE, record_of, report_of, scaled
from ..record.test_paired import PAIRED
from ..report.forge import Forge, serving


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Forge]:
    """Pull request 3, whose last commit ``abcdef0123456`` the workflow "Energy" has tested."""
    (tmp_path / "event.json").write_text(
        json.dumps(
            {
                "workflow_run": {
                    "name": "Energy",
                    "html_url": "https://github.example/us/energy/actions/runs/6",
                    "head_sha": "abcdef0123456",
                    "head_branch": "a/b",
                    "head_repository": {"owner": {"login": "them"}},
                }
            }
        )
    )
    with serving(Forge()) as forge:
        for name, value in {
            "GITHUB_API_URL": forge.address,
            "GITHUB_REPOSITORY": "us/energy",
            "GITHUB_TOKEN": "secret",
            "GITHUB_EVENT_NAME": "workflow_run",
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_WORKFLOW": "Energy comment",
            "GITHUB_JOB": "comment",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("GITLAB_CI", raising=False)
        forge.pulls = [{"number": 3, "head": {"ref": "a/b", "sha": "abcdef0123456"}}]
        yield forge


def paired(*pairs: tuple[Record, Record]) -> PairedReport:
    base, head = (report_of(*side) for side in zip(*pairs, strict=True))
    compared = compare_reports(base, head, ("base", "head"), [Criterion(gated=True)])
    return msgspec.structs.replace(PAIRED, base=base, head=head, compared=compared)


SAME, WORSE = paired((record_of(), record_of())), paired((record_of(), record_of(joules=scaled(1.1))))


def write(folder: Path, job: str, report: PairedReport = SAME) -> None:
    (folder / job).mkdir(parents=True, exist_ok=True)
    (folder / job / "energy.json").write_bytes(encode_paired_report(report))


def comment(folder: Path, *options: str) -> int:
    return main(["comment", str(folder), *options])


def titles(forge: Forge) -> list[str]:
    return [body.splitlines()[1] for body in forge.bodies]


def test_each_job_of_a_matrix_has_its_comment(forge: Forge, tmp_path: Path) -> None:
    write(tmp_path / "jobs", "compare-a100")
    write(tmp_path / "jobs", "compare-h100", WORSE)
    assert comment(tmp_path / "jobs") == 0
    assert titles(forge) == [
        "### ✅ Energy (compare-a100): pass, +0.0% over 1 test",
        "### ❌ Energy (compare-h100): fail, 1 of 1 test regressed (+10.0%); +10.0% over 1 test",
    ]
    assert comment(tmp_path / "jobs") == 0
    assert len(forge.bodies) == 2
    run = "https://github.example/us/energy/actions/runs/6"
    assert f"[HTML report and JSON]({run}#artifacts) · [CI run]({run})" in forge.bodies[0]


def test_a_job_without_result_does_not_keep_its_green_comment(forge: Forge, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    write(jobs, "one")
    write(jobs, "two")
    comment(jobs)
    forge.has("<!-- llenergy:compare Other/two -->\n### of another workflow")
    (jobs / "two" / "energy.json").unlink()
    (jobs / "one" / "energy.json").write_text("{")
    assert comment(jobs) == 0
    missing = "no comparison for <code>abcdef0123</code>"
    assert titles(forge) == [
        f"### ❔ Energy (one): {missing}",
        f"### ❔ Energy (two): {missing}",
        "### of another workflow",
    ]
    assert "[CI run](https://github.example/us/energy/actions/runs/6)" in forge.bodies[1]
    write(jobs, "two")
    comment(jobs)
    assert titles(forge)[1].startswith("### ✅ Energy (two): pass")


def test_an_older_commit_leaves_the_comments_alone(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").mkdir()
    forge.pulls[0]["head"]["sha"] = "newer"
    assert comment(tmp_path / "jobs") == 0
    assert "no comment: GitHub: no open pull request has abcdef0123456" in capsys.readouterr().err
    assert forge.bodies == []


def test_the_name_of_a_job_cannot_end_the_marker(forge: Forge, tmp_path: Path) -> None:
    write(tmp_path / "jobs", "a --> @octocat")
    assert comment(tmp_path / "jobs") == 0
    first, title, *_ = forge.bodies[0].splitlines()
    assert (first.count("-->"), first[-3:]) == (1, "-->")
    assert "@octocat" not in first + title
    assert comment(tmp_path / "jobs") == 0
    assert len(forge.bodies) == 1


def test_a_file_has_the_name_of_its_job(forge: Forge, tmp_path: Path) -> None:
    write(tmp_path, "x")
    assert comment(tmp_path / "x" / "energy.json", "--key", "nightly") == 0
    assert forge.bodies[0].startswith(
        "<!-- llenergy:compare Energy/nightly -->\n### ✅ Energy (nightly): pass"
    )
    assert comment(tmp_path, "--key", "nightly") == 2


@pytest.mark.parametrize("policy", ["warn", "fail", "pass"])
@pytest.mark.parametrize("factor", [1.0, 1.1, None])
def test_the_title_agrees_with_the_exit_code(
    factor: float | None, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joules = UNSURE if factor is None else scaled(factor)
    report = paired(
        (record_of("t.py::a"), record_of("t.py::a")), (record_of("t.py::b"), record_of("t.py::b", joules))
    )
    write(tmp_path, "x", report)
    file = str(tmp_path / "x" / "energy.json")
    status = main(["compare", file, "--format=markdown", f"--inconclusive={policy}"])
    assert status == exit_code(msgspec.structs.replace(report.compared, inconclusive=policy))
    title = capsys.readouterr().out.splitlines()[1]
    assert ("❌ Energy: fail, 1 of 2 tests " in title) == (status != 0)
    assert ("⚠️ Energy: warning, 1 of 2 tests inconclusive, " in title) == (
        factor is None and policy == "warn"
    )
    assert (title == "### ✅ Energy: pass, +0.0% over 2 tests") == (factor == 1.0)


def test_the_comment_has_the_policy_of_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "x", paired((record_of(), record_of(joules=UNSURE))).with_policy("fail"))
    file = str(tmp_path / "x" / "energy.json")
    assert main(["comment", file, "--dry-run"]) == 0
    assert "❌ Energy" in capsys.readouterr().out
    assert main(["compare", file, "--format=markdown"]) == 4
    assert (
        "fail, 1 of 1 test inconclusive, a quieter machine or more pairs can decide; "
        in capsys.readouterr().out
    )
