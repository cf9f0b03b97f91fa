# SPDX-License-Identifier: Apache-2.0
"""Keep comments with comparisons on a GitHub pull request or a GitLab merge request.

The first line of a comment is a marker by which the next run finds and replaces the comment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pytest_llenergy.errors import ForgeError, OutdatedRunError
from pytest_llenergy.record.text import one_line

#: One request to the forge.
REQUEST_TIMEOUT_S = 30.0

#: Errors of data that is unlike what is expected, and of a file that is not a readable event.
UNLIKE = (TypeError, KeyError, AttributeError)
EVENT_ERRORS = (OSError, ValueError, RecursionError, *UNLIKE)

#: What to check if the forge does not accept the token.
TOKEN_ADVICE = {
    "GitHub": "the token in GITHUB_TOKEN needs the permission pull-requests: write",
    "GitLab": "the token in LLENERGY_GITLAB_TOKEN needs the scope api",
}

#: Seconds before each further attempt of a request that a limit or a busy server refused, and the most that a
#: server may ask for.
RETRY_AFTER_S, MOST_WAIT_S = (1.0, 5.0), 60.0

#: HTTP statuses of a refusal, of a limit, and of a server or proxy that is not available at the moment.
FORBIDDEN, TOO_MANY, BUSY = 403, 429, (500, 502, 503, 504)


class _RefuseRedirects(HTTPRedirectHandler):
    """Fail on a redirect, which would carry the token to another address."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Forge(NamedTuple):
    """The REST API of GitHub or GitLab for one pull or merge request.

    Attributes:
        headers: They hold the token.
        comments: Path of the comments of the request.
        own: Path below which each comment is replaced by the method ``replace``.
    """

    name: str
    url: str
    headers: dict[str, str]
    comments: str = ""
    own: str = ""
    replace: str = ""

    def request(self, method: str, path: str, comment: str | None = None) -> Any:
        """Send the text of a comment, or nothing, and decode the answer, or raise ``ForgeError``."""
        url = f"{self.url.rstrip('/')}/{path}"
        data = None if comment is None else json.dumps({"body": comment}).encode()
        headers = {"User-Agent": "pytest-llenergy", "Content-Type": "application/json", **self.headers}
        for wait_s in (*RETRY_AFTER_S, None):
            try:
                request = Request(url, data, headers, method=method)
                with build_opener(_RefuseRedirects).open(request, timeout=REQUEST_TIMEOUT_S) as response:
                    answer = response.read()
                break
            except HTTPError as error:
                limited = _is_rate_limit(error)
                # A comment may have been added although the answer was lost.
                if wait_s is None or not (limited or (error.code in BUSY and method != "POST")):
                    raise ForgeError(self._explain(error, f"{method} {url}", limited=limited)) from None
                asked = error.headers.get("Retry-After", "")
                time.sleep(min(float(asked), MOST_WAIT_S) if asked.isdecimal() else wait_s)
            except (OSError, HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                raise ForgeError(f"{self.name} cannot be reached at {url} ({reason})") from None
        with suppress(ValueError):
            if isinstance(found := json.loads(answer), dict | list):
                return found
        raise ForgeError(f"{url} did not answer as {self.name} does, but as a proxy may: {answer[:80]!r}")

    def _explain(self, error: HTTPError, request: str, *, limited: bool) -> str:
        message = str(error.reason)
        with suppress(OSError, ValueError, AttributeError):
            message = json.load(error).get("message") or message
        advice = ""
        if limited:
            advice = "; the token has reached a rate limit, so run the job again later"
        elif error.code in BUSY:
            advice = f"; {self.name} or a proxy is not available, so run the job again"
        elif error.code in (401, FORBIDDEN):
            advice = f"; {TOKEN_ADVICE[self.name]}"
        return f"{self.name} refused {request}: {error.code} {one_line(str(message))[:300]}{advice}"

    def list(self, path: str) -> Iterator[Any]:
        """Yield the entries of every page, 10,000 at most, or raise ``ForgeError``."""
        for page in range(1, 101):
            entries = self.request("GET", f"{path}per_page=100&page={page}")
            if not isinstance(entries, list):
                raise ForgeError(f"{self.url} did not answer as {self.name} does, but as a proxy may")
            yield from entries
            if not entries:
                return


def _is_rate_limit(error: HTTPError) -> bool:
    """Whether a request was refused as one of too many: GitHub answers 403 then, too."""
    exhausted = error.headers.get("X-RateLimit-Remaining") == "0" or "Retry-After" in error.headers
    return error.code == TOO_MANY or (error.code == FORBIDDEN and exhausted)


@dataclass(frozen=True)
class CiRun:
    """The CI run that measured: its address and that of its artifacts. Fields are empty outside CI."""

    url: str = ""
    artifacts_url: str = ""
    workflow: str = ""
    job: str = ""
    commit: str = ""


def find_run(environ: Mapping[str, str], *, other_job: bool = False) -> CiRun:
    """Describe the run of this job, or of the ``other_job`` or workflow that measured."""
    if "GITLAB_CI" in environ:
        commit = environ.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA") or environ.get("CI_COMMIT_SHA", "")
        url = environ.get("CI_PIPELINE_URL" if other_job else "CI_JOB_URL", "")
        artifacts_url = f"{url}/artifacts/browse" if url and not other_job else ""
        return CiRun(url, artifacts_url, job=environ.get("CI_JOB_NAME", ""), commit=commit)
    try:
        event = _load_event(environ)
        other, pull = event.get("workflow_run"), event.get("pull_request")
        if other is not None:
            url = str(other["html_url"])
            return CiRun(url, f"{url}#artifacts", str(other["name"]), commit=str(other["head_sha"]))
        commit = str(pull["head"]["sha"]) if pull is not None else environ["GITHUB_SHA"]
        server = environ.get("GITHUB_SERVER_URL", "https://github.com")
        url = f"{server}/{environ['GITHUB_REPOSITORY']}/actions/runs/{environ['GITHUB_RUN_ID']}"
    except EVENT_ERRORS:
        return CiRun()
    workflow, job = environ.get("GITHUB_WORKFLOW", ""), environ.get("GITHUB_JOB", "")
    return CiRun(url, f"{url}#artifacts", workflow, job, commit)


def post_comments(
    environ: Mapping[str, str],
    bodies: Sequence[str],
    number: int | None = None,
    outdated: Callable[[str], str | None] = lambda _: None,
) -> list[tuple[str, str]]:
    """Add comments, or replace this user's comments that have the same first lines; or raise ``ForgeError``.

    Args:
        environ: Variables of the CI job, which hold the token and name the request.
        bodies: Texts of the comments.
        number: Number of the request, instead of the one in the variables.
        outdated: Returns the text that replaces another comment of this user, from its first line; None keeps
            the comment.

    Returns:
        For each comment ``added`` or ``replaced``, and its address.
    """
    forge, number = (_find_merge_request if "GITLAB_CI" in environ else _find_pull_request)(environ, number)
    try:
        existing = _list_own_comments(forge)
        wanted = {body.partition("\n")[0]: body for body in bodies}
        for marker in existing.keys() - wanted.keys():
            if (text := outdated(marker)) is not None:
                wanted[marker] = text
        done = []
        project = environ.get("CI_MERGE_REQUEST_PROJECT_URL") or environ.get("CI_PROJECT_URL")
        for marker, body in wanted.items():
            path = f"{forge.own}/{existing[marker]}" if marker in existing else forge.comments
            answer = forge.request(forge.replace if marker in existing else "POST", path, body)
            url = answer.get("html_url") or f"{project}/-/merge_requests/{number}#note_{answer['id']}"
            done.append(("replaced" if marker in existing else "added", url))
        return done
    except UNLIKE as error:
        raise ForgeError(
            f"{forge.url} did not answer as {forge.name} does, but as a proxy may ({error!r})"
        ) from None


def _list_own_comments(forge: Forge) -> dict[str, Any]:
    """Return the id of each comment of this user by its first line."""
    author = None
    with suppress(ForgeError):  # the token of a workflow belongs to a bot and may not query its user
        author = forge.request("GET", "user")["id"]
    existing: dict[str, Any] = {}
    for comment in forge.list(f"{forge.comments}?"):
        user = comment.get("user") or comment.get("author") or {}
        if user.get("type") == "Bot" if author is None else user.get("id") == author:
            existing.setdefault((comment["body"] or "").partition("\n")[0].strip(), comment["id"])
    return existing


def _variable(environ: Mapping[str, str], name: str, advice: str) -> str:
    if not environ.get(name):
        raise ForgeError(f"{name} is not set; {advice}")
    return environ[name]


def _find_merge_request(environ: Mapping[str, str], number: int | None) -> tuple[Forge, int]:
    advice = "run this in a pipeline of a merge request, name it with --number=N, or print with --dry-run"
    number = number or int(_variable(environ, "CI_MERGE_REQUEST_IID", advice))
    advice = "run this in a job of GitLab CI, or print the comment with --dry-run"
    project = environ.get("CI_MERGE_REQUEST_PROJECT_ID") or _variable(environ, "CI_PROJECT_ID", advice)
    advice = "set it to a project access token with the scope api; a job token may not write notes"
    headers = {"PRIVATE-TOKEN": _variable(environ, "LLENERGY_GITLAB_TOKEN", advice)}
    url = environ.get("CI_API_V4_URL", "https://gitlab.com/api/v4")
    notes = f"projects/{quote(project, safe='')}/merge_requests/{number}/notes"
    return Forge("GitLab", url, headers, notes, notes, "PUT"), number


def _find_pull_request(environ: Mapping[str, str], number: int | None) -> tuple[Forge, int]:
    advice = "run this in a job of GitHub Actions or GitLab CI, or print the comment with --dry-run"
    path = f"repos/{_variable(environ, 'GITHUB_REPOSITORY', advice)}"
    advice = (
        "set it to ${{ github.token }} under env: of the step, in a job with the permission "
        "pull-requests: write"
    )
    headers = {"Authorization": f"Bearer {_variable(environ, 'GITHUB_TOKEN', advice)}"}
    url = environ.get("GITHUB_API_URL", "https://api.github.com")
    number = number or _find_number(Forge("GitHub", url, headers), path, environ)
    comments = f"{path}/issues/{number}/comments"
    return Forge("GitHub", url, headers, comments, f"{path}/issues/comments", "PATCH"), number


def _load_event(environ: Mapping[str, str]) -> Any:
    path = environ.get("GITHUB_EVENT_PATH")
    return json.loads(Path(path).read_bytes()) if path else {}


def _find_number(forge: Forge, repository: str, environ: Mapping[str, str]) -> int:
    """Return the number of the event's pull request.

    A ``workflow_run`` does not name the pull request of a fork, so this searches for the open one whose
    last commit was tested. Artifacts of the tested run might name it, but they are untrusted.
    """
    try:
        event = _load_event(environ)
        if event.get("pull_request") is not None:
            return int(event["pull_request"]["number"])
        run = event.get("workflow_run")
        if run is None:
            name = environ.get("GITHUB_EVENT_NAME", "of this workflow")
            raise ForgeError(f"GitHub: the event {name} has no pull request; name it with --number")
        commit, fork = run["head_sha"], run["head_repository"]
        head = fork and quote(f"{fork['owner']['login']}:{run['head_branch']}", safe="")
    except EVENT_ERRORS as error:
        path = environ.get("GITHUB_EVENT_PATH")
        raise ForgeError(f"GitHub: cannot read the event in {path} ({error!r})") from None
    for pull in forge.list(f"{repository}/pulls?state=open&head={head}&") if head else ():
        if pull["head"]["sha"] == commit:
            return int(pull["number"])
    raise OutdatedRunError(
        f"GitHub: no open pull request has {commit} as its last commit; it was pushed to or closed since"
    )
