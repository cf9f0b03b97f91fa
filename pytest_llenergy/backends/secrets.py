# SPDX-License-Identifier: Apache-2.0
"""Credentials, which no record contains: names of options that are refused, and keys in what others print."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

#: Stands for a credential.
HIDDEN = "***"

#: Environment variables with keys that servers and hubs get, and may print.
KEYS = ("HF_TOKEN", "OPENAI_API_KEY")

#: Shorter values are no keys, and would hide ordinary words.
SHORTEST_KEY = 8

#: Keys in commands of servers of this process, and those that it was given by name, however short.
_remembered: set[str] = set()
_given: set[str] = set()

#: Names of credentials. Models have tokens of their own, such as ``eos_token``.
_NAME = re.compile(
    r"(?i:(.*[_.-])?(api|access|private|secret)[_-]?key|(.*[_.-])?(password|passphrase|secret|credentials?)"
    r"|(.*[_.-])?(access|auth|hf|hub|bearer)[_-]?token|token)"
)


def is_secret(name: str) -> bool:
    """Whether an option or a member of this name is a credential."""
    return _NAME.fullmatch(name) is not None


def find_secret(value: object) -> str | None:
    """Return the name of a credential among the members of a value; None if it has none."""
    if isinstance(value, Mapping):
        named = next((str(name) for name in value if is_secret(str(name))), None)
        return named or find_secret(list(value.values()))
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := find_secret(each)) is not None), None)
    return None


def remember_key(key: str) -> None:
    """Remember a key that servers of this process get."""
    _given.add(key)


def remember_keys(command: Sequence[str]) -> None:
    """Remember the keys in a server's command, its environment and nested commands included."""
    words = [part for word in command for part in re.split(r"[\s'\"]+", word)]
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if is_secret(name.lstrip("-")) and (equals or word.startswith("-")):
            _remembered.add(value or following)


def hide_keys(text: str) -> str:
    """Replace the keys of the environment, and the remembered ones, in a text from a server."""
    found = [key for key in (*map(os.environ.get, KEYS), *_remembered) if key and len(key) >= SHORTEST_KEY]
    for key in sorted((*found, *_given), key=len, reverse=True):
        text = text.replace(key, HIDDEN)
    return text
