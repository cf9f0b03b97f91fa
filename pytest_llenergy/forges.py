# SPDX-License-Identifier: Apache-2.0
"""Post a comparison as a comment on GitHub and GitLab."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from pytest_llenergy.errors import ForgeError

# GitHub and GitLab: where a comparison is shown beside the change that it is of.


# One JSON request, and what became of it in one line.

TIMEOUT_S = 30

#: Entries of a list that are looked at, at most.
MOST_ENTRIES = 10_000

NEXT = re.compile(r'<([^>]+)>\s*;[^,]*\brel="next"')


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would carry the token to wherever it leads."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Api:
    """An address that JSON is sent to, and the ``headers`` that say who sends it."""

    url: str
    headers: Mapping[str, str]
    service: str

    def __post_init__(self) -> None:
        """Raises ``ForgeError`` for an address that is none."""
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ForgeError(f"{self.service}: {self.url!r} is no address of an API, expected https://…")

    def send(self, method: str, path: str, body: object = None) -> Any:
        """The answer as data. Raises ``ForgeError`` with the status and what the service says."""
        return self._send(method, f"{self.url.rstrip('/')}/{path}", body)[0]

    def pages(self, path: str) -> Iterator[Any]:
        """The entries of a list that comes in pages. Raises ``ForgeError``."""
        return islice(self._entries(path), MOST_ENTRIES)

    def _entries(self, path: str) -> Iterator[Any]:
        url: str | None = f"{self.url.rstrip('/')}/{path}"
        while url is not None:
            found, url = self._send("GET", url)
            yield from found

    def _send(self, method: str, url: str, body: object = None) -> tuple[Any, str | None]:
        if urlsplit(url)[:2] != urlsplit(self.url)[:2]:
            raise ForgeError(f"{self.service}: the next page is said to be on another host, {url}")
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "User-Agent": "pytest-llenergy", "Content-Type": "application/json"}
        request = Request(url, data, headers, method=method)
        try:
            with build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer), _next(answer.headers.get("Link", ""))
        except HTTPError as error:
            told = _told(error)
            raise ForgeError(f"{self.service} refused {method} {url}: {error.code} {told}") from None
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ForgeError(f"{self.service} could not be asked at {url} ({reason})") from None


def _next(link: str) -> str | None:
    found = NEXT.search(link)
    return found[1] if found else None


def _told(error: HTTPError) -> str:
    """What the service says of a refusal, on one line."""
    try:
        told = json.load(error)
    except (OSError, ValueError):
        return str(error.reason)
    message = told.get("message") or told.get("error") if isinstance(told, dict) else None
    return " ".join(str(message or error.reason).split())[:300]


# The comments of a pull request, and the one among them that is replaced from run to run.


@dataclass(frozen=True)
class Comment:
    """One comment. ``own`` is whether it was written by who would write the next one."""

    id: int
    body: str
    own: bool


class Thread(Protocol):
    """The comments of one pull or merge request. All methods raise ``ForgeError``."""

    def comments(self) -> Iterable[Comment]:
        """All of them, the oldest first."""
        ...

    def add(self, body: str) -> str:
        """Write a new one; returns its address."""
        ...

    def replace(self, comment: Comment, body: str) -> str:
        """Write something else in the place of one; returns its address."""
        ...


def post(thread: Thread, body: str) -> tuple[Literal["added", "replaced"], str]:
    """Leave one comment of this kind on the thread: what it begins with marks it.

    A comment that somebody else began with the mark is left alone. Returns what was done and the address.
    Raises ``ForgeError``.
    """
    marker = body.split("\n", 1)[0]
    for comment in thread.comments():
        if comment.own and comment.body.split("\n", 1)[0].strip() == marker:
            return "replaced", thread.replace(comment, body)
    return "added", thread.add(body)


# Comments of a pull request on GitHub, with what a workflow has in its environment.

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


# Notes of a merge request on GitLab, with what a pipeline has in its environment.


class MergeRequest:
    """A ``Thread``. ``project`` is a number or a path, ``number`` the internal one (``iid``)."""

    def __init__(self, api: Api, project: str, number: int, address: str) -> None:
        self._api = api
        self._notes = f"projects/{quote(project, safe='')}/merge_requests/{number}/notes"
        self._address = address

    def comments(self) -> Iterator[Comment]:
        """See ``Thread``."""
        me = self._api.send("GET", "user")["id"]
        for each in self._api.pages(f"{self._notes}?per_page=100&sort=asc&order_by=created_at"):
            yield Comment(each["id"], each.get("body") or "", own=each["author"]["id"] == me)

    def add(self, body: str) -> str:
        """See ``Thread``."""
        return self._at(self._api.send("POST", self._notes, {"body": body})["id"])

    def replace(self, comment: Comment, body: str) -> str:
        """See ``Thread``."""
        return self._at(self._api.send("PUT", f"{self._notes}/{comment.id}", {"body": body})["id"])

    def _at(self, note: int) -> str:
        return f"{self._address}#note_{note}"


def merge_request(environ: Mapping[str, str], number: int | None = None) -> MergeRequest:
    """The merge request that a pipeline runs for.

    Raises ``ForgeError`` where the environment does not say which, or holds no token.
    """
    found = number or environ.get("CI_MERGE_REQUEST_IID")
    project = environ.get("CI_MERGE_REQUEST_PROJECT_ID") or environ.get("CI_PROJECT_ID")
    if not found or not project:
        raise ForgeError(
            "GitLab: CI_MERGE_REQUEST_IID and CI_PROJECT_ID are not set; run this in a pipeline of a merge "
            "request, or name it with --number"
        )
    token = environ.get("LLENERGY_GITLAB_TOKEN")
    if not token:
        raise ForgeError(
            "GitLab: LLENERGY_GITLAB_TOKEN is not set; make a project access token with the scope api (a "
            "job's own token may not write notes) and keep it as a masked variable of the project"
        )
    api = Api(environ.get("CI_API_V4_URL", "https://gitlab.com/api/v4"), {"PRIVATE-TOKEN": token}, "GitLab")
    address = environ.get("CI_MERGE_REQUEST_PROJECT_URL", environ.get("CI_PROJECT_URL", ""))
    return MergeRequest(api, project, int(found), f"{address}/-/merge_requests/{found}")
