# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests are scheduled token by token, over a paged cache."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.backends.transformers.options import LoadOptions
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.timeline import RequestTimeline

#: Tokens of one page of the cache: transformers' own default.
PAGE_TOKENS = 256

#: Prompt tokens of one step where more are waiting; transformers takes 8192 and memory to match.
MAX_STEP_TOKENS = 2048

#: What is set otherwise than transformers would, for the record. Shared blocks are a prefix cache, and
#: batches that are prepared while another runs have their stamps a step late.
SETTINGS: dict[str, str | int | bool] = {
    "page_size": PAGE_TOKENS,
    "allow_block_sharing": False,
    "use_async_batching": False,
    "auto_switch_to_flash": False,
    "scheduler": "fifo",
    "safety_margin": "0.0",
}

#: Where a size is worked out for each batch, how.
SIZE_RULES = {
    "num_blocks": f"for prompt + max_new_tokens of every request, {PAGE_TOKENS} tokens each",
    "max_batch_tokens": f"prompt tokens of the batch, at most {MAX_STEP_TOKENS}",
}


def describe_settings(num_blocks: int | None, max_batch_tokens: int | None) -> dict[str, str | int | bool]:
    """The engine's options as they go into records."""
    return {
        **SETTINGS,
        "num_blocks": num_blocks or SIZE_RULES["num_blocks"],
        "max_batch_tokens": max_batch_tokens or SIZE_RULES["max_batch_tokens"],
        "kv_cache": "paged",
    }


def count_pages(lengths: Iterable[int], max_new_tokens: int) -> int:
    """Pages that hold all requests at once, whatever their order."""
    return sum(math.ceil((length + max_new_tokens) / PAGE_TOKENS) for length in lengths)


def step_token_budget(lengths: list[int]) -> int:
    """Room in a step for the whole prefill if it is small, and always for one token of each request."""
    return max(len(lengths), min(sum(lengths), MAX_STEP_TOKENS))


def perf_counter_is_monotonic() -> bool:
    """Whether the engine's stamps are of the clock that everything else here is told in."""
    clocks = (time.get_clock_info("perf_counter"), time.get_clock_info("monotonic"))
    return clocks[0].implementation == clocks[1].implementation


class ContinuousBatcher:
    """A cache of the right size for one batch, and the thread that works on it while a round runs.

    Raises ``BackendError`` when a request is too long for the cache.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        inputs: list[list[int]],
        options: LoadOptions,
    ) -> None:
        from transformers import ContinuousBatchingConfig

        num_blocks, max_batch_tokens = options.num_blocks, options.max_batch_tokens
        lengths = [len(ids) for ids in inputs]
        longest = count_pages([max(lengths)], config.max_new_tokens)
        if num_blocks is not None and num_blocks < longest:
            raise BackendError(
                f"transformers: num_blocks is {num_blocks} and the longest request needs {longest}, of "
                f"{PAGE_TOKENS} tokens each"
            )
        self._model = model
        self._inputs = inputs
        # Its own way to say that no token ends a sequence.
        config.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
        self._config = config
        self._sizes = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=num_blocks or count_pages(lengths, config.max_new_tokens),
            max_batch_tokens=max_batch_tokens or step_token_budget(lengths),
            max_requests_per_batch=len(inputs),
            allow_block_sharing=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
            scheduler_type="fifo",
            # Else the last requests would wait until a part of the cache is free again.
            safety_margin=0.0,
        )
        self._manager: Any = None
        try:
            # Allocates the cache and, on a GPU, captures graphs.
            self._start()
        except (MemoryError, ValueError) as error:
            raise BackendError(
                f"transformers: continuous batching cannot have its cache ({error}); give fewer prompts, or "
                "num_blocks and max_batch_tokens"
            ) from error
        self.end()

    def generate(self) -> list[Any]:
        """All requests, in their order. Starts the thread if none runs; ``end`` ends it."""
        if self._manager is None:
            self._start()
        manager = self._manager
        ids = manager.add_requests(
            inputs=self._inputs, max_new_tokens=self._config.max_new_tokens, record_timestamps=True
        )
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                self.end()
                raise BackendError(f"transformers: continuous batching has failed: {result.error}")
            if result is not None and result.is_finished():
                done[result.request_id] = result
            if result is None and not manager.is_running():
                self.end()
                raise BackendError("transformers: the thread of continuous batching has ended early")
        return [done[each] for each in ids]

    def end(self) -> None:
        """End the thread; the cache is kept for the next round."""
        if self._manager is not None:
            self._manager.stop(block=True, keep_for_next_session=True)
            self._manager = None

    def close(self) -> None:
        """End the thread and free the cache."""
        self.end()
        self._model.destroy_cached_continuous_batching_manager()

    def _start(self) -> None:
        # The one that was kept, once there is one.
        manager = self._model.init_continuous_batching(
            generation_config=self._config, continuous_batching_config=self._sizes
        )
        if not manager.warmed_up:
            manager.warmup()
        manager.start()
        self._manager = manager


@dataclass
class ContinuousJob:
    """A batch for the engine, told all at once."""

    engine: ContinuousBatcher
    tokenizer: Any

    def run(self) -> list[Any]:
        return self.engine.generate()

    def result(self, outcome: list[Any]) -> Generation:
        # Here rather than within the window: the thread takes up to 100 ms to see that it is to end.
        self.engine.end()
        token_ids = [[int(token) for token in each.generated_tokens] for each in outcome]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(
            texts=texts, token_ids=token_ids, requests=[request_timeline(each) for each in outcome]
        )


def request_timeline(output: Any) -> RequestTimeline:
    """One request as transformers tells it (``GenerationOutput``), on CLOCK_MONOTONIC.

    Its times are seconds of ``time.perf_counter``. Without stamps where that is another clock, or where a
    request was begun anew and has lost some.
    """
    count = len(output.generated_tokens)
    stamps = output.timestamps or ()
    told = perf_counter_is_monotonic() and len(stamps) >= count > 0
    token_ns = tuple(round(stamp * 1e9) for stamp in stamps[:count]) if told else ()
    return RequestTimeline(
        input_tokens=len(output.prompt_ids),
        output_tokens=count,
        start_ns=round(output.created_time * 1e9) if told else None,
        first_token_ns=token_ns[0] if told else None,
        last_token_ns=token_ns[-1] if told else None,
        token_ns=token_ns,
    )
