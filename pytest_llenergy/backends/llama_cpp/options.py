# SPDX-License-Identifier: Apache-2.0
"""Load options of llama.cpp and the capacity for a batch: checked, and as its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.engine_options import NO_PREFIX_CACHE, CommonOptions, check_engine_options
from pytest_llenergy.backends.gguf_files import FLOATS
from pytest_llenergy.backends.llama_cpp import SPEC
from pytest_llenergy.errors import BackendError

#: Values of the load option ``attention``, with llama.cpp's names.
ATTENTIONS = {"flash": "ENABLED", "eager": "DISABLED"}

#: Values of ``kv_cache_dtype`` besides ``FLOATS`` (``kv_cache_types``, common/arg.cpp).
QUANTISED_KV_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

#: Fields of llama.cpp's parameters that tests can set. All its programs share the parameters: most others are
#: those of other programs, of the server's connections, or of requests that are not made here.
PASSED = frozenset(
    {
        *(
            "attention_type",
            "check_tensors",
            "cont_batching",
            "lazy_mode",
            "load_mode",
            "n_ubatch",
            "no_perf",
        ),
        *("no_extra_bufts", "no_host", "numa", "special", "swa_full", "warmup"),
        *("rope_freq_base", "rope_freq_scale", "rope_scaling_type"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor", "yarn_orig_ctx"),
    }
)

_BY_BATCH = "it is set for each batch"
#: Fields of llama.cpp's parameters that are set here, with the reason.
RESERVED = {
    **dict.fromkeys(("n_parallel", "n_ctx", "n_batch", "kv_unified", "fit_params", "ctx_shift"), _BY_BATCH),
    **dict.fromkeys(
        ("cache_prompt", "cache_idle_slots", "cache_ram_mib", "n_cache_reuse", "n_ctx_checkpoints"),
        NO_PREFIX_CACHE,
    ),
    **dict.fromkeys(("cpuparams", "cpuparams_batch"), "use --energy-threads"),
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
    """Load options, checked, and the place of the rank.

    Attributes:
        options: The load options as given.
        native: Those that are fields of ``xllamacpp.CommonParams``.
        kv_type: ggml's name of the type of keys and values; None for llama.cpp's default.
        attention: Key of ``ATTENTIONS``; None to let llama.cpp decide.
        step: Prompt tokens of one step; None for all of a batch.
        lora: File of a LoRA adapter.
    """

    threads: int
    scratch: str | None
    options: Mapping[str, Any]
    native: Mapping[str, Any]
    kv_type: str | None
    attention: str | None
    step: int | None
    lora: str | None

    @classmethod
    def parse(cls, options: Mapping[str, Any], context: RankContext) -> Settings:
        """Check the load options.

        Raises:
            BackendError: If llama.cpp does not take one of them.
        """
        import xllamacpp

        defaults = xllamacpp.CommonParams()
        names = [name for name in dir(defaults) if name[0] != "_" and not callable(getattr(defaults, name))]
        native = {name: value for name, value in options.items() if name not in SPEC.capabilities.options}
        others = dict.fromkeys(names, "not offered by this backend")
        where = f"xllamacpp.CommonParams of {xllamacpp.__version__}"
        check_engine_options(
            "llama-cpp",
            native,
            PASSED.intersection(names),
            declared=SPEC.capabilities.options,
            where=where,
            reserved={name: why for name, why in {**others, **RESERVED}.items() if name not in PASSED},
        )
        for name, value in native.items():
            _set_parameter(defaults, name, value)
        common = CommonOptions.parse("llama-cpp", options, lora="file")
        kv_type = common.kv_cache_dtype or common.dtype
        for name, value, known in (
            ("kv_cache_dtype", common.kv_cache_dtype, (*FLOATS, *QUANTISED_KV_TYPES)),
            ("attention", common.attention, tuple(ATTENTIONS)),
        ):
            if value is not None and value not in known:
                raise BackendError(f"llama-cpp: {name} is {value!r}, needs one of {', '.join(known)}")
        return cls(
            threads=context.threads,
            scratch=context.scratch,
            options=options,
            native=native,
            kv_type=None if kv_type is None else FLOATS.get(kv_type, kv_type),
            attention=common.attention,
            step=common.find_step_tokens("llama-cpp"),
            lora=common.lora,
        )


def server_parameters(file: str, path: str, capacity: Capacity, settings: Settings) -> Any:
    """Return the ``xllamacpp.CommonParams`` of a server.

    Args:
        file: The GGUF file.
        path: Socket to listen on.
        capacity: The batch that it holds.
        settings: The load options.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    for name, value in settings.native.items():
        _set_parameter(params, name, value)
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
    if settings.kv_type is not None:
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings.kv_type.upper()}")
        params.cache_type_k = params.cache_type_v = kind
    if settings.attention is not None:
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{ATTENTIONS[settings.attention]}")
    if settings.lora is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(settings.lora, 1.0)]
    return params


def _set_parameter(params: Any, name: str, value: object) -> None:
    """Set a field of llama.cpp's parameters; enumerations by the name of a value.

    Raises ``BackendError`` for a value of another type or out of range.
    """
    current = getattr(params, name)
    members = getattr(type(current), "__members__", None)
    if members is not None:
        if not isinstance(value, str) or value not in members:
            raise BackendError(f"llama-cpp: {name} is {value!r}, needs one of {', '.join(members)}")
        setattr(params, name, members[value])
        return
    if type(value) is not type(current) and not (isinstance(current, float) and type(value) is int):
        raise BackendError(f"llama-cpp: {name} is {value!r}, needs {type(current).__name__}")
    if isinstance(value, float) and not isfinite(value):
        raise BackendError(f"llama-cpp: {name} is {value!r}, needs a finite number")
    if name == "n_ubatch" and isinstance(value, int) and value < 1:
        raise BackendError(f"llama-cpp: n_ubatch is {value!r}, needs 1 or more tokens")
    try:
        setattr(params, name, value)
    except OverflowError as error:
        raise BackendError(f"llama-cpp: {name} is {value!r}: {error}") from None
