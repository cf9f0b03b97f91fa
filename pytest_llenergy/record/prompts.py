# SPDX-License-Identifier: Apache-2.0
"""Prompts: a text file with one per line, or the small set that ships with the plugin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex, overload

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.files import read_limited

#: Written for this package and dedicated to the public domain (CC0-1.0). From 3 to about 90 words.
DEFAULT_PROMPTS = (
    "Name three rivers.",
    "Explain in two sentences why a kettle uses more energy than a lamp.",
    "Write a short, friendly note that tells a neighbour that their parcel was left with you, and when "
    "you are at home to hand it over.",
    "A train leaves at 09:40 and arrives at 13:05 after two stops of six minutes each. How long was it "
    "moving? Show each step of the calculation, then give the answer in hours and minutes.",
    "Translate into French: the meeting was moved to Thursday.",
    "Summarise for a new colleague: The service reads messages from a queue, checks each against a set "
    "of rules, and stores those that pass. Messages that fail are kept for a week in a second queue, so "
    "that someone can look at them and send them again. Twice a day a job counts both queues and posts "
    "the numbers to a channel. When the second queue grows by more than a hundred in an hour, the person "
    "on duty is called, because that has nearly always meant that a sender changed its format.",
    "What is a monotonic clock?",
    "List five checks to make before publishing a benchmark, each in at most ten words.",
)


class Prompts(tuple[str, ...]):
    """Prompts in order. A slice beyond the last prompt is an error, not a smaller batch."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> str: ...
    @overload
    def __getitem__(self, index: slice, /) -> Prompts: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> str | Prompts:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        if index.stop is not None and index.stop > len(self):
            raise LLEnergyError(
                f"prompts[:{index.stop}]: the set has {len(self)} prompts; name a larger set with the "
                "ini key energy_prompts, or override the prompts fixture"
            )
        return Prompts(super().__getitem__(index))


def load_prompts(path: Path) -> Prompts:
    """Read one prompt per line, in UTF-8, skipping blank lines and lines that start with ``#``.

    Raises:
        LLEnergyError: If the file cannot be read or holds no prompt.
    """
    try:
        lines = read_limited(path).decode().splitlines()
    except OSError as error:
        raise LLEnergyError(f"the prompts file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LLEnergyError(f"the prompts file {path} is not UTF-8 text ({error}); convert it") from None
    prompts = Prompts(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not prompts:
        raise LLEnergyError(f"the prompts file {path} holds no prompt; write one per line")
    return prompts


def digest_prompts(prompts: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over the prompts as a JSON list.

    Prompts themselves stay out of reports, since they may be private.
    """
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


def default_prompts() -> Prompts:
    """Return the set that ships with the plugin."""
    return Prompts(DEFAULT_PROMPTS)
