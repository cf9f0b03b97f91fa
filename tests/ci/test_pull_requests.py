# SPDX-License-Identifier: Apache-2.0
"""The scripts of the GitHub action and the GitLab job, run on real clones."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_llenergy.record.report import PairedReport
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


@pytest.mark.slow
def test_the_branch_is_compared_with_its_merge_base(tmp_path: Path) -> None:
    clone = Clone(tmp_path, each=11.0)
    summary = tmp_path / "summary.md"
    done = clone.action(FAIL_ON="\nenergy_j:3%\n", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stderr
    assert f"base {clone.begun[:10]} ({clone.main}...{clone.head}), head {clone.head[:10]}" in done.stderr
    (comparison,) = clone.paired().compared.comparisons
    assert (comparison.verdict, comparison.metric) == ("regressed", "energy_j")
    assert comparison.ratio == pytest.approx(1.1, rel=0.01)
    title = (
        "<!-- llenergy:compare -->\n### ❌ Energy: fail, 1 of 1 test regressed (+10.0%); +10.0% over 1 test"
    )
    assert summary.read_text().startswith(title)
    assert " · 4 pairs · " in summary.read_text()
    names = {path.name for path in clone.out.iterdir()}
    assert names == {"energy.json", "energy.markdown", "energy.html"}


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
    assert f"are the same commit {clone.begun[:10]}, so nothing can differ" in done.stderr


def test_a_base_that_is_no_commit_is_a_usage_error_in_one_line(tmp_path: Path) -> None:
    """Of a manual run, of the first push of a branch, of another history, and one that is unknown."""
    clone = Clone(tmp_path, each=10.0)
    git = clone.project.git
    git("checkout", "-q", "--orphan", "other")
    other = clone.project.commit()
    git("checkout", "-q", "main")
    for base, reason in (
        ("", "no commit to compare with"),
        ("0" * 40, "no commit to compare with"),
        (other, "have no common ancestor"),
        ("no-such-branch", "git knows no commit 'no-such-branch'"),
    ):
        done = clone.action(BASE=base)
        assert done.returncode == 2, done.stderr
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


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
        package=str(wheel(tmp_path, "x = 1")),
        command="pytest 'test_some.py'",
        pairs="4",
        **{"fail-on": "energy_j:3%"},
    )
    # The job would install into the environment of the tests.
    variables |= {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "CI_PROJECT_DIR": str(clone.path)}
    # The job sets GIT_DEPTH to 0, which fetches the whole history.
    subprocess.run(["git", "fetch", "-q", "--unshallow", "origin", "main"], cwd=clone.path, check=True)
    variables |= {"CI_MERGE_REQUEST_DIFF_BASE_SHA": clone.begun, "CI_COMMIT_SHA": clone.head}
    done = clone.run(script, **variables)
    assert done.returncode == 1, done.stderr
    (comparison,) = read_paired_report(clone.path / "energy.json").compared.comparisons
    assert comparison.verdict == "regressed"
    names = {path.name for path in clone.path.glob("energy.*")}
    assert names == {"energy.json", "energy.html", "energy.markdown"}
    assert json.loads((clone.path / "energy.json").read_text())["compared"]


def wheel(directory: Path, code: str) -> Path:
    """Write a wheel with the module ``pytest_llenergy.cli``, which needs no index to install."""
    path = directory / "pytest_llenergy-1-py3-none-any.whl"
    about = "pytest_llenergy-1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("pytest_llenergy/__init__.py", "")
        file.writestr("pytest_llenergy/cli.py", code)
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: pytest_llenergy\nVersion: 1\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A workspace whose modules end every Python that imports them."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    for name in ("pip", "venv", "ensurepip", "pytest_llenergy", "argparse"):
        (workspace / f"{name}.py").write_text("raise SystemExit('taken in')\n")
    return workspace


def run_in(workspace: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PIP_NO_INDEX": "1", **variables}
    return subprocess.run(command, cwd=workspace, env=given, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_tool_is_installed_outside_the_workspace_without_its_modules(trap: Path, tmp_path: Path) -> None:
    script, folder = str(ROOT / "action/install.sh"), tmp_path / "environment"
    done = run_in(trap, "bash", script, str(wheel(tmp_path, "")), str(folder), PYTHONPATH=str(trap))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/bin/python\n"
    assert list(folder.glob("lib/python*/site-packages/pytest_llenergy/cli.py"))


@pytest.mark.slow
def test_the_comment_of_gitlab_runs_nothing_next_to_the_artifacts(trap: Path, tmp_path: Path) -> None:
    job = yaml.safe_load(template())["energy-comment"]
    script = "\n".join(["set -eo pipefail", *job["script"]])
    code = "import os, sys\nprint(sys.argv[1:], os.listdir('jobs/energy'))\n"
    variables = {"PACKAGE": str(wheel(tmp_path, code))}
    assert "no comment" in run_in(trap, "bash", "-c", script, **variables).stdout
    variables["LLENERGY_GITLAB_TOKEN"] = "secret"
    for present in ([], ["energy.json"]):
        for name in present:
            (trap / name).write_text("{}")
        done = run_in(trap, "bash", "-c", script, **variables)
        assert (done.returncode, done.stdout) == (0, f"['comment', 'jobs'] {present}\n"), done.stderr


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.slow
def test_the_comment_action_runs_with_or_without_artifacts(present: bool, trap: Path, tmp_path: Path) -> None:
    (step,) = [
        each
        for each in yaml.safe_load((ROOT / "comment/action.yml").read_text())["runs"]["steps"]
        if each["name"] == "Comment"
    ]
    code = "import os, sys\nprint(sys.argv[1:], os.path.isdir(sys.argv[2]))\n"
    folder, python = tmp_path / "environment", str(tmp_path / "environment/bin/python")
    script = str(ROOT / "action/install.sh")
    assert run_in(trap, "bash", script, str(wheel(tmp_path, code)), str(folder)).returncode == 0
    found = tmp_path / "energy"
    if present:
        found.mkdir()
    variables = {"PYTHON": python, "COMPARISONS": str(found), "KEY": "", "NUMBER": "3"}
    done = run_in(trap, "bash", "-eo", "pipefail", "-c", step["run"], **variables)
    assert done.stdout == f"['comment', '{found}', '--number', '3'] True\n", done.stderr


def test_the_action_names_its_artifact_after_the_job(tmp_path: Path) -> None:
    (step,) = [
        each
        for each in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
        if each.get("id") == "install"
    ]
    action = tmp_path / "action"
    action.mkdir()
    (action / "install.sh").write_text('#!/bin/sh\necho "$2"\n')
    (action / "install.sh").chmod(0o755)
    variables = {"GITHUB_ACTION_PATH": str(tmp_path), "RUNNER_TEMP": "/tmp/runner", "PYTHON": "python"}
    for key, expected in {
        "compare": "compare",
        "compare-a/b: 3.11": "compare-a-b--3-11",
        "../x": "---x",
        "": "energy",
    }.items():
        output = tmp_path / "output"
        output.write_text("")
        given = {**variables, "GITHUB_OUTPUT": str(output), "KEY": key, "SETUP": "pip install ."}
        done = run_in(tmp_path, "bash", "-eo", "pipefail", "-c", step["run"], **given)
        assert done.returncode == 0, done.stderr
        assert output.read_text().splitlines()[1] == f"key={expected}"
