# SPDX-License-Identifier: Apache-2.0
"""Comments of a pull request on GitHub, with what a workflow has in its environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pytest_llenergy.errors import ForgeError
from pytest_llenergy.forges.http import Api
from pytest_llenergy.forges.thread import Comment

#: Of the REST API, https://docs.github.com/rest/about-the-rest-api/api-versions.
VERSION = "2022-11-28"


class PullRequest:
    """A ``Thread``. ``repository`` is ``owner/name``."""

    def __init__(self, api: Api, repository: str, number: int) -> None:
        self._api = api
        self._repository = f"repos/{repository}"
        self._number = number

    def comments(self) -> Iterator[Comment]:
        """See ``Thread``."""
        me = self._me()
        for each in self._api.pages(f"{self._repository}/issues/{self._number}/comments?per_page=100"):
            user = each.get("user") or {}
            own = user.get("type") == "Bot" if me is None else user.get("id") == me
            yield Comment(each["id"], each.get("body") or "", own)

    def _me(self) -> int | None:
        """Whose the token is. A workflow's own may not ask, and is that of a bot."""
        try:
            return int(self._api.send("GET", "user")["id"])
        except ForgeError:
            return None

    def add(self, body: str) -> str:
        """See ``Thread``."""
        path = f"{self._repository}/issues/{self._number}/comments"
        return str(self._api.send("POST", path, {"body": body})["html_url"])

    def replace(self, comment: Comment, body: str) -> str:
        """See ``Thread``."""
        path = f"{self._repository}/issues/comments/{comment.id}"
        return str(self._api.send("PATCH", path, {"body": body})["html_url"])


def pull_request(environ: Mapping[str, str], number: int | None = None) -> PullRequest:
    """The pull request that a workflow runs for: ``pull_request`` and ``workflow_run`` events.

    Raises ``ForgeError`` where the environment does not say which, or holds no token.
    """
    token, repository = environ.get("GITHUB_TOKEN"), environ.get("GITHUB_REPOSITORY")
    if not repository:
        raise ForgeError("GitHub: GITHUB_REPOSITORY is not set; run this in a workflow, or use --dry-run")
    if not token:
        raise ForgeError(
            "GitHub: GITHUB_TOKEN is not set; give the step `env: GITHUB_TOKEN: ${{ github.token }}` and the "
            "job `permissions: pull-requests: write`"
        )
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": VERSION,
    }
    api = Api(environ.get("GITHUB_API_URL", "https://api.github.com"), headers, "GitHub")
    return PullRequest(api, repository, number or _number(api, repository, environ))


def _number(api: Api, repository: str, environ: Mapping[str, str]) -> int:
    path = environ.get("GITHUB_EVENT_PATH")
    try:
        event: dict[str, Any] = json.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError) as error:
        raise ForgeError(f"GitHub: the event in {path} could not be read ({error})") from None
    if "pull_request" in event:
        return int(event["pull_request"]["number"])
    if "workflow_run" in event:
        return _of_run(api, repository, event["workflow_run"])
    raise ForgeError(
        f"GitHub: the event {environ.get('GITHUB_EVENT_NAME', 'of this workflow')} is of no pull request; "
        "name it with --number"
    )


def _of_run(api: Api, repository: str, run: Mapping[str, Any]) -> int:
    """The open pull request whose last commit the run had.

    The event names none for a fork. What the run itself has left may be anything, so it is not asked.
    """
    owner = (run.get("head_repository") or {}).get("owner", {}).get("login")
    branch, sha = run.get("head_branch"), run.get("head_sha")
    if owner and branch and sha:
        head = quote(f"{owner}:{branch}", safe="")
        for each in api.pages(f"repos/{repository}/pulls?state=open&per_page=100&head={head}"):
            if each["head"]["sha"] == sha:
                return int(each["number"])
    raise ForgeError(
        f"GitHub: no open pull request has {sha or 'the commit of the run'} as its last commit; it was "
        "pushed to or closed since"
    )
