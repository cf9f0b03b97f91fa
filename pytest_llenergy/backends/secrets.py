# SPDX-License-Identifier: Apache-2.0
"""API keys, which no record contains: they are replaced in whatever a server says."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Stands for a key.
HIDDEN = "***"

#: A key in a command, such as ``--api-key KEY`` or ``HF_TOKEN=KEY``; shorter values are ordinary words.
_NAMED = re.compile(r"(?i)(?:key|token|secret|password)[= ]+['\"]?([^\s'\"]{8,})")

_keys: set[str] = set()


def remember_key(key: str) -> None:
    """Remember a key that servers of this process get."""
    _keys.add(key)


def remember_keys(command: Sequence[str]) -> None:
    """Remember the keys in a server's command."""
    _keys.update(_NAMED.findall(" ".join(command)))


def hide_keys(text: str) -> str:
    """Replace the remembered keys in a text from a server."""
    for key in sorted(_keys, key=len, reverse=True):
        text = text.replace(key, HIDDEN)
    return text
