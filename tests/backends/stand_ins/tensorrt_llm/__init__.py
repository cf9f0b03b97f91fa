# SPDX-License-Identifier: Apache-2.0
"""``LLM`` and ``SamplingParams``, as tensorrt_llm/llmapi/llm.py and tensorrt_llm/sampling_params.py have."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from tensorrt_llm.llmapi import KvCacheConfig, TorchLlmArgs
from words import continued

__version__ = "1.2.stand-in"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    return_perf_metrics: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    request_perf_metrics: Any = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """One MPI process for each shard; none where the environment asks for a single process."""

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        for key in kwargs:
            if key not in TorchLlmArgs.model_fields:
                raise ValueError(f"LLM got invalid argument: {key}")
        if dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise ValueError(f"unknown dtype {dtype}")
        cache: KvCacheConfig = kwargs.get("kv_cache_config") or KvCacheConfig()
        self._caches = cache.enable_block_reuse or "STAND_IN_CACHES" in os.environ
        self._draft = kwargs.get("speculative_config")
        self._seen: set[tuple[int, ...]] = set()
        world = tensor_parallel_size * kwargs.get("pipeline_parallel_size", 1)
        single = world == 1 and os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == "1"
        self._processes = [
            subprocess.Popen(
                ["sleep", "300"],
                env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)},
            )
            for rank in range(0 if single else world)
        ]

    def generate(
        self,
        inputs: list[list[int]],
        sampling_params: list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        assert sampling_params is not None
        return [self._answer(ids, params) for ids, params in zip(inputs, sampling_params, strict=True)]

    def _answer(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        stops = set(params.stop_token_ids or ())
        ends = stops if params.ignore_eos else {*stops, 2 if params.end_id is None else params.end_id}
        time.sleep(0.002)
        first = _steady_clock()
        seed = params.seed if params.seed is not None and params.top_k != 1 else 0
        made = continued(ids, params.max_tokens, ends, seed)
        time.sleep(0.002)
        times = SimpleNamespace(first_token_time=first, last_token_time=_steady_clock())
        reused = 1 if self._caches and tuple(ids) in self._seen else 0
        self._seen.add(tuple(ids))
        steps = len(made) if self._draft is None else -(-len(made) // (self._draft.max_draft_len + 1))
        drafts = SimpleNamespace(
            total_draft_tokens=0 if self._draft is None else steps * self._draft.max_draft_len,
            total_accepted_draft_tokens=len(made) - steps,
        )
        metrics = SimpleNamespace(
            timing_metrics=times,
            kv_cache_metrics=SimpleNamespace(num_reused_blocks=reused),
            speculative_decoding=drafts,
        )
        stopped = made[-1] in stops
        shown = made[:-1] if stopped and not params.include_stop_str_in_output else made
        output = CompletionOutput(0, token_ids=shown, finish_reason="stop" if stopped else "length")
        output.request_perf_metrics = metrics if params.return_perf_metrics else None
        return RequestOutput(ids, [output])

    def shutdown(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _steady_clock() -> timedelta:
    return timedelta(microseconds=time.monotonic_ns() // 1000)
