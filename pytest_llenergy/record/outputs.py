# SPDX-License-Identifier: Apache-2.0
"""Digests of prompts, and of the outputs of greedy work, to tell whether two runs produced the same tokens.

Token ids could be turned back into text. The digests are therefore keyed by the prompts, which reports do not
contain: without them nobody can try what text gives a digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

#: Most tokens of a record that have a digest. Each takes two characters.
MAX_TOKENS = 4096

#: Bytes of a digest for each token. One token in 256 after the first that differs looks equal.
DIGEST_BYTES = 1


def digest_prompts(prompts: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over the prompts as a JSON list.

    Prompts themselves stay out of reports, since they may be private.
    """
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


def digest_outputs(prompts: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return for each request a digest of each output token and all before it (``Record.outputs``).

    Args:
        prompts: The prompts of the requests, without which nobody can find the tokens from the digests.
        token_ids: Their output tokens. Of many or long requests, only the first tokens count.
    """
    key = hashlib.blake2b(json.dumps(list(prompts)).encode(), person=b"llenergy-outputs").digest()
    kept = token_ids[:MAX_TOKENS]
    each = max(1, MAX_TOKENS // max(1, len(kept)))
    return [_digest(key, row[:each]) for row in kept]


def _digest(key: bytes, tokens: Sequence[int]) -> str:
    digest, text = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES), ""
    for token in tokens:
        digest.update(token.to_bytes(8, "little"))
        text += digest.hexdigest()
    return text


def agreement_of(base: Sequence[str], head: Sequence[str]) -> float:
    """Return the share of tokens that are equal together with all before them, from 0 to 1."""
    width = 2 * DIGEST_BYTES
    equal = total = 0
    for index in range(max(len(base), len(head))):
        one = base[index] if index < len(base) else ""
        other = head[index] if index < len(head) else ""
        total += max(len(one), len(other))
        same = 0
        while one[same : same + width] and one[same : same + width] == other[same : same + width]:
            same += width
        equal += same
    return equal / total if total else 1.0
