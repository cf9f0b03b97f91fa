# SPDX-License-Identifier: Apache-2.0
"""The work that both tools are given. Standard library only: two environments import this file."""

from __future__ import annotations

#: 32 tokens of SmolLM2's tokenizer, which the run checks in the record. A story that is to be continued:
#: greedy decoding goes on beyond the new tokens of itself, so the work does not hang on ignoring an end.
PROMPT = (
    "Once upon a time there was a lighthouse keeper who had not spoken to anyone for eleven years. "
    "One windless night in March, a small grey boat came to"
)
PROMPT_TOKENS = 32
NEW_TOKENS = 32
BATCH_SIZE = 1
DTYPE = "float32"
SEED = 0
