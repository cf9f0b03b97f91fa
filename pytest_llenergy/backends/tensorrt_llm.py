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
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pytest_llenergy.backends.base import (
    SCHEDULING_ENGINE,
    SHARDS_ONLY,
    BackendSpec,
    BackendWorker,
    RankContext,
)
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.engine_options import (
    COMMON_OPTIONS,
    DEVICES,
    DRAFT_MODEL,
    PREFIXES_REUSED,
    PROMPT_LOOKUP,
    SOURCE,
    CommonOptions,
    Speculative,
    check_engine_options,
    combine_options,
)
from pytest_llenergy.backends.models import (
    ModelSource,
    encode_prompts,
    load_tokenizer,
    refuse_openvino_ir,
    resolve_model,
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
    capabilities=replace(
        SCHEDULING_ENGINE,
        cpu=False,
        options=(
            *("dtype", "kv_cache_dtype", "attention", "chunked_prefill", "speculative", "prefix_cache"),
            *("compile", "free_gpu_memory_fraction"),
        ),
        passes="tensorrt_llm.llmapi.TorchLlmArgs",
        timestamps="token",
        exact=True,
        clock="TensorRT-LLM's steady clock, for the first and the last token of a request",
        reasons={
            "options_quantization": "the checkpoint decides it",
            "options_lora": "not offered by this adapter; TensorRT-LLM needs a lora_config",
            "sampling": "beams need max_beam_width at loading, and are not offered",
            "cpu": "TensorRT-LLM runs on NVIDIA GPUs only",
            "hosts": "over hosts its workers are started by MPI or by Ray, beyond the control of the plugin",
            "placement": f"TensorRT-LLM {SHARDS_ONLY}",
        },
        sources={
            **dict.fromkeys(("data", "cpu", "placement", "tasks", "caches"), "this adapter"),
            "hardware": "run with a stand-in only",
            "passes": f"{REFERENCE_DOCS} (TorchLlmArgs)",
            "sampling": f"{REFERENCE_DOCS} (SamplingParams)",
            "managed_by": REFERENCE_DOCS,
            "gpu": REFERENCE_DOCS,
            **dict.fromkeys(("launch", "hosts"), "tensorrt_llm/llmapi/llm.py (MpiPoolSession)"),
            "replicas": "the plugin starts one LLM per replica",
            "tensor": f"{REFERENCE_DOCS} (LLM, tensor_parallel_size)",
            "pipeline": f"{REFERENCE_DOCS} (LLM, pipeline_parallel_size)",
            "options": f"{REFERENCE_DOCS} (TorchLlmArgs, KvCacheConfig)",
            "options_quantization": f"{REFERENCE_DOCS} (QuantConfig)",
            "options_lora": f"{REFERENCE_DOCS} (LoraConfig)",
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

#: Fields of ``TorchLlmArgs`` that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init", "revision", "tokenizer_revision"), SOURCE),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "gpus_per_node"), DEVICES),
    "kv_cache_config": "use kv_cache_dtype, prefix_cache and free_gpu_memory_fraction",
    "return_perf_metrics": "it is on, for timestamps",
}

#: What common options contradict without setting it.
DECIDES = {"compile": ("torch_compile_config",)}

#: Load options of this backend that are not those of ``TorchLlmArgs``.
OWN_OPTIONS = (*COMMON_OPTIONS, "free_gpu_memory_fraction")


def _engine_keywords(common: CommonOptions, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``tensorrt_llm.LLM`` for load options.

    Raises:
        BackendError: If ``TorchLlmArgs`` has no such field, or this backend sets it.
    """
    import tensorrt_llm
    from tensorrt_llm.llmapi import KvCacheConfig, TorchLlmArgs

    passed = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    check_engine_options(
        "tensorrt-llm",
        passed,
        TorchLlmArgs.model_fields,
        declared=OWN_OPTIONS,
        where=f"TorchLlmArgs of TensorRT-LLM {tensorrt_llm.__version__}",
        reserved=RESERVED,
    )
    cache: dict[str, Any] = {"enable_block_reuse": bool(common.prefix_cache)}
    if common.kv_cache_dtype is not None:
        cache["dtype"] = common.kv_cache_dtype
    if options.get("free_gpu_memory_fraction") is not None:
        cache["free_gpu_memory_fraction"] = options["free_gpu_memory_fraction"]
    keywords = combine_options("tensorrt-llm", _translate(common), passed, decides=DECIDES)
    return {**keywords, "kv_cache_config": KvCacheConfig(**cache)}


def _translate(common: CommonOptions) -> dict[str, dict[str, Any]]:
    """Return what each common option sets in ``TorchLlmArgs``, apart from its cache."""
    found = common.under_names(dtype="dtype", attention="attn_backend")
    if common.chunked_prefill is not None:
        found["chunked_prefill"] = {"enable_chunked_prefill": bool(common.chunked_prefill)}
        if not isinstance(common.chunked_prefill, bool):
            found["chunked_prefill"]["max_num_tokens"] = common.chunked_prefill
    if common.speculative is not None:
        found["speculative"] = {"speculative_config": _speculative_config(common.speculative)}
    if isinstance(common.compile, str):
        raise BackendError("tensorrt-llm: compile is True or False; its modes are in torch_compile_config")
    if common.compile is False:
        found["compile"] = {}
    elif common.compile:
        from tensorrt_llm.llmapi import TorchCompileConfig

        found["compile"] = {"torch_compile_config": TorchCompileConfig()}
    return found


def _speculative_config(draft: Speculative) -> Any:
    from tensorrt_llm import llmapi

    if draft.kind == PROMPT_LOOKUP:
        return llmapi.NGramDecodingConfig(
            max_draft_len=draft.num_tokens, max_matching_ngram_size=draft.max_ngram
        )
    if draft.kind == DRAFT_MODEL:
        return llmapi.DraftTargetDecodingConfig(
            max_draft_len=draft.num_tokens, speculative_model=pretrained_path(resolve_model(draft.model))
        )
    raise BackendError(
        f"tensorrt-llm: speculative has {DRAFT_MODEL} and {PROMPT_LOOKUP}; give another method, such as "
        f"{draft.kind}, as speculative_config"
    )


@dataclass
class TensorRtLlmOutcome:
    """Output of one call, and when it started and ended."""

    outputs: list[Any]
    start_ns: int
    end_ns: int


@dataclass
class TensorRtLlmJob:
    """A batch of token ids and sampling parameters; ``generate`` blocks until all are done.

    Attributes:
        reuses: Whether the test allows blocks of the cache to be reused.
        drafts: Whether tokens are drafted.
    """

    llm: Any
    tokenizer: Any
    prompts: list[list[int]]
    sampling: list[Any]
    reuses: bool
    drafts: bool

    def run(self) -> TensorRtLlmOutcome:
        start_ns = time.monotonic_ns()
        outputs = self.llm.generate(self.prompts, self.sampling, use_tqdm=False)
        return TensorRtLlmOutcome(outputs, start_ns, time.monotonic_ns())

    def result(self, outcome: TensorRtLlmOutcome) -> Generation:
        completions = [output.outputs[0] for output in outcome.outputs]
        token_ids = [[int(token) for token in each.token_ids] for each in completions]
        reused = sum(each.request_perf_metrics.kv_cache_metrics.num_reused_blocks for each in completions)
        if reused and not self.reuses:
            raise BackendError(
                f"tensorrt-llm: took {reused} blocks of prompts from its cache, whose reuse should be off; "
                "the round has not done the work"
            )
        requests = []
        for prompt, ids, each in zip(self.prompts, token_ids, completions, strict=True):
            measured = each.request_perf_metrics
            times, drafts = measured.timing_metrics, measured.speculative_decoding
            first_ns, last_ns = _to_ns(times.first_token_time), _to_ns(times.last_token_time)
            # The steady clock is the system's monotonic clock on Linux; discard times outside the call.
            on_our_clock = outcome.start_ns <= first_ns <= last_ns <= outcome.end_ns
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(ids),
                    first_token_ns=first_ns if on_our_clock else None,
                    last_token_ns=last_ns if on_our_clock else None,
                    # Counts of zero where nothing drafts.
                    drafted_tokens=int(drafts.total_draft_tokens) if self.drafts else None,
                    accepted_tokens=int(drafts.total_accepted_draft_tokens) if self.drafts else None,
                )
            )
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        flags = [PREFIXES_REUSED] if reused else []
        return Generation(texts=texts, token_ids=token_ids, requests=requests, flags=flags)


class TensorRtLlmBackend:
    """``tensorrt_llm.LLM`` (PyTorch workflow), given token ids.

    Load options are common ones, ``free_gpu_memory_fraction`` of ``KvCacheConfig``, and the fields of
    ``TorchLlmArgs``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        if context.devices == ("cpu",):
            raise BackendError("tensorrt-llm: needs an NVIDIA GPU; mark the test with @pytest.mark.gpus(1)")
        parallel = context.parallel
        self._world = parallel.tensor * parallel.pipeline
        if self._world == 1:
            os.environ.update(IN_PROCESS)
        import tensorrt_llm

        common = CommonOptions.parse("tensorrt-llm", options)
        keywords = _engine_keywords(common, options)
        self._reuses, self._drafts = bool(common.prefix_cache), "speculative_config" in keywords
        path = pretrained_path(model)
        self._tokenizer: Any = load_tokenizer(model, path)
        with translate_load_errors("tensorrt-llm", model):
            self._llm: Any = tensorrt_llm.LLM(
                model=path,
                tensor_parallel_size=parallel.tensor,
                pipeline_parallel_size=parallel.pipeline,
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
                "block_reuse": self._reuses,
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
                **params.extras,
                **(params.drawn or {"top_k": 1}),
            )
            for number in range(len(ids))
        ]
        return TensorRtLlmJob(self._llm, self._tokenizer, ids, sampling, self._reuses, self._drafts)

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
