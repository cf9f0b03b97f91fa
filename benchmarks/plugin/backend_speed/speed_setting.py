# SPDX-License-Identifier: Apache-2.0
"""The work of both sides."""

from __future__ import annotations

#: Greedy decoding of one sequence to its full length.
PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree."
NEW_TOKENS = 32

#: Measured generations per side, and warm-up generations before them.
REPEATS, WARM_UP = 6, 1
