# SPDX-License-Identifier: Apache-2.0
"""GitHub actions, workflows and the GitLab template are valid and safe with untrusted input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_llenergy.options.table import option_row

ROOT = Path(__file__).parents[2]
ACTIONS = [ROOT / "action.yml", ROOT / "comment/action.yml"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATE = ROOT / "templates/energy.yml"
SCRIPTS = sorted((ROOT / "action").glob("*.sh"))
PAGES = [ROOT / "docs/pull-requests.md", ROOT / "docs/tutorial.md"]

#: An action at a commit, with its version.
PINNED = re.compile(r"uses: ([\w.-]+/[\w./-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def template(**inputs: str) -> str:
    """Return the job of the GitLab template with these inputs and defaults for the others."""
    header, job = yaml.safe_load_all(TEMPLATE.read_text())
    values = {
        name: inputs.get(name, about.get("default")) for name, about in header["spec"]["inputs"].items()
    }
    text = TEMPLATE.read_text().split("\n---\n")[1]
    assert job["energy"]
    return re.sub(r"\$\[\[ inputs\.([a-z-]+) \]\]", lambda found: yaml_text(values[found[1]]), text)


def yaml_text(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).removesuffix("...\n").strip()


def check(schema: str, *files: Path, transform: str | None = None) -> None:
    """Validate files with a schema that check-jsonschema ships."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    command += ["--data-transform", transform] if transform else []
    found = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_actions_are_valid() -> None:
    check("vendor.github-actions", *ACTIONS)


def test_the_workflows_are_valid() -> None:
    check("vendor.github-workflows", *WORKFLOWS)


def test_the_configuration_of_dependabot_is_valid_and_covers_every_action() -> None:
    path = ROOT / ".github/dependabot.yml"
    check("vendor.dependabot", path)
    updates = {each["package-ecosystem"]: each for each in yaml.safe_load(path.read_text())["updates"]}
    assert updates.keys() == {"github-actions", "pip"}
    directories = {f"/{file.parent.relative_to(ROOT)}".rstrip(".") for file in ACTIONS}
    assert set(updates["github-actions"]["directories"]) == directories


def uses(path: Path) -> list[str]:
    """Return the lines that use an action of somebody else, except this one under the name ``OWNER``."""
    lines = [line.strip().removeprefix("- ") for line in path.read_text().splitlines()]
    return [
        line
        for line in lines
        if line.startswith("uses: ") and not line.startswith(("uses: .", "uses: OWNER"))
    ]


@pytest.mark.parametrize("path", [*ACTIONS, *WORKFLOWS, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_action_is_pinned_to_a_commit_with_its_version(path: Path) -> None:
    for line in uses(path):
        assert PINNED.fullmatch(line), line


def test_an_action_has_one_version_everywhere() -> None:
    lines = {line for path in (*ACTIONS, *WORKFLOWS, *PAGES) for line in uses(path)}
    names = [line.partition("@")[0] for line in lines]
    assert len(names) == len(set(names)) >= 5, sorted(lines)


def test_every_job_has_a_time_limit() -> None:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            assert 10 <= job["timeout-minutes"] <= 350, (path.name, name)
    jobs = yaml.safe_load(template())
    limits = {name: job.get("timeout") for name, job in jobs.items()}
    assert limits == {"energy": "1 hour", "energy-comment": "10 minutes"}
    energy = yaml.safe_load((ROOT / ".github/workflows/energy.yml").read_text())["jobs"]["compare"]
    assert energy["timeout-minutes"] == 60


def test_github_and_gitlab_have_the_same_defaults() -> None:
    header, _ = yaml.safe_load_all(TEMPLATE.read_text())
    gitlab = {name: about.get("default") for name, about in header["spec"]["inputs"].items()}
    github = {
        name: about.get("default") for name, about in yaml.safe_load(ACTIONS[0].read_text())["inputs"].items()
    }
    both = gitlab.keys() & github.keys()
    assert both == {"command", "setup", "fail-on", "pairs", "inconclusive", "floor", "options"}
    assert {name: gitlab[name] for name in both} == {name: github[name] for name in both}
    assert gitlab["inconclusive"] == option_row("inconclusive").read_argument(None)
    assert gitlab["image"] == "python:3.11"
    assert gitlab["package"] == "pytest-llenergy[html]"


def test_no_module_of_the_workspace_is_run_where_a_token_may_be() -> None:
    texts = [path.read_text() for path in (*SCRIPTS, TEMPLATE)]
    texts += [command for path in ACTIONS for command in commands(yaml.safe_load(path.read_text()))]
    for line in "\n".join(texts).splitlines():
        assert not re.search(r"""\bpython["']? (?!-I\b)-m""", line, re.IGNORECASE), line
        assert not re.match(r"\s*(- )?pip ", line), line


def test_the_gitlab_template_is_valid(tmp_path: Path) -> None:
    job = tmp_path / "job.yml"
    job.write_text(template())
    check("vendor.gitlab-ci", job, transform="gitlab-ci")


@pytest.mark.parametrize("path", [*ACTIONS, *WORKFLOWS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_command_contains_an_expression(path: Path) -> None:
    # GitHub pastes the value of an expression into the script: a branch named `$(…)` would be run.
    for command in commands(yaml.safe_load(path.read_text())):
        assert "${{" not in command


def commands(data: Any) -> list[str]:
    """Return every ``run`` command in the document."""
    if isinstance(data, list):
        return [command for each in data for command in commands(each)]
    if not isinstance(data, dict):
        return []
    own = [data["run"]] if isinstance(data.get("run"), str) else []
    return own + [command for each in data.values() for command in commands(each)]


def test_workflows_that_run_pull_requests_may_only_read() -> None:
    for name in ("energy.yml", "ci.yml"):
        workflow = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
        assert workflow["permissions"] == {"contents": "read"}


def test_only_jobs_without_repository_code_may_publish() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "announce": {"contents": "write"},
    }
    assert jobs["publish"]["environment"] == "pypi"
    assert commands(jobs["publish"]) == []
    assert [command.split()[:3] for command in commands(jobs["announce"])] == [["gh", "release", "create"]]
    used = [step.get("uses", "") for name in ("publish", "announce") for step in jobs[name]["steps"]]
    assert not any(use.startswith("actions/checkout") for use in used)


def test_the_comment_workflow_runs_no_code_of_the_pull_request() -> None:
    text = (ROOT / ".github/workflows/energy-comment.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    checkout = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout"))
    assert checkout["with"]["ref"] == "${{ github.event.repository.default_branch }}"
    assert commands(job) == []
    assert "head_sha" not in text
    assert "head_branch" not in text
