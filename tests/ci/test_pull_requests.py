# SPDX-License-Identifier: Apache-2.0
"""The scripts of the GitHub action and the GitLab job, run on real clones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_llenergy.model.report import PairedReport
from pytest_llenergy.report.store import read_paired_report

from ..ab.project import Project
from .test_files import ROOT, template

SCRIPT = ROOT / "action/compare.sh"


class Clone:
    """A shallow clone, as in a CI job, of a branch that started before the last commit on main."""

    def __init__(self, tmp_path: Path, each: float) -> None:
        self.project = Project(tmp_path)
        self.begun = self.project.git("rev-parse", "HEAD")
        self.project.git("checkout", "-q", "-b", "feature")
        self.project.edit("work.py", "EACH = 10.0", f"EACH = {each}")
        self.head = self.project.commit()
        self.project.git("checkout", "-q", "main")
        # A later commit on main is not a change of the branch.
        self.project.edit("work.py", "EACH = 10.0", "EACH = 2.0")
        self.main = self.project.commit()
        self.path = tmp_path / "clone"
        self.out = tmp_path / "out"
        place = f"file://{self.project.path}"
        subprocess.run(
            ["git", "clone", "-q", "--depth=1", "--branch=feature", place, self.path],
            check=True,
            cwd=tmp_path,
        )

    def run(self, script: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {
            **self.project.environment,
            "PATH": f"{Path(sys.executable).parent}:{self.project.environment['PATH']}",
            "PYTHON": sys.executable,
            "PAIRS": "4",
            **variables,
        }
        words = [str(script)] if isinstance(script, Path) else ["-euo", "pipefail", "-c", script]
        command = ["bash", *words]
        return subprocess.run(command, cwd=self.path, env=given, capture_output=True, text=True, timeout=300)

    def action(self, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {"BASE": self.main, "HEAD": self.head, "COMMAND": "pytest test_some.py", "OUT": str(self.out)}
        return self.run(SCRIPT, **{**given, **variables})

    def paired(self) -> PairedReport:
        return read_paired_report(self.out / "energy.json")


def test_the_branch_is_compared_with_its_merge_base(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=11.0)
    summary = tmp_path / "summary.md"
    done = clone.action(
        FAIL_ON="\nenergy_j:3%\n", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary), FORMATS="junit"
    )
    assert done.returncode == 1, done.stderr
    assert f"base {clone.begun} (merge base with {clone.main}), head {clone.head}" in done.stdout
    (comparison,) = clone.paired().compared.comparisons
    assert (comparison.verdict, comparison.metric) == ("regressed", "energy_j")
    assert comparison.ratio == pytest.approx(1.1, rel=0.01)
    assert ",file=test_some.py,line=4::energy_j regressed" in done.stdout
    assert summary.read_text().startswith("<!-- llenergy:compare -->\n### Energy: 1 regressed")
    names = {path.name for path in clone.out.iterdir()}
    assert names == {"energy.json", "energy.markdown", "energy.html", "energy.junit"}


@pytest.mark.slow
def test_an_unchanged_branch_passes(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=10.0)
    # A branch name that the shallow clone does not have yet.
    done = clone.action(BASE="main")
    assert done.returncode == 0, done.stderr
    (comparison,) = clone.paired().compared.comparisons
    assert comparison.verdict == "unchanged"


def test_the_command_is_split_into_words_without_expansion(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=10.0)
    done = clone.action(
        COMMAND="pytest test_some.py -k 'test_a or $(touch oops)'", OPTIONS="--metric energy_j '--pairs=4+4'"
    )
    assert done.returncode == 2
    assert "touch oops" in done.stderr
    assert not list(tmp_path.rglob("oops"))


def test_a_head_without_own_commits_is_a_usage_error(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=10.0)
    done = clone.action(HEAD=clone.begun)
    assert done.returncode == 2
    assert f"head {clone.begun} is part of {clone.main}: there is nothing of its own" in done.stderr


@pytest.mark.parametrize("variable", ["COMMAND", "OPTIONS"])
def test_an_unclosed_quote_is_a_usage_error(tmp_path: Path, variable: str) -> None:
    clone = Clone(tmp_path, each=11.0)
    done = clone.action(**{variable: "pytest test_some.py --metric energy_j -k don't"})
    assert done.returncode == 2
    assert "has a quote that is not closed" in done.stderr


@pytest.mark.parametrize(
    "command", ["python train.py", pytest.param("pytest test_some.py", marks=pytest.mark.slow)]
)
def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, command: str) -> None:
    clone = Clone(tmp_path, each=10.0)
    package = clone.path / "pytest_llenergy" / "cli"
    package.mkdir(parents=True)
    for name in ("pytest_llenergy/__init__.py", "pytest_llenergy/cli/__init__.py", "statistics.py"):
        (clone.path / name).write_text("raise SystemExit('taken in')\n")
    done = clone.action(COMMAND=command)
    assert "taken in" not in done.stderr
    assert ("llenergy ab:" in done.stderr) == (command == "python train.py"), "our command did start"


def test_a_comparison_that_cannot_run_says_why(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=10.0)
    done = clone.action(COMMAND="python train.py")
    assert done.returncode == 2
    assert "llenergy ab:" in done.stderr
    assert not (clone.out / "energy.json").exists()


def gitlab_script(**inputs: str) -> tuple[dict[str, str], str]:
    job: dict[str, Any] = yaml.safe_load(template(**inputs))["energy"]
    return {name: str(value) for name, value in job["variables"].items()}, "\n".join(job["script"])


@pytest.mark.slow
def test_the_gitlab_job_compares_with_the_merge_base(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=11.0)
    variables, script = gitlab_script(
        install="true", command="pytest 'test_some.py'", pairs="4", **{"fail-on": "energy_j:3%"}
    )
    # The job sets GIT_DEPTH to 0, which fetches the whole history.
    subprocess.run(["git", "fetch", "-q", "--unshallow", "origin", "main"], cwd=clone.path, check=True)
    variables |= {"CI_MERGE_REQUEST_DIFF_BASE_SHA": clone.begun, "CI_COMMIT_SHA": clone.head}
    done = clone.run(script, **variables)
    assert done.returncode == 1, done.stderr
    (comparison,) = read_paired_report(clone.path / "energy.json").compared.comparisons
    assert comparison.verdict == "regressed"
    names = {path.name for path in clone.path.glob("energy.*")}
    assert names == {"energy.json", "energy.html", "energy.markdown", "energy.junit", "energy.gitlab"}
    assert json.loads((clone.path / "energy.json").read_text())["compared"]
