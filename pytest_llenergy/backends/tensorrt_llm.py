# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM through its LLM API: continuous batching, one MPI process per shard.

Written from the documentation; not yet run on hardware.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pytest_llenergy.backends.base import SHARDS_ONLY, BackendSpec, BackendWorker, Capabilities, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import (
    ModelSource,
    encode_prompts,
    load_tokenizer,
    refuse_openvino_ir,
    translate_load_errors,
)
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

REFERENCE_DOCS = "https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html"

SPEC = BackendSpec(
    name="tensorrt-llm",
    factory="pytest_llenergy.backends.tensorrt_llm:TensorRtLlmBackend",
    requires=("tensorrt_llm", "transformers", "psutil"),
    install="install it as https://nvidia.github.io/TensorRT-LLM/installation/ says, in a separate "
    "environment, and name its Python: --energy-python=tensorrt-llm=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="backend",
        replicas="plugin",
        data=True,
        tensor=True,
        pipeline=True,
        cpu=False,
        gpu=True,
        options=("dtype", "max_seq_len", "max_num_tokens", "max_batch_size", "free_gpu_memory_fraction"),
        batching=("continuous",),
        prefix_cache="switched off",
        timestamps="token",
        exact=True,
        clock="TensorRT-LLM's steady clock, for the first and the last token of a request",
        reasons={
            "cpu": "TensorRT-LLM runs on NVIDIA GPUs only",
            "placement": f"TensorRT-LLM {SHARDS_ONLY}",
        },
        sources={
            **dict.fromkeys(("data", "cpu", "placement", "tasks", "caches"), "this adapter"),
            "managed_by": REFERENCE_DOCS,
            "gpu": REFERENCE_DOCS,
            "launch": "tensorrt_llm/llmapi/llm.py (MpiPoolSession)",
            "replicas": "the plugin starts one LLM per replica",
            "tensor": f"{REFERENCE_DOCS} (LLM, tensor_parallel_size)",
            "pipeline": f"{REFERENCE_DOCS} (LLM, pipeline_parallel_size)",
            "options": f"{REFERENCE_DOCS} (TorchLlmArgs, KvCacheConfig)",
            "batching": REFERENCE_DOCS,
            "prefix_cache": f"{REFERENCE_DOCS} (KvCacheConfig, enable_block_reuse)",
            "timestamps": f"{REFERENCE_DOCS} (SamplingParams, return_perf_metrics)",
            "clock": "tensorrt_llm/llmapi/llm.py (steady_clock_now)",
        },
        hardware=None,
    ),
    refuses=lambda model: refuse_openvino_ir("tensorrt-llm", model),
)


#: Run a single worker in the calling process instead of starting one through MPI.
IN_PROCESS = {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"}

#: Open MPI's variables of each process: its rank and the world size.
MPI_RANK, MPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"


@dataclass
class TensorRtLlmOutcome:
    """Output of one call, and when it started and ended."""

    outputs: list[Any]
    start_ns: int
    end_ns: int


@dataclass
class TensorRtLlmJob:
    """A batch of token ids and sampling parameters; ``generate`` blocks until all are done."""

    llm: Any
    tokenizer: Any
    prompts: list[list[int]]
    sampling: list[Any]

    def run(self) -> TensorRtLlmOutcome:
        start_ns = time.monotonic_ns()
        outputs = self.llm.generate(self.prompts, self.sampling, use_tqdm=False)
        return TensorRtLlmOutcome(outputs, start_ns, time.monotonic_ns())

    def result(self, outcome: TensorRtLlmOutcome) -> Generation:
        completions = [output.outputs[0] for output in outcome.outputs]
        token_ids = [[int(token) for token in each.token_ids] for each in completions]
        reused = sum(each.request_perf_metrics.kv_cache_metrics.num_reused_blocks for each in completions)
        if reused:
            raise BackendError(
                f"tensorrt-llm: took {reused} blocks of prompts from its cache, whose reuse should be off; "
                "the round has not done the work"
            )
        requests = []
        for prompt, ids, each in zip(self.prompts, token_ids, completions, strict=True):
            times = each.request_perf_metrics.timing_metrics
            first_ns, last_ns = _to_ns(times.first_token_time), _to_ns(times.last_token_time)
            # The steady clock is the system's monotonic clock on Linux; discard times outside the call.
            on_our_clock = outcome.start_ns <= first_ns <= last_ns <= outcome.end_ns
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(ids),
                    first_token_ns=first_ns if on_our_clock else None,
                    last_token_ns=last_ns if on_our_clock else None,
                )
            )
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


