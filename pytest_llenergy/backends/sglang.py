# SPDX-License-Identifier: Apache-2.0
"""SGLang through its offline API (``sglang.Engine``): continuous batching in its own processes.

Written from the documentation; not yet run on hardware.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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

OFFLINE_API_DOCS = "https://docs.sglang.io/basic_usage/offline_engine_api.html"
ARGUMENTS_DOCS = "https://docs.sglang.io/advanced_features/server_arguments.html"

SPEC = BackendSpec(
    name="sglang",
    factory="pytest_llenergy.backends.sglang:SglangBackend",
    requires=("sglang", "transformers", "psutil"),
    install="pip install sglang into a separate environment, and name its Python: "
    "--energy-python=sglang=PATH",
    reads="directory",
    capabilities=replace(
        SCHEDULING_ENGINE,
        replicas="backend",
        hosts="several",
        cpu=False,
        options=tuple(COMMON_OPTIONS),
        passes="sglang.srt.server_args.ServerArgs",
        reasons={
            "sampling": "SGLang has no beams",
            "cpu": "the wheel on PyPI is for CUDA",
            "placement": f"SGLang {SHARDS_ONLY}",
            "timestamps": "generate() reports how long a request took, not when its tokens were produced",
        },
        sources={
            **dict.fromkeys(("cpu", "placement", "tasks", "caches"), "this adapter"),
            "hardware": "run with a stand-in only",
            "passes": "python/sglang/srt/server_args.py (ServerArgs)",
            "sampling": "python/sglang/srt/sampling/sampling_params.py",
            "managed_by": OFFLINE_API_DOCS,
            "gpu": OFFLINE_API_DOCS,
            "launch": OFFLINE_API_DOCS,
            "hosts": f"{ARGUMENTS_DOCS} (nnodes, node_rank, dist_init_addr)",
            "replicas": f"{ARGUMENTS_DOCS} (dp_size)",
            "data": f"{ARGUMENTS_DOCS} (dp_size)",
            "tensor": f"{ARGUMENTS_DOCS} (tp_size)",
            "pipeline": f"{ARGUMENTS_DOCS} (pp_size)",
            "options": ARGUMENTS_DOCS,
            "batching": OFFLINE_API_DOCS,
            "prefix_cache": f"{ARGUMENTS_DOCS} (disable_radix_cache); cached_tokens in meta_info",
            "timestamps": "python/sglang/srt/managers/tokenizer_manager.py (meta_info)",
        },
        hardware=None,
    ),
    refuses=lambda model: refuse_openvino_ir("sglang", model),
)


#: Process title of a scheduler, with its position if there are several
#: (python/sglang/srt/managers/scheduler.py, run_scheduler_process).
SCHEDULER_TITLE = re.compile(
    r"sglang::scheduler(?:_DP(?P<data>\d+))?(?:_PP(?P<pipeline>\d+))?(?:_TP(?P<tensor>\d+))?"
)


#: Name of the adapter of the load option ``lora``.
ADAPTER = "adapter"

#: Fields of ``ServerArgs`` that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path", "skip_tokenizer_init", "revision"), SOURCE),
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "nnodes", "node_rank", "dist_init_addr"), DEVICES),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "device"), DEVICES),
    "random_seed": "a seed is an argument of generate",
    "disable_radix_cache": "use the load option prefix_cache",
}


#: What common options contradict without setting it.
DECIDES = {
    "attention": ("prefill_attention_backend", "decode_attention_backend"),
    "chunked_prefill": ("chunked_prefill_size",),
}


def _engine_keywords(common: CommonOptions, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``sglang.Engine`` for load options.

    Raises:
        BackendError: If ``ServerArgs`` has no such field, or this backend sets it.
    """
    import sglang
    from sglang.srt.server_args import ServerArgs

    passed = {name: value for name, value in options.items() if name not in COMMON_OPTIONS}
    fields = {each.name for each in dataclasses.fields(ServerArgs)}
    check_engine_options(
        "sglang",
        passed,
        fields,
        declared=COMMON_OPTIONS,
        where=f"ServerArgs of SGLang {sglang.__version__}",
        reserved=RESERVED,
    )
    return combine_options("sglang", _translate(common), passed, decides=DECIDES)


