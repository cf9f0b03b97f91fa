# SPDX-License-Identifier: Apache-2.0
"""The work that both sides do."""

from __future__ import annotations

#: Greedy, one sequence, to its full length.
PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree."
NEW_TOKENS = 32

#: Generations that count on either side, and those before them that do not.
REPEATS, WARM_UP = 6, 1
