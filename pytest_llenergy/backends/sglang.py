# SPDX-License-Identifier: Apache-2.0
"""SGLang through its offline API (``sglang.Engine``): continuous batching in its own processes.

Written from the documentation; not yet run on hardware.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

OFFLINE_API_DOCS = "https://docs.sglang.io/basic_usage/offline_engine_api.html"
ARGUMENTS_DOCS = "https://docs.sglang.io/advanced_features/server_arguments.html"

SPEC = BackendSpec(
    name="sglang",
    factory="pytest_llenergy.backends.sglang:SglangBackend",
    requires=("sglang", "transformers", "psutil"),
    install="pip install sglang into a separate environment, and name its Python: "
    "--energy-python=sglang=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="backend",
        replicas="backend",
        data=True,
        tensor=True,
        pipeline=True,
        cpu=False,
        gpu=True,
        options=(
            *("dtype", "quantization", "context_length", "mem_fraction_static", "attention_backend"),
            *("disable_cuda_graph", "enable_deterministic_inference"),
        ),
        batching=("continuous",),
        prefix_cache="switched off",
        reasons={
            "cpu": "the wheel on PyPI is for CUDA",
            "placement": f"SGLang {SHARDS_ONLY}",
            "timestamps": "generate() reports how long a request took, not when its tokens were produced",
        },
        sources={
            **dict.fromkeys(("cpu", "placement", "tasks", "caches"), "this adapter"),
            "managed_by": OFFLINE_API_DOCS,
            "gpu": OFFLINE_API_DOCS,
            "launch": OFFLINE_API_DOCS,
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


@dataclass
class SglangJob:
    """A batch of token ids and sampling parameters; ``generate`` blocks until all are done."""

    engine: Any
    tokenizer: Any
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]

    def run(self) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = self.engine.generate(
            input_ids=self.prompts, sampling_params=self.sampling
        )
        return outputs

    def result(self, outcome: list[dict[str, Any]]) -> Generation:
        token_ids = [[int(token) for token in output["output_ids"]] for output in outcome]
        requests = []
        for prompt, ids, output in zip(self.prompts, token_ids, outcome, strict=True):
            meta = output["meta_info"]
            if meta.get("cached_tokens"):
                raise BackendError(
                    f"sglang: took {meta['cached_tokens']} prompt tokens from its radix cache, which should "
                    "be off; the round has not done the work"
                )
            if meta["completion_tokens"] != len(ids) or meta["prompt_tokens"] != len(prompt):
                raise BackendError(
                    f"sglang: reports {meta['prompt_tokens']} prompt and {meta['completion_tokens']} output "
                    f"tokens, where {len(prompt)} went in and {len(ids)} came out"
                )
            requests.append(RequestTimeline(input_tokens=len(prompt), output_tokens=len(ids)))
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


class SglangBackend:
    """``sglang.Engine`` with its radix cache off. It is given token ids, so it detokenises nothing.

    Load options are those of ``sglang.Engine`` in ``SPEC``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        if context.devices == ("cpu",):
            raise BackendError("sglang: needs a GPU; mark the test with @pytest.mark.gpus(1)")
        parallel = context.parallel
        import sglang

        path = pretrained_path(model)
        self._tokenizer: Any = load_tokenizer(model, path)
        with translate_load_errors("sglang", model):
            self._engine: Any = sglang.Engine(
                model_path=path,
                tp_size=parallel.tensor,
                pp_size=parallel.pipeline,
                dp_size=parallel.data,
                disable_radix_cache=True,
                skip_tokenizer_init=True,
                random_seed=0,
                **options,
            )
        self._seeded = bool(options.get("enable_deterministic_inference"))
        server_info = self._engine.get_server_info()
        if not server_info.get("disable_radix_cache"):
            raise BackendError(
                "sglang: does not confirm that its radix cache is off, which would make rounds almost free"
            )
        self._world = parallel.tensor, parallel.pipeline
        resolved = (
            "dtype",
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
                "radix_cache": False,
                "threads": context.threads,
                "device": ",".join(context.devices),
                "python": platform.python_version(),
            },
        )

    def workers(self) -> Sequence[BackendWorker]:
        """Return the schedulers, each with one shard, identified by their process titles."""
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
            "max_new_tokens": params.max_new_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids),
            "temperature": 0.0,
        }
        if params.do_sample:
            drawn = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
            shared = {**shared, **drawn}
        seeds = [
            {"sampling_seed": params.seed + number} if params.do_sample else {} for number in range(len(ids))
        ]
        return SglangJob(self._engine, self._tokenizer, ids, [{**shared, **seed} for seed in seeds])

    def synchronize(self) -> None:
        """``generate`` returns when the tokens are in this process."""

    def close(self) -> None:
        self._engine.shutdown()
        del self._engine, self._tokenizer


def _primitive(value: Any) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