def node_arguments(context: RankContext) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` for a model that is spread over hosts; none for one host."""
    if context.master is None:
        return {}
    # Read by ``Engine``, which otherwise waits for the end of a part without the first rank.
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    os.environ["SGLANG_HOST_IP"] = context.find_own_address()
    return {"nnodes": context.nodes, "node_rank": context.node_rank, "dist_init_addr": context.master_url}


def _translate(common: CommonOptions) -> dict[str, dict[str, Any]]:
    """Return what each common option sets in ``ServerArgs``."""
    found = common.under_names(
        dtype="dtype",
        quantization="quantization",
        kv_cache_dtype="kv_cache_dtype",
        attention="attention_backend",
        compile="enable_torch_compile",
    )
    if common.chunked_prefill is False:
        found["chunked_prefill"] = {"chunked_prefill_size": -1}
    elif common.chunked_prefill is not None:
        size = common.chunked_prefill
        found["chunked_prefill"] = {} if size is True else {"chunked_prefill_size": size}
    if common.speculative is not None:
        found["speculative"] = _speculative_arguments(common.speculative)
    if common.lora is not None:
        found["lora"] = {"lora_paths": {ADAPTER: common.lora}}
    if isinstance(common.compile, str):
        raise BackendError("sglang: compile is True or False; SGLang has no modes of compilation")
    return found


def _speculative_arguments(draft: Speculative) -> dict[str, Any]:
    """Return the arguments of speculative decoding. SGLang counts the model's own token as drafted."""
    shared: dict[str, Any] = {"speculative_num_draft_tokens": draft.num_tokens + 1}
    if draft.kind == PROMPT_LOOKUP:
        return {**shared, "speculative_algorithm": "NGRAM"}
    algorithm = "STANDALONE" if draft.kind == DRAFT_MODEL else draft.kind.upper()
    model = (
        {}
        if draft.model is None
        else {"speculative_draft_model_path": pretrained_path(resolve_model(draft.model))}
    )
    steps = {"speculative_num_steps": draft.num_tokens, "speculative_eagle_topk": 1}
    return {**shared, **model, **steps, "speculative_algorithm": algorithm}


@dataclass
class SglangJob:
    """A batch of token ids and sampling parameters; ``generate`` blocks until all are done.

    Attributes:
        keywords: Further arguments of ``generate``.
        reuses: Whether the test allows the radix cache.
    """

    engine: Any
    tokenizer: Any
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    keywords: dict[str, Any]
    reuses: bool

    def run(self) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = self.engine.generate(
            input_ids=self.prompts, sampling_params=self.sampling, **self.keywords
        )
        return outputs

    def result(self, outcome: list[dict[str, Any]]) -> Generation:
        token_ids = [[int(token) for token in output["output_ids"]] for output in outcome]
        requests = []
        for prompt, ids, output in zip(self.prompts, token_ids, outcome, strict=True):
            meta = output["meta_info"]
            if meta.get("cached_tokens") and not self.reuses:
                raise BackendError(
                    f"sglang: took {meta['cached_tokens']} prompt tokens from its radix cache, which should "
                    "be off; the round has not done the work"
                )
            if meta["completion_tokens"] != len(ids) or meta["prompt_tokens"] != len(prompt):
                raise BackendError(
                    f"sglang: reports {meta['prompt_tokens']} prompt and {meta['completion_tokens']} output "
                    f"tokens, where {len(prompt)} went in and {len(ids)} came out"
                )
            requests.append(
                RequestTimeline(
                    input_tokens=len(prompt),
                    output_tokens=len(ids),
                    # python/sglang/srt/managers/tokenizer_manager.py: in the meta_info of drafted requests.
                    drafted_tokens=meta.get("spec_num_proposed_drafts"),
                    accepted_tokens=meta.get("spec_num_correct_drafts"),
                    cached_tokens=int(meta.get("cached_tokens") or 0) if self.reuses else None,
                )
            )
        flags = [PREFIXES_REUSED] if any(request.cached_tokens for request in requests) else []
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests, flags=flags)


class SglangBackend:
    """``sglang.Engine``. It is given token ids, so it detokenises nothing.

    Load options are the common ones and the fields of ``ServerArgs``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        if context.devices == ("cpu",):
            raise BackendError("sglang: needs a GPU; mark the test with @pytest.mark.gpus(1)")
        parallel = context.parallel
        import sglang

        common = CommonOptions.parse("sglang", options)
        keywords = _engine_keywords(common, options)
        self._reuses = bool(common.prefix_cache)
        self._adapter = {} if common.lora is None else {"lora_path": ADAPTER}
        path = pretrained_path(model)
        self._tokenizer: Any = load_tokenizer(model, path)
        with translate_load_errors("sglang", model):
            self._engine: Any = sglang.Engine(
                model_path=path,
                tp_size=parallel.tensor,
                pp_size=parallel.pipeline,
                # Those of this rank; other ranks make the others.
                dp_size=parallel.data * context.nodes // context.world_size,
                **node_arguments(context),
                disable_radix_cache=not self._reuses,
                skip_tokenizer_init=True,
                random_seed=0,
                **keywords,
            )
        self._seeded = bool(options.get("enable_deterministic_inference"))
        # Without a tokenizer manager, which the first rank has, the engine answers nothing.
        server_info = (
            self._engine.get_server_info() if context.node_rank == 0 else {"disable_radix_cache": True}
        )
        if not self._reuses and not server_info.get("disable_radix_cache"):
            raise BackendError(
                "sglang: does not confirm that its radix cache is off, which would make rounds almost free"
            )
        self._world = parallel.tensor, parallel.pipeline
        resolved = (
            "dtype",
            "kv_cache_dtype",
            "attention_backend",
            "sampling_backend",
            "chunked_prefill_size",
            "mem_fraction_static",
        )
        return BackendInfo(
            name="sglang",
            version=sglang.__version__,
            model=model.label,
            dtype=str(server_info.get("dtype")),
            options={
                **{name: str(value) for name, value in options.items()},
                **{name: _primitive(server_info.get(name)) for name in resolved},
                "radix_cache": self._reuses,
                "threads": context.threads,
                "device": ",".join(context.devices),
                "python": platform.python_version(),
            },
        )

    def workers(self) -> Sequence[BackendWorker]:
        """Return the schedulers of this host, each with one shard, identified by their process titles."""
        import psutil

        tensor, pipeline = self._world
        found = []
        for process in psutil.Process().children(recursive=True):
            # A process may end meanwhile.
            with suppress(psutil.Error):
                title = SCHEDULER_TITLE.match(" ".join(process.cmdline()))
                if title is not None:
                    rank = int(title["pipeline"] or 0) * tensor + int(title["tensor"] or 0)
                    replica, size = int(title["data"] or 0), tensor * pipeline
                    found.append(BackendWorker(pid=process.pid, rank=rank, world_size=size, replica=replica))
        return found

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> SglangJob:
        if params.do_sample and not self._seeded:
            raise BackendError(
                "sglang: uses the seed of a request only with "
                "with_options(enable_deterministic_inference=True)"
            )
        ids = encode_prompts("sglang", self._tokenizer, prompts)
        shared: dict[str, Any] = {
            **params.extras,
            "max_new_tokens": params.max_new_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids),
            "temperature": 0.0,
            **params.drawn,
        }
        seeds = [
            {"sampling_seed": params.seed + number} if params.do_sample else {} for number in range(len(ids))
        ]
        sampling = [{**shared, **seed} for seed in seeds]
        return SglangJob(self._engine, self._tokenizer, ids, sampling, self._adapter, self._reuses)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("sglang", self._tokenizer, texts)]

    def synchronize(self) -> None:
        """``generate`` returns when the tokens are in this process."""

    def close(self) -> None:
        self._engine.shutdown()
        del self._engine, self._tokenizer


def _primitive(value: Any) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
