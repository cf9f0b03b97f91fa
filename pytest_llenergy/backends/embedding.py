# SPDX-License-Identifier: Apache-2.0
"""Turning texts into vectors: how, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from pytest_llenergy.backends.params import Params
from pytest_llenergy.model.timeline import RequestTimeline


class EmbeddingParams(Params, frozen=True):
    """How to embed; recorded whole.

    ``pooling`` makes one vector of those of a text's tokens: their ``mean``, that of the first (``cls``) or
    of the ``last`` token. Padding is no token. ``normalize`` scales each vector to length 1.
    """

    task: ClassVar[str] = "embed"

    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = True


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """What ``embed`` returns: one vector a text, in the order of the texts.

    ``requests`` holds the input tokens; there are no output tokens.
    """

    vectors: list[list[float]]
    requests: list[RequestTimeline]

    @property
    def dimension(self) -> int:
        """How long the vectors are."""
        return len(self.vectors[0])

    @staticmethod
    def merge(parts: Sequence[Embedding]) -> Embedding:
        """Join what the ranks made of consecutive parts of a batch."""
        return Embedding(
            vectors=[vector for part in parts for vector in part.vectors],
            requests=[request for part in parts for request in part.requests],
        )
