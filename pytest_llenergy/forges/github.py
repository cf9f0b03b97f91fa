# SPDX-License-Identifier: Apache-2.0
"""Comments of a pull request on GitHub, with what a workflow has in its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from pytest_llenergy.errors import ForgeError
from pytest_llenergy.forges.http import Api
from pytest_llenergy.forges.thread import Comment

#: Of the REST API, https://docs.github.com/rest/about-the-rest-api/api-versions.
VERSION = "2022-11-28"


class _Request(msgspec.Struct):
    number: int


class _Owner(msgspec.Struct):
    login: str


class _Repository(msgspec.Struct):
    owner: _Owner


class _Run(msgspec.Struct):
    """What triggered a ``workflow_run``; the repository is null once a fork is deleted."""

    head_sha: str
    head_branch: str | None = None
    head_repository: _Repository | None = None


class _Event(msgspec.Struct):
    """What is asked of an event, https://docs.github.com/webhooks/webhook-events-and-payloads."""

    pull_request: _Request | None = None
    workflow_run: _Run | None = None


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
        event = msgspec.json.decode(Path(path).read_bytes(), type=_Event) if path else _Event()
    except (OSError, msgspec.DecodeError) as error:
        raise ForgeError(f"GitHub: the event in {path} could not be read ({error})") from None
    if event.pull_request is not None:
        return event.pull_request.number
    if event.workflow_run is not None:
        return _of_run(api, repository, event.workflow_run)
    raise ForgeError(
        f"GitHub: the event {environ.get('GITHUB_EVENT_NAME', 'of this workflow')} is of no pull request; "
        "name it with --number"
    )


def _of_run(api: Api, repository: str, run: _Run) -> int:
    """The open pull request whose last commit the run had.

    The event names none for a fork. What the run itself has left may be anything, so it is not asked.
    """
    if run.head_repository is not None and run.head_branch:
        head = quote(f"{run.head_repository.owner.login}:{run.head_branch}", safe="")
        for each in api.pages(f"repos/{repository}/pulls?state=open&per_page=100&head={head}"):
            if each["head"]["sha"] == run.head_sha:
                return int(each["number"])
    raise ForgeError(
        f"GitHub: no open pull request has {run.head_sha} as its last commit; it was "
        "pushed to or closed since"
    )
