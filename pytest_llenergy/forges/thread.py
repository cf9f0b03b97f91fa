# SPDX-License-Identifier: Apache-2.0
"""The comments of a pull request, and the one among them that is replaced from run to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol


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
