# SPDX-License-Identifier: Apache-2.0
"""One comment per request, replaced by later runs, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llenergy.errors import ForgeError
from pytest_llenergy.report.forges import CiRun, find_run, post_comments

from .forge import SOMEBODY, Forge, serving

MARKER = "<!-- llenergy:compare -->"

Post = Callable[[str], tuple[str, str]]


def post_comment(environ: dict[str, str], body: str, number: int | None = None) -> tuple[str, str]:
    (done,) = post_comments(environ, [body], number)
    return done


@pytest.fixture
def forge() -> Iterator[Forge]:
    with serving(Forge()) as forge:
        yield forge


def github(forge: Forge, **variables: str) -> dict[str, str]:
    return {
        "GITHUB_API_URL": forge.address,
        "GITHUB_REPOSITORY": "us/energy",
        "GITHUB_TOKEN": "secret",
        "GITHUB_EVENT_NAME": "some",
        **variables,
    }


def gitlab(forge: Forge) -> dict[str, str]:
    return {
        "GITLAB_CI": "true",
        "CI_API_V4_URL": f"{forge.address}/api/v4",
        "CI_PROJECT_ID": "42",
        "CI_PROJECT_URL": "https://gitlab.example/us/energy",
        "CI_MERGE_REQUEST_IID": "3",
        "LLENERGY_GITLAB_TOKEN": "secret",
    }


@pytest.fixture(params=["a bot on GitHub", "a person on GitHub", "GitLab"])
def post(request: pytest.FixtureRequest, forge: Forge) -> Post:
    """Post a comment on request 3."""
    forge.bot = request.param == "a bot on GitHub"
    if request.param == "GitLab":
        return lambda body: post_comment(gitlab(forge), body)
    return lambda body: post_comment(github(forge), body, 3)


def test_the_first_comment_is_added(forge: Forge, post: Post) -> None:
    forge.has("Nice!", SOMEBODY)
    done, address = post(f"{MARKER}\n### Energy")
    assert done == "added"
    assert address in ("https://forge/#101", "https://gitlab.example/us/energy/-/merge_requests/3#note_101")
    assert forge.bodies == ["Nice!", f"{MARKER}\n### Energy"]


def test_a_later_comment_replaces_it_on_any_page(forge: Forge, post: Post) -> None:
    for text in ("one", "two", "three", "four"):
        forge.has(text, SOMEBODY)
    forge.has(f"{MARKER}\r\nold")
    assert post(f"{MARKER}\nnew")[0] == "replaced"
    assert forge.bodies == ["one", "two", "three", "four", f"{MARKER}\nnew"]


def test_a_marked_comment_of_somebody_else_is_left_alone(forge: Forge, post: Post) -> None:
    forge.has(f"{MARKER}\nmine", SOMEBODY)
    assert post(f"{MARKER}\nours")[0] == "added"
    assert forge.bodies[0] == f"{MARKER}\nmine"


def test_each_marker_has_its_comment_and_outdated_ones_are_replaced(forge: Forge, post: Post) -> None:
    for job in "abc":
        post(f"<!-- {job} -->\nold")
    forge.has("<!-- c -->\nmine", SOMEBODY)
    bodies = ["<!-- a -->\nnew", "<!-- d -->\nnew"]
    environ, number = (gitlab(forge), None) if "notes" in forge.asked[-1] else (github(forge), 3)
    answers = {"<!-- c -->": "<!-- c -->\nno comparison"}
    done = post_comments(environ, bodies, number, answers.get)
    assert sorted(each for each, _ in done) == ["added", "replaced", "replaced"]
    assert forge.bodies == [
        "<!-- a -->\nnew",
        "<!-- b -->\nold",
        "<!-- c -->\nno comparison",
        "<!-- c -->\nmine",
        "<!-- d -->\nnew",
    ]


def test_a_refusal_is_one_line_with_the_message_of_the_forge(forge: Forge, post: Post) -> None:
    forge.refuses = 403
    with pytest.raises(
        ForgeError, match=r"refused POST .*: 403 Resource not accessible by integration; the token in "
    ):
        post(MARKER)


def test_a_wrong_token_is_reported_without_the_token(forge: Forge) -> None:
    with pytest.raises(ForgeError, match="401 Bad credentials") as caught:
        post_comment(github(forge, GITHUB_TOKEN="stolen"), MARKER, 3)
    assert "stolen" not in str(caught.value)


Answer = tuple[int, str, dict[str, str]]

LIMIT: Answer = (403, '{"message": "API rate limit exceeded"}', {"Retry-After": "0"})
BAD_GATEWAY: Answer = (502, "<html>Bad Gateway</html>", {})


@pytest.mark.parametrize("answer", [LIMIT, BAD_GATEWAY])
def test_limits_and_busy_servers_are_tried_again_and_then_named(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr("pytest_llenergy.report.forges.RETRY_AFTER_S", (0.0, 0.0))
    # The first request asks for the user of the token, which may fail.
    forge.answers = [(404, "{}", {}), answer, answer]
    post_comment(github(forge), MARKER, 3)
    assert len(forge.comments) == 1
    forge.answers = [(404, "{}", {}), answer, answer, answer]
    with pytest.raises(ForgeError, match="rate limit" if answer is LIMIT else "not available") as caught:
        post_comment(github(forge), MARKER, 3)
    assert "permission" not in str(caught.value)


@pytest.mark.parametrize("text", ["<html>Sign in</html>", '"ok"', '{"error": "no"}'])
def test_the_page_of_a_proxy_is_named(forge: Forge, text: str) -> None:
    forge.answers = [(404, "{}", {}), (200, text, {})]
    with pytest.raises(ForgeError, match="proxy"):
        post_comment(github(forge), MARKER, 3)


@pytest.mark.parametrize("text", ["{}", "[]", "[1]"])
def test_json_that_is_unlike_the_forge_s_is_named(forge: Forge, text: str) -> None:
    forge.answers = [(200, text, {})]
    with pytest.raises(ForgeError, match="did not answer as GitHub does"):
        post_comment(github(forge), MARKER, 3)


def test_a_redirect_does_not_receive_the_token(forge: Forge) -> None:
    with serving(Forge()) as other:
        forge.redirects_to = other.address
        with pytest.raises(ForgeError, match=r"GitHub refused GET .*: 302"):
            post_comment(github(forge), MARKER, 3)
    assert other.asked == []


class TestEvent:
    @pytest.fixture
    def event(self, tmp_path: Path) -> Path:
        return tmp_path / "event.json"

    @staticmethod
    def workflow_run(commit: str) -> str:
        run = {
            "head_sha": commit,
            "head_branch": "a/b",
            "head_repository": {"owner": {"login": "them"}},
        }
        return json.dumps({"workflow_run": run})

    def test_event_of_a_pull_request_names_its_number(self, forge: Forge, event: Path) -> None:
        event.write_text(json.dumps({"pull_request": {"number": 12}}))
        post_comment(github(forge, GITHUB_EVENT_PATH=str(event)), MARKER)
        assert forge.asked[-1] == "POST /repos/us/energy/issues/12/comments"

    def test_event_of_a_fork_is_matched_by_its_last_commit(self, forge: Forge, event: Path) -> None:
        forge.pulls = [
            {"number": number, "head": {"ref": "a/b", "sha": commit}}
            for number, commit in ((4, "older"), (5, "another"), (6, "this"))
        ]
        event.write_text(self.workflow_run("this"))
        post_comment(github(forge, GITHUB_EVENT_PATH=str(event)), MARKER)
        assert forge.asked[-1] == "POST /repos/us/energy/issues/6/comments"

    def test_event_of_an_outdated_commit_gets_no_comment(self, forge: Forge, event: Path) -> None:
        forge.pulls = [{"number": 6, "head": {"ref": "a/b", "sha": "newer"}}]
        event.write_text(self.workflow_run("this"))
        with pytest.raises(ForgeError, match="no open pull request has this as its last commit"):
            post_comment(github(forge, GITHUB_EVENT_PATH=str(event)), MARKER)

    @pytest.mark.parametrize(
        "text",
        [
            "[]",
            "{",
            '{"pull_request": {}}',
            '{"pull_request": {"number": "x"}}',
            '{"workflow_run": {}}',
            '{"workflow_run": {"head_sha": "a", "head_repository": {"owner": null}}}',
        ],
    )
    def test_malformed_event_is_one_error_line(self, forge: Forge, event: Path, text: str) -> None:
        event.write_text(text)
        with pytest.raises(ForgeError, match=r"GitHub: cannot read the event in .*event\.json \(") as caught:
            post_comment(github(forge, GITHUB_EVENT_PATH=str(event)), MARKER)
        assert "\n" not in str(caught.value)

    def test_event_without_a_pull_request_asks_for_the_number(self, forge: Forge) -> None:
        with pytest.raises(ForgeError, match="the event some has no pull request; name it with --number"):
            post_comment(github(forge), MARKER)


@pytest.mark.parametrize("name", ["GITHUB_TOKEN", "GITHUB_REPOSITORY"])
def test_a_missing_variable_of_github_is_named(forge: Forge, name: str) -> None:
    with pytest.raises(ForgeError, match=f"{name} is not set; "):
        post_comment(github(forge, **{name: ""}), MARKER, 3)


@pytest.mark.parametrize("name", ["LLENERGY_GITLAB_TOKEN", "CI_MERGE_REQUEST_IID", "CI_PROJECT_ID"])
def test_a_missing_variable_of_gitlab_is_named(forge: Forge, name: str) -> None:
    with pytest.raises(ForgeError, match=f"{name} is not set; "):
        post_comment(gitlab(forge) | {name: ""}, MARKER)


class TestRun:
    """Where the links of a comment lead."""

    OWN = CiRun(
        "https://github.example/us/energy/actions/runs/7",
        "https://github.example/us/energy/actions/runs/7#artifacts",
        "Energy",
        "compare",
        "merged",
    )

    @staticmethod
    def environ(tmp_path: Path, event: str) -> dict[str, str]:
        (tmp_path / "event.json").write_text(event)
        return {
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_REPOSITORY": "us/energy",
            "GITHUB_RUN_ID": "7",
            "GITHUB_WORKFLOW": "Energy",
            "GITHUB_JOB": "compare",
            "GITHUB_SHA": "merged",
        }

    def test_a_pull_request_names_its_commit_and_not_the_merge(self, tmp_path: Path) -> None:
        environ = self.environ(tmp_path, '{"pull_request": {"number": 3, "head": {"sha": "theirs"}}}')
        assert find_run(environ) == replace(self.OWN, commit="theirs")
        assert find_run(self.environ(tmp_path, "{}")) == self.OWN

    def test_a_triggered_workflow_names_the_run_that_measured(self, tmp_path: Path) -> None:
        run = {"html_url": "https://github.example/run/6", "name": "Energy", "head_sha": "theirs"}
        environ = self.environ(tmp_path, json.dumps({"workflow_run": run}))
        environ["GITHUB_WORKFLOW"] = "Energy comment"
        url = "https://github.example/run/6"
        assert find_run(environ) == CiRun(url, f"{url}#artifacts", "Energy", commit="theirs")
