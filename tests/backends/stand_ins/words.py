# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins say: tokens that depend on the whole prompt and on the seed, and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence


def continued(prompt: Sequence[int], count: int, ends: Collection[int], seed: int = 0) -> list[int]:
    """At most ``count`` tokens of the byte tokenizer, up to and including the first that ends a sequence."""
    made: list[int] = []
    while len(made) < count:
        digest = hashlib.sha256(repr((list(prompt), made, seed)).encode()).digest()
        made.append(3 + digest[0])
        if made[-1] in ends:
            break
    return made
