# SPDX-License-Identifier: Apache-2.0
"""The small set of prompts that ships with the plugin."""

from __future__ import annotations

from typing import SupportsIndex, overload

from pytest_llenergy.errors import LLEnergyError

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
                f"prompts[:{index.stop}]: the set has {len(self)} prompts; define a fixture prompts "
                "that returns more"
            )
        return Prompts(super().__getitem__(index))
