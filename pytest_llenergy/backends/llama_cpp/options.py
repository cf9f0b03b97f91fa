# SPDX-License-Identifier: Apache-2.0
"""Load options of llama.cpp and the capacity for a batch: checked, and as its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.engine_options import NO_PREFIX_CACHE, CommonOptions, refuse_options
from pytest_llenergy.backends.gguf_files import FLOATS
from pytest_llenergy.backends.llama_cpp import SPEC
from pytest_llenergy.errors import BackendError

#: Values of the load option ``attention``, with llama.cpp's names.
ATTENTIONS = {"flash": "ENABLED", "eager": "DISABLED"}

_BY_BATCH = "it is set for each batch"
#: Fields of llama.cpp's parameters that are set here, with the reason.
RESERVED = {
    **dict.fromkeys(("n_parallel", "n_ctx", "n_batch", "kv_unified", "fit_params", "ctx_shift"), _BY_BATCH),
    **dict.fromkeys(
        ("cache_prompt", "cache_idle_slots", "cache_ram_mib", "n_cache_reuse", "n_ctx_checkpoints"),
        NO_PREFIX_CACHE,
    ),
    **dict.fromkeys(("cpuparams", "cpuparams_batch"), "set OMP_NUM_THREADS"),
    **dict.fromkeys(("model", "hostnames", "port", "ui", "n_threads_http", "verbosity"), "it is set here"),
    **{"cache_type_k": "use kv_cache_dtype", "cache_type_v": "use kv_cache_dtype"},
    **{"flash_attn_type": "use attention", "lora_adapters": "use lora"},
    **dict.fromkeys(
        ("n_gpu_layers", "split_mode", "tensor_split", "main_gpu", "no_kv_offload", "no_op_offload"),
        "it has no GPU here, since its wheel is for the CPU",
    ),
}

#: Cache sizes are multiples of this (``GGML_PAD(n_ctx, 256)``, llama-context.cpp).
CONTEXT_STEP = 256


@dataclass(frozen=True)
class Capacity:
    """The batch that a server can hold.

    Attributes:
        prompts: Number of prompts side by side.
        tokens: Tokens of each prompt and its output.
        step: Prompt tokens in one step.
    """

    prompts: int
    tokens: int
    step: int


SMALLEST = Capacity(prompts=1, tokens=CONTEXT_STEP, step=CONTEXT_STEP)


@dataclass(frozen=True)
class Settings:
    """Load options and the place of the rank."""

    threads: int
    scratch: str | None
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, options: Mapping[str, Any], context: RankContext) -> Settings:
        """Check the load options.

        Raises:
            BackendError: If llama.cpp does not take one of them, or this backend sets it.
        """
        settings = cls(context.threads, context.scratch, options)
        server_parameters("", "", SMALLEST, settings)
        return settings

    @property
    def step(self) -> int | None:
        """Prompt tokens of one step; None for all of a batch."""
        return CommonOptions.parse("llama-cpp", self.options).find_step_tokens("llama-cpp")


def server_parameters(file: str, path: str, capacity: Capacity, settings: Settings) -> Any:
    """Return the ``xllamacpp.CommonParams`` of a server.

    Args:
        file: The GGUF file.
        path: Socket to listen on.
        capacity: The batch that it holds.
        settings: The load options.

    Raises:
        BackendError: If llama.cpp does not take an option, or this backend sets it.
    """
    import xllamacpp

    common = CommonOptions.parse("llama-cpp", settings.options)
    common.find_step_tokens("llama-cpp")
    params = xllamacpp.CommonParams()
    ours, given = SPEC.capabilities.options, settings.options
    native = {name: value for name, value in given.items() if name not in ours}
    refuse_options("llama-cpp", native, RESERVED)
    for name, value in native.items():
        _set_parameter(params, name, value)
    kind = common.kv_cache_dtype or common.dtype
    if kind is not None:
        option = "kv_cache_dtype" if common.kv_cache_dtype else "dtype"
        for name in ("cache_type_k", "cache_type_v"):
            _set_parameter(params, name, f"GGML_TYPE_{FLOATS.get(kind, kind).upper()}", option)
    if common.attention is not None:
        word = ATTENTIONS.get(common.attention, common.attention)
        _set_parameter(params, "flash_attn_type", f"LLAMA_FLASH_ATTN_TYPE_{word}", "attention")
    if common.lora is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(common.lora, 1.0)]
    params.model.path = file
    params.hostnames = [path]
    params.ui = False
    params.n_threads_http = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.n_gpu_layers = 0
    params.n_parallel = capacity.prompts
    # Divided evenly among the prompts.
    params.n_ctx = capacity.prompts * capacity.tokens
    params.kv_unified = False
    params.n_batch = capacity.step
    params.n_ubatch = min(capacity.step, params.n_ubatch)
    # Would silently change settings that do not fit into memory.
    params.fit_params = False
    params.ctx_shift = False
    # With a prompt cache, a repeated prompt would cost almost nothing.
    params.cache_prompt = False
    params.cache_idle_slots = False
    params.cache_ram_mib = params.n_cache_reuse = params.n_ctx_checkpoints = 0
    return params


def _set_parameter(params: Any, name: str, value: object, option: str = "") -> None:
    """Set a field of llama.cpp's parameters; enumerations by the name of a value."""
    members = getattr(type(getattr(params, name, None)), "__members__", {})
    try:
        setattr(params, name, members.get(value, value) if isinstance(value, str) else value)
    except (AttributeError, OverflowError, TypeError) as error:
        known = f"; it takes: {', '.join(members)}" if members else ""
        raise BackendError(f"llama-cpp: {option or name} is {value!r}: {error}{known}") from error
