# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: transformers schedules requests token by token over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.batches import check_processed
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.backends.timeouts import BATCHER_POLL_S
from pytest_llenergy.backends.transformers.options import LoadOptions
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.timeline import RequestTimeline

#: Tokens per page of the cache: transformers' default.
PAGE_TOKENS = 256

#: Prompt tokens per step while more are waiting; transformers takes 8192, with memory to match.
MAX_STEP_TOKENS = 2048

#: Settings that differ from transformers' defaults. Shared blocks are a prefix cache, and batches prepared
#: while another runs have their timestamps a step late. With a margin the last requests would wait until part
#: of the cache is free again.
SETTINGS: dict[str, Any] = {
    "page_size": PAGE_TOKENS,
    "allow_block_sharing": False,
    "use_async_batching": False,
    "auto_switch_to_flash": False,
    "scheduler_type": "fifo",
    "safety_margin": 0.0,
}


def describe_settings(options: LoadOptions) -> dict[str, Primitive]:
    """Return the settings as they go into records."""
    sizes = {"num_blocks": options.num_blocks, "max_batch_tokens": options.max_batch_tokens}
    return {**SETTINGS, **{name: size or "what the batch needs" for name, size in sizes.items()}}


def count_pages(lengths: list[int], max_new_tokens: int) -> int:
    """Return the number of pages that hold all requests at once, in any order."""
    return sum(-(-(length + max_new_tokens) // PAGE_TOKENS) for length in lengths)


def step_token_budget(lengths: list[int]) -> int:
    """Return the tokens per step: the whole prefill if it is small, and at least one token per request."""
    return max(len(lengths), min(sum(lengths), MAX_STEP_TOKENS))


class ContinuousBatcher:
    """A cache sized for one batch, and the thread that works on it while a round runs.

    Raises ``BackendError`` if a request is too long for the cache.
    """

    def __init__(self, model: Any, config: Any, inputs: list[list[int]], options: LoadOptions) -> None:
        from transformers import ContinuousBatchingConfig

        lengths = [len(ids) for ids in inputs]
        longest = count_pages([max(lengths)], config.max_new_tokens)
        if options.num_blocks is not None and options.num_blocks < longest:
            # transformers would wait for ever.
            raise BackendError(
                f"transformers: num_blocks is {options.num_blocks}, but the longest request needs {longest} "
                f"blocks of {PAGE_TOKENS} tokens"
            )
        self._model = model
        self.inputs = inputs
        # transformers' value for: no token ends a sequence.
        config.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
        self._config = config
        self._sizes = ContinuousBatchingConfig(
            num_blocks=options.num_blocks or count_pages(lengths, config.max_new_tokens),
            max_batch_tokens=options.max_batch_tokens or step_token_budget(lengths),
            max_requests_per_batch=len(inputs),
            **SETTINGS,
        )
        self._manager: Any = None
        try:
            # Allocates the cache and, on a GPU, captures graphs.
            self._start()
        except (MemoryError, ValueError) as error:
            raise BackendError(f"transformers: continuous batching cannot allocate ({error})") from error
        self.stop()

    def generate(self) -> list[Any]:
        """Run all requests and return their outputs in order. Starts the thread; ``stop`` ends it."""
        if self._manager is None:
            self._start()
        manager = self._manager
        ids = manager.add_requests(
            inputs=self.inputs, max_new_tokens=self._config.max_new_tokens, record_timestamps=True
        )
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=BATCHER_POLL_S)
            if result is not None and result.error is not None:
                self.stop()
                raise BackendError(f"transformers: continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                done[result.request_id] = result
            if result is None and not manager.is_running():
                self.stop()
                raise BackendError("transformers: the thread of continuous batching ended early")
        return [done[each] for each in ids]

    def stop(self) -> None:
        """Stop the thread; keep the cache for the next round."""
        if self._manager is not None:
            self._manager.stop(block=True, keep_for_next_session=True)
            self._manager = None

    def close(self) -> None:
        """Stop the thread and free the cache."""
        self.stop()
        self._model.destroy_cached_continuous_batching_manager()

    def _start(self) -> None:
        # Returns the kept manager from the second round on.
        manager = self._model.init_continuous_batching(
            generation_config=self._config, continuous_batching_config=self._sizes
        )
        if not manager.warmed_up:
            manager.warmup()
        manager.start()
        self._manager = manager


@dataclass
class ContinuousJob:
    """A batch whose requests are all submitted at once."""

    batcher: ContinuousBatcher
    tokenizer: Any

    def run(self) -> list[Any]:
        return self.batcher.generate()

    def result(self, outcome: list[Any]) -> Generation:
        # Not in the window: the thread takes up to 100 ms to stop.
        self.batcher.stop()
        given = [len(ids) for ids in self.batcher.inputs]
        check_processed("transformers", given, [len(each.prompt_ids) for each in outcome])
        token_ids = [[int(token) for token in each.generated_tokens] for each in outcome]
        return Generation(
            texts=self.tokenizer.batch_decode(token_ids, skip_special_tokens=True),
            token_ids=token_ids,
            requests=[request_timeline(each) for each in outcome],
        )


def request_timeline(output: Any) -> RequestTimeline:
    """Convert an output of transformers (``GenerationOutput``).

    Its times are seconds of ``time.perf_counter``, which is CLOCK_MONOTONIC on Linux. A restarted request has
    lost some; the result then has none.
    """
    count = len(output.generated_tokens)
    stamps = output.timestamps or ()
    token_ns = tuple(round(stamp * 1e9) for stamp in stamps[:count]) if len(stamps) >= count > 0 else ()
    return RequestTimeline(
        input_tokens=len(output.prompt_ids),
        output_tokens=count,
        start_ns=round(output.created_time * 1e9) if token_ns else None,
        first_token_ns=token_ns[0] if token_ns else None,
        last_token_ns=token_ns[-1] if token_ns else None,
        token_ns=token_ns,
    )