class TensorRtLlmBackend:
    """``tensorrt_llm.LLM`` (PyTorch workflow) without reuse of cache blocks, given token ids.

    Load options are those of ``tensorrt_llm.LLM``, plus ``free_gpu_memory_fraction`` of ``KvCacheConfig``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        if context.devices == ("cpu",):
            raise BackendError("tensorrt-llm: needs an NVIDIA GPU; mark the test with @pytest.mark.gpus(1)")
        parallel = context.parallel
        self._world = parallel.tensor * parallel.pipeline
        if self._world == 1:
            os.environ.update(IN_PROCESS)
        import tensorrt_llm
        from tensorrt_llm.llmapi import KvCacheConfig

        path = pretrained_path(model)
        self._tokenizer: Any = load_tokenizer(model, path)
        keywords = dict(options)
        fraction = keywords.pop("free_gpu_memory_fraction", None)
        share = {} if fraction is None else {"free_gpu_memory_fraction": fraction}
        with translate_load_errors("tensorrt-llm", model):
            self._llm: Any = tensorrt_llm.LLM(
                model=path,
                tensor_parallel_size=parallel.tensor,
                pipeline_parallel_size=parallel.pipeline,
                kv_cache_config=KvCacheConfig(enable_block_reuse=False, **share),
                **keywords,
            )
        self._ends = _end_tokens(path, self._tokenizer)
        return BackendInfo(
            name="tensorrt-llm",
            version=tensorrt_llm.__version__,
            model=model.label,
            dtype=str(options.get("dtype", "auto")),
            options={
                **{name: str(value) for name, value in options.items()},
                "block_reuse": False,
                "worker": "in the rank" if self._world == 1 else "MPI",
                "threads": context.threads,
                "device": ",".join(context.devices),
                "python": platform.python_version(),
            },
        )

    def workers(self) -> Sequence[BackendWorker]:
        """Return the rank itself with one worker, else the processes that MPI started."""
        if self._world == 1:
            return [BackendWorker(pid=os.getpid(), rank=0, world_size=1)]
        import psutil

        found = []
        for process in psutil.Process().children(recursive=True):
            # A process may end meanwhile.
            with suppress(psutil.Error):
                variables = process.environ()
                if MPI_RANK in variables and MPI_SIZE in variables:
                    rank, size = int(variables[MPI_RANK]), int(variables[MPI_SIZE])
                    found.append(BackendWorker(pid=process.pid, rank=rank, world_size=size))
        return found

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> TensorRtLlmJob:
        from tensorrt_llm import SamplingParams

        ids = encode_prompts("tensorrt-llm", self._tokenizer, prompts)
        ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._ends)})
        drawn: dict[str, Any] = {"top_k": 1}
        if params.do_sample:
            drawn = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        sampling = [
            SamplingParams(
                max_tokens=params.max_new_tokens,
                # All end tokens are given as stop tokens: only those can be included in the output.
                ignore_eos=True,
                stop_token_ids=ends or None,
                include_stop_str_in_output=True,
                seed=params.seed + number,
                detokenize=False,
                return_perf_metrics=True,
                **drawn,
            )
            for number in range(len(ids))
        ]
        return TensorRtLlmJob(self._llm, self._tokenizer, ids, sampling)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("tensorrt-llm", self._tokenizer, texts)]

    def synchronize(self) -> None:
        """``generate`` returns when the tokens are in this process."""

    def close(self) -> None:
        self._llm.shutdown()
        del self._llm, self._tokenizer


def _end_tokens(path: str, tokenizer: Any) -> set[int]:
    """Return the tokens that end a sequence: from the model's generation config, else from its tokenizer."""
    from transformers import GenerationConfig

    end = None
    # Not every model has a generation config.
    with suppress(OSError):
        end = GenerationConfig.from_pretrained(path).eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    return {end} if isinstance(end, int) else set(end or ())


def _to_ns(uptime: timedelta) -> int:
    """Convert exactly: the float of ``total_seconds`` cannot hold nanoseconds of a long uptime."""
    return ((uptime.days * 86_400 + uptime.seconds) * 1_000_000 + uptime.microseconds) * 1_000
