# SPDX-License-Identifier: Apache-2.0
"""The name that was meant by one that is not known."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

#: Share of letters in common (difflib's ratio) from which a name is taken for a slip of another.
LIKE = 0.7


def did_you_mean(unknown: Iterable[str], known: Collection[str]) -> str:
    """A question with the known names that are closest to the unknown ones; empty where none is close."""
    close = [name for each in unknown for name in get_close_matches(each, known, n=1, cutoff=LIKE)]
    return f"did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""
