# SPDX-License-Identifier: Apache-2.0
"""The work of both sides."""

from __future__ import annotations

from pathlib import Path

#: Greedy decoding of one sequence to its full length.
PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree."
NEW_TOKENS = 32

#: Measured generations per side, and warm-up generations before them.
REPEATS, WARM_UP = 6, 1

#: Prompts whose answers are compared: prose, questions, code, numbers, other scripts, and very short ones.
PROMPTS = (
    *(
        line
        for line in (Path(__file__).parents[2] / "prompts.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ),
    PROMPT,
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 5, 8, 13, 21,",
    "Die Katze sitzt auf der Fensterbank und schaut in den verschneiten Garten.",
    "Ω",
)
