# SPDX-License-Identifier: Apache-2.0
"""The work of both tools. Uses only the standard library, because two environments import this file."""

from __future__ import annotations

#: 32 tokens of SmolLM2's tokenizer, which the run checks in the record. The text invites a continuation:
#: greedy decoding does not stop within the new tokens, so the work does not depend on ignoring an end token.
PROMPT = (
    "Once upon a time there was a lighthouse keeper who had not spoken to anyone for eleven years. "
    "One windless night in March, a small grey boat came to"
)
PROMPT_TOKENS = 32
NEW_TOKENS = 32
BATCH_SIZE = 1
DTYPE = "float32"
SEED = 0
