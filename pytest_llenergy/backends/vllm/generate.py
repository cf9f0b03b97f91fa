# SPDX-License-Identifier: Apache-2.0
"""One batch through the engine's own steps, with the time of each token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.generation import Generation
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.timeline import RequestTimeline

#: Of each step the time of its end (``CLOCK_MONOTONIC``), and of each request that it served the new tokens.
Steps = list[tuple[int, Any]]


@dataclass
class VllmJob:
    """Token ids of each prompt, given to the engine at once; ``sampling`` has the parameters of each.

    The loop is that of ``LLM.generate``, which steps the engine until nothing is left to do; here the
    outputs are those of each step and not only the last.
    """

    engine: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    sampling: Sequence[Any]

    def run(self) -> Steps:
        engine, steps = self.engine, []
        for number, (ids, params) in enumerate(zip(self.prompts, self.sampling, strict=True)):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            steps.append((time.monotonic_ns(), outputs))
        return steps

    def result(self, outcome: Steps) -> Generation:
        token_ids: list[list[int]] = [[] for _ in self.prompts]
        token_ns: list[list[int]] = [[] for _ in self.prompts]
        cached = 0
        for now_ns, outputs in outcome:
            for output in outputs:
                number, new = int(output.request_id), output.outputs[0].token_ids
                token_ids[number] += new
                token_ns[number] += [now_ns] * len(new)
                cached += output.num_cached_tokens or 0
        if cached:
            raise BackendError(
                f"vllm: took {cached} prompt tokens from its prefix cache, which was to be off; "
                "the round has not done the work"
            )
        requests = [
            RequestTimeline(
                input_tokens=len(prompt),
                output_tokens=len(ids),
                first_token_ns=stamps[0],
                last_token_ns=stamps[-1],
                token_ns=tuple(stamps),
            )
            for prompt, ids, stamps in zip(self.prompts, token_ids, token_ns, strict=True)
        ]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)
