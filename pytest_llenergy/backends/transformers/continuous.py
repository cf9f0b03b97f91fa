# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: transformers schedules requests token by token over a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pytest_llenergy.backends.batches import check_processed, stamped_result
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.backends.timeouts import BATCHER_POLL_S
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive

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


def describe_settings(options: Mapping[str, Any]) -> dict[str, Primitive]:
    """Return the settings as they go into records."""
    sizes = ("num_blocks", "max_batch_tokens")
    return {**SETTINGS, **{name: options.get(name) or "what the batch needs" for name in sizes}}


class ContinuousBatcher:
    """A cache sized for one batch, and the thread that works on it while a round runs.

    Raises ``BackendError`` if a request is too long for the cache.
    """

    def __init__(self, model: Any, config: Any, inputs: list[list[int]], options: Mapping[str, Any]) -> None:
        from transformers import ContinuousBatchingConfig

        pages = [-(-(len(ids) + config.max_new_tokens) // PAGE_TOKENS) for ids in inputs]
        num_blocks = options.get("num_blocks") or sum(pages)
        if num_blocks < max(pages):
            # transformers would wait for ever.
            raise BackendError(
                f"transformers: num_blocks is {num_blocks}, but the longest request needs {max(pages)} "
                f"blocks of {PAGE_TOKENS} tokens"
            )
        # The whole prefill if it is small, and at least one token per request.
        tokens = max(len(inputs), min(sum(map(len, inputs)), MAX_STEP_TOKENS))
        self._model = model
        self.inputs = inputs
        # transformers' value for: no token ends a sequence.
        config.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
        self._config = config
        self._sizes = ContinuousBatchingConfig(
            num_blocks=num_blocks,
            max_batch_tokens=options.get("max_batch_tokens") or tokens,
            max_requests_per_batch=len(inputs),
            **SETTINGS,
        )
        self._manager: Any = None
        try:
            # Allocates the cache and, on a GPU, captures graphs.
            self._start()
        except (MemoryError, TypeError, ValueError) as error:
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
            if result is None and not manager.is_running():
                self.stop()
                raise BackendError("transformers: the thread of continuous batching ended early")
            if result is not None and result.error is not None:
                self.stop()
                raise BackendError(f"transformers: continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                done[result.request_id] = result
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
        lengths = [len(ids) for ids in self.batcher.inputs]
        check_processed("transformers", lengths, [len(each.prompt_ids) for each in outcome])
        token_ids = [[int(token) for token in each.generated_tokens] for each in outcome]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        done = stamped_result(texts, token_ids, lengths, [_read_stamps_ns(each) for each in outcome])
        requests = [
            # Seconds of ``time.perf_counter``, which is CLOCK_MONOTONIC on Linux.
            msgspec.structs.replace(request, start_ns=round(each.created_time * 1e9))
            if request.token_ns
            else request
            for request, each in zip(done.requests, outcome, strict=True)
        ]
        return msgspec.structs.replace(done, requests=requests)


def _read_stamps_ns(output: Any) -> list[int]:
    """Return when each token was made; empty for a restarted request, which has lost some of the times."""
    count = len(output.generated_tokens)
    stamps = output.timestamps or ()
    return [round(stamp * 1e9) for stamp in stamps[:count]] if len(stamps) >= count else []
