# SPDX-License-Identifier: Apache-2.0
"""One static batch, step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.generation import Generation
from pytest_llenergy.model.timeline import RequestTimeline


@dataclass(frozen=True)
class Steps:
    """The tokens of each step, one a row, and when they were there."""

    tokens: list[list[int]]
    times_ns: list[int]


@dataclass
class OnnxRuntimeJob:
    """A right-padded batch; ``lengths`` are the prompts' token counts without padding.

    As in any static batch, a row that has ended is computed on until the last has; what comes after its end
    is not output.
    """

    genai: Any
    model: Any
    tokenizer: Any
    inputs: Any
    lengths: list[int]
    search: dict[str, Any]
    steps: int
    ends: frozenset[int]

    def generator(self) -> Any:
        """A new one, which knows nothing of earlier runs."""
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(**self.search)
        return self.genai.Generator(self.model, params)

    def run(self) -> Steps:
        generator = self.generator()
        generator.append_tokens(self.inputs)
        tokens: list[list[int]] = []
        times_ns: list[int] = []
        going = list(range(len(self.lengths)))
        for _ in range(self.steps):
            generator.generate_next_token()
            step: list[int] = generator.get_next_tokens().tolist()
            times_ns.append(time.monotonic_ns())
            tokens.append(step)
            if self.ends:
                going = [row for row in going if step[row] not in self.ends]
                if not going:
                    break
        return Steps(tokens, times_ns)

    def result(self, outcome: Steps) -> Generation:
        rows = zip(*outcome.tokens, strict=True)
        token_ids = [self._produced(list(row)) for row in rows]
        requests = [
            RequestTimeline(
                input_tokens=length,
                output_tokens=len(ids),
                first_token_ns=outcome.times_ns[0],
                last_token_ns=outcome.times_ns[len(ids) - 1],
                token_ns=tuple(outcome.times_ns[: len(ids)]),
            )
            for length, ids in zip(self.lengths, token_ids, strict=True)
        ]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        return Generation(texts=texts, token_ids=token_ids, requests=requests)

    def _produced(self, row: list[int]) -> list[int]:
        """A row up to and including the first token that ended it."""
        for index, token in enumerate(row):
            if token in self.ends:
                return row[: index + 1]
        return row
