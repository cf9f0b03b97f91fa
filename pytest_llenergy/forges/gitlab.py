# SPDX-License-Identifier: Apache-2.0
"""Notes of a merge request on GitLab, with what a pipeline has in its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from pytest_llenergy.errors import ForgeError
from pytest_llenergy.forges.http import Api
from pytest_llenergy.forges.thread import Comment


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
