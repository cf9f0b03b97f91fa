# SPDX-License-Identifier: Apache-2.0
"""What failed in sessions, of either side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

#: Names of tests in one line.
MANY = 5


class Failed:
    """In how many sessions of one side each test has failed."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._sessions = 0

    def add(self, names: Iterable[str]) -> None:
        """The failures of a session."""
        self._counts.update(names)
        self._sessions += 1

    def line(self, side: str) -> str | None:
        """A note of them; ``None`` where nothing has failed."""
        if not self._counts:
            return None
        told = [f"{name} ({count} of {self._sessions})" for name, count in self._counts.items()]
        rest = f" and {len(told) - MANY} more" if len(told) > MANY else ""
        return f"{side}: failed in sessions: {', '.join(told[:MANY])}{rest}"
