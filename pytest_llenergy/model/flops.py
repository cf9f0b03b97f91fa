# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one iteration, as a rank tells them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

OF_A_FUNCTION = "only those of a backend are counted; a function can use torch.utils.flop_counter itself"


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that one iteration executes: a multiplication and an addition are two.

    ``count`` is ``None`` where they cannot be told, for the ``reason``; ``source`` says how they were
    counted. ``shared`` is true where ``count`` is that of all ranks that work on the same inputs, and false
    where it is the rank's own.
    """

    count: int | None
    source: str | None = None
    shared: bool = False
    reason: str | None = None

    @staticmethod
    def unknown(reason: str) -> Flops:
        """Where they cannot be told."""
        return Flops(count=None, reason=reason)


def joined(told: Sequence[Flops], together: int = 1) -> Flops:
    """Those of all ranks, of which each ``together`` consecutive ones work on the same inputs."""
    lacking = next((each for each in told if each.count is None), None)
    if lacking is not None:
        return lacking
    counts = [each.count or 0 for rank, each in enumerate(told) if not each.shared or rank % together == 0]
    sources = dict.fromkeys(each.source for each in told if each.source is not None)
    return Flops(count=sum(counts), source="; ".join(sources))
