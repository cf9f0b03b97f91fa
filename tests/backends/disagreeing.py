# SPDX-License-Identifier: Apache-2.0
"""A backend whose ranks share one model and return different results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline


class Job:
    """A job that returns the same tokens for every prompt."""

    def __init__(self, n: int, ids: list[int]) -> None:
        self._n, self._ids = n, ids

    def run(self) -> None:
        """Do nothing."""

    def result(self, _outcome: None) -> Generation:
        requests = [RequestTimeline(input_tokens=1, output_tokens=len(self._ids)) for _ in range(self._n)]
        return Generation(texts=["?"] * self._n, token_ids=[self._ids] * self._n, requests=requests)


class Disagreeing:
    """A backend whose option ``ids`` gives the tokens of each rank: commas between tokens, semicolons between
    ranks.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        self._ids = [int(token) for token in options["ids"].split(";")[context.rank].split(",")]
        return BackendInfo(name="disagreeing", version="1", model=model.label)

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        return Job(len(prompts), self._ids)

    def synchronize(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Nothing is held."""


SPEC = BackendSpec(
    name="disagreeing",
    factory=f"{__name__}:Disagreeing",
    requires=(),
    install="",
    capabilities=Capabilities(data=True, tensor=True, options=("ids",)),
)
