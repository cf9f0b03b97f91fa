# SPDX-License-Identifier: Apache-2.0
"""Whether prompts that were seen before cost far less than new ones, as with a cache of most of a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pytest_llenergy.conformance.engine import Engine

#: Engines that cache do so by blocks, of which a prompt of 512 random letters has several (measured: vLLM on
#: the CPU caches none of a prompt below 128 tokens).
FIRST_LENGTH = 512
SHORT_LENGTH = 8

#: How often each kind is timed; the fastest counts, which noise can only make slower. What takes longer than
#: this (seconds) is disturbed less.
REPEATS, REPEATS_OF_SLOW, SLOW_S = 6, 3, 0.2

#: A long prompt must take this many times as long as a short one, or nothing could be told.
TELLS = 4.0

#: The least part of a new prompt's own time that one seen before takes. Without a cache it takes all of it;
#: with one it took an eighth to a fiftieth (measured: vLLM, OpenVINO, llama.cpp on a CPU). A cache
#: that spares less than two thirds, such as one of half of each prompt, is not found.
LEAST_SHARE = 1 / 3


@dataclass(frozen=True)
class Prefill:
    """The fastest of each kind of prompt (seconds), and the length of the long ones (characters)."""

    short_s: float
    new_s: float
    seen_s: float
    length: int

    @property
    def wrong(self) -> str | None:
        """What is wrong, if anything."""
        if self.seen_s - self.short_s >= LEAST_SHARE * (self.new_s - self.short_s):
            return None
        seen, new, short = (f"{each * 1e3:.3g} ms" for each in (self.seen_s, self.new_s, self.short_s))
        return (
            f"a prompt of {self.length} characters that was seen before takes {seen}, a new one {new}, and "
            f"one of {SHORT_LENGTH} characters {short}: "
            "prefixes are cached, and all rounds but the first would be nearly free; switch that off in "
            "load(), and say so in prefix_cache of the row"
        )


def compared(engine: Engine, longest: int) -> Prefill | None:
    """New and repeated prompts in turn; ``None`` where none up to ``longest`` takes notably long."""
    numbers = random.Random(0)
    engine.duration_s(_text(numbers, SHORT_LENGTH))
    short_s = min(engine.duration_s(_text(numbers, SHORT_LENGTH)) for _ in range(REPEATS))
    length = min(FIRST_LENGTH, longest)
    while (long_s := min(engine.duration_s(_text(numbers, length)) for _ in range(2))) < TELLS * short_s:
        if length == longest:
            return None
        length = min(2 * length, longest)
    seen = _text(numbers, length)
    engine.duration_s(seen)
    new_s, seen_s = [], []
    for _ in range(REPEATS_OF_SLOW if long_s > SLOW_S else REPEATS):
        new_s.append(engine.duration_s(_text(numbers, length)))
        seen_s.append(engine.duration_s(seen))
    return Prefill(short_s, min(new_s), min(seen_s), length)


def _text(numbers: random.Random, length: int) -> str:
    """Words that no other text begins with."""
    return "".join(numbers.choice("abcdefghij klmnopqrstuvwxyz ") for _ in range(length))
