# SPDX-License-Identifier: Apache-2.0
"""One comment a request, replaced by later runs, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.errors import ForgeError
from pytest_llenergy.forges import Thread, merge_request, post, pull_request

from .forge import SOMEBODY, Forge, serving

MARK = "<!-- llenergy:compare -->"


@pytest.fixture
def forge() -> Iterator[Forge]:
    with serving(Forge()) as forge:
        yield forge


def github(forge: Forge) -> dict[str, str]:
    return {
        "GITHUB_API_URL": forge.address,
        "GITHUB_REPOSITORY": "us/energy",
        "GITHUB_TOKEN": "secret",
        "GITHUB_EVENT_NAME": "some",
    }


def gitlab(forge: Forge) -> dict[str, str]:
    return {
        "CI_API_V4_URL": f"{forge.address}/api/v4",
        "CI_PROJECT_ID": "42",
        "CI_PROJECT_URL": "https://gitlab.example/us/energy",
        "CI_MERGE_REQUEST_IID": "3",
        "LLENERGY_GITLAB_TOKEN": "secret",
    }


@pytest.fixture(params=["github", "a person on github", "gitlab"])
def thread(request: pytest.FixtureRequest, forge: Forge) -> Thread:
    forge.bot = request.param == "github"
    if request.param == "gitlab":
        return merge_request(gitlab(forge))
    return pull_request(github(forge), 3)


def test_a_first_comment_is_added(forge: Forge, thread: Thread) -> None:
    forge.has("Nice!", SOMEBODY)
    done, address = post(thread, f"{MARK}\n### Energy")
    assert done == "added"
    assert address.endswith("101")
    assert forge.bodies == ["Nice!", f"{MARK}\n### Energy"]


def test_a_later_one_takes_its_place_on_whatever_page_it_is(forge: Forge, thread: Thread) -> None:
    for text in ("one", "two", "three", "four"):
        forge.has(text, SOMEBODY)
    forge.has(f"{MARK}\r\nold")
    assert post(thread, f"{MARK}\nnew")[0] == "replaced"
    assert forge.bodies == ["one", "two", "three", "four", f"{MARK}\nnew"]


def test_what_somebody_else_has_marked_is_left_alone(forge: Forge, thread: Thread) -> None:
    forge.has(f"{MARK}\nmine", SOMEBODY)
    assert post(thread, f"{MARK}\nours")[0] == "added"
    assert forge.bodies[0] == f"{MARK}\nmine"


def test_a_mark_in_the_middle_of_a_comment_is_none(forge: Forge, thread: Thread) -> None:
    forge.has(f"the comment begins with {MARK}\n{MARK}")
    assert post(thread, f"{MARK}\nours")[0] == "added"


def test_a_refusal_is_one_line_with_what_the_service_says(forge: Forge, thread: Thread) -> None:
    forge.refuses = 403
    with pytest.raises(ForgeError, match=r"refused POST .*: 403 Resource not accessible by integration$"):
        post(thread, MARK)


def test_a_wrong_token_is_told(forge: Forge) -> None:
    environ = github(forge) | {"GITHUB_TOKEN": "stolen"}
    with pytest.raises(ForgeError, match="401 Bad credentials") as caught:
        post(pull_request(environ, 3), MARK)
    assert "stolen" not in str(caught.value)


def test_nobody_there_is_told() -> None:
    forge = Forge(address="http://127.0.0.1:9")
    with pytest.raises(ForgeError, match=r"GitHub could not be asked at http://127\.0\.0\.1:9/"):
        post(pull_request(github(forge), 3), MARK)


def test_the_request_is_found_in_the_event(forge: Forge, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 12}}))
    post(pull_request(github(forge) | {"GITHUB_EVENT_PATH": str(event)}), MARK)
    assert forge.asked[-1] == "POST /repos/us/energy/issues/12/comments"


def run_of(sha: str) -> dict[str, object]:
    owner = {"login": "them"}
    return {"workflow_run": {"head_sha": sha, "head_branch": "a/b", "head_repository": {"owner": owner}}}


def test_the_request_of_a_fork_is_found_by_its_last_commit(forge: Forge, tmp_path: Path) -> None:
    forge.pulls = [
        {"number": number, "head": {"ref": "a/b", "sha": sha}}
        for number, sha in ((4, "older"), (5, "another"), (6, "this"))
    ]
    event = tmp_path / "event.json"
    event.write_text(json.dumps(run_of("this")))
    post(pull_request(github(forge) | {"GITHUB_EVENT_PATH": str(event)}), MARK)
    assert forge.asked[-1] == "POST /repos/us/energy/issues/6/comments"


def test_a_request_that_was_pushed_to_since_gets_no_comment(forge: Forge, tmp_path: Path) -> None:
    forge.pulls = [{"number": 6, "head": {"ref": "a/b", "sha": "newer"}}]
    event = tmp_path / "event.json"
    event.write_text(json.dumps(run_of("this")))
    with pytest.raises(ForgeError, match="no open pull request has this as its last commit"):
        pull_request(github(forge) | {"GITHUB_EVENT_PATH": str(event)})


@pytest.mark.parametrize(
    "event",
    [
        "[]",
        "{",
        '{"pull_request": {}}',
        '{"pull_request": {"number": "x"}}',
        '{"workflow_run": {}}',
        '{"workflow_run": {"head_sha": "a", "head_repository": {"owner": null}}}',
    ],
)
def test_an_event_that_is_none_of_github_is_told(forge: Forge, event: str, tmp_path: Path) -> None:
    path = tmp_path / "event.json"
    path.write_text(event)
    with pytest.raises(
        ForgeError, match=r"GitHub: the event in .*event\.json could not be read \("
    ) as caught:
        pull_request(github(forge) | {"GITHUB_EVENT_PATH": str(path)})
    assert "\n" not in str(caught.value)


def test_a_deleted_fork_has_no_request(forge: Forge, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text('{"workflow_run": {"head_sha": "abc", "head_branch": "x", "head_repository": null}}')
    with pytest.raises(ForgeError, match="no open pull request has abc as its last commit"):
        pull_request(github(forge) | {"GITHUB_EVENT_PATH": str(event)})


def test_an_event_of_no_request_is_told(forge: Forge) -> None:
    with pytest.raises(ForgeError, match="the event some is of no pull request; name it with --number"):
        pull_request(github(forge))


@pytest.mark.parametrize("name", ["GITHUB_TOKEN", "GITHUB_REPOSITORY"])
def test_what_github_lacks_is_named(forge: Forge, name: str) -> None:
    environ = github(forge)
    del environ[name]
    with pytest.raises(ForgeError, match=f"{name} is not set"):
        pull_request(environ, 3)


@pytest.mark.parametrize("name", ["LLENERGY_GITLAB_TOKEN", "CI_MERGE_REQUEST_IID", "CI_PROJECT_ID"])
def test_what_gitlab_lacks_is_named(forge: Forge, name: str) -> None:
    environ = gitlab(forge)
    del environ[name]
    with pytest.raises(ForgeError, match=name):
        merge_request(environ)


def test_a_next_page_on_another_host_does_not_get_the_token(forge: Forge) -> None:
    for text in ("one", "two", "three"):
        forge.has(text, SOMEBODY)
    there = forge.address
    forge.address = "http://elsewhere.example"
    with pytest.raises(ForgeError, match="another host"):
        post(pull_request(github(forge) | {"GITHUB_API_URL": there}, 3), MARK)
