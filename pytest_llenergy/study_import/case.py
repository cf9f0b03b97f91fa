# SPDX-License-Identifier: Apache-2.0
"""An experiment of LLenergyMeasure as a test: options, parameters, and why a key has no counterpart."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pytest_llenergy.backends import tensorrt_llm
from pytest_llenergy.backends.base import DTYPES, Capabilities
from pytest_llenergy.backends.engine_options import (
    COMMON_OPTIONS,
    PROMPT_LOOKUP,
    CommonOptions,
    explain_secret,
)
from pytest_llenergy.backends.tasks import EXTRA_PARAMS, GenerationParams, ServeParams
from pytest_llenergy.backends.transformers import library_options
from pytest_llenergy.backends.transformers.options import (
    ATTENTIONS,
    COMPILE_MODES,
    NO_PREFIX_CACHE,
    QUANTIZERS,
    LoadOptions,
)
from pytest_llenergy.backends.vllm import options as vllm_options
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.load_curve import Slo
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.model.secrets import HIDDEN, hide_secrets

#: Keys that load options replace which mean the same in every backend, or in one.
RENAMED = {
    **dict.fromkeys(("attn_implementation", "attention.backend", "attn_backend"), "attention"),
    **dict.fromkeys(("enable_prefix_caching", "kv_cache_config.enable_block_reuse"), "prefix_cache"),
    "enable_chunked_prefill": "chunked_prefill",
    "kv_cache_config.dtype": "kv_cache_dtype",
    "kv_cache_config.free_gpu_memory_fraction": "free_gpu_memory_fraction",
}

#: Options of each library that it is known to take. Others are looked up in the library, if it is installed.
KNOWN = {
    "transformers": ("early_stopping", "length_penalty", "no_repeat_ngram_size", "min_new_tokens"),
    "vllm": (
        *("gpu_memory_utilization", "enforce_eager", "max_num_seqs", "max_num_batched_tokens", "block_size"),
        *("max_model_len", "cpu_offload_gb", "disable_custom_all_reduce", "kv_cache_memory_bytes"),
        *("trust_remote_code", "load_format", "num_gpu_blocks_override", "distributed_executor_backend"),
    ),
    "tensorrt-llm": ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "trust_remote_code"),
}

#: Options that a backend sets itself, with the reason.
RESERVED = {
    "transformers": library_options.RESERVED,
    "vllm": vllm_options.RESERVED,
    "tensorrt-llm": tensorrt_llm.RESERVED,
}

#: Values of load options of transformers.
VALUES: dict[str, tuple[str, ...]] = {
    "attention": tuple(ATTENTIONS),
    "quantization": tuple(QUANTIZERS),
    "compile": COMPILE_MODES,
}

#: Values that are the defaults of the library, so that a key needs neither an option nor a note.
NEUTRAL: dict[str, object] = {
    **{"use_cache": True, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"num_beams": 1, "n": 1, "device_map": "auto", "low_cpu_mem_usage": True, "min_p": 0.0},
    **dict.fromkeys(("torch_compile", "load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"), False),
    **dict.fromkeys(("trust_remote_code", "ignore_eos", "early_stopping", "fast_build"), False),
    **dict.fromkeys(("execution.skip_preflight", "study_execution.skip_preflight"), False),
    **dict.fromkeys(("disable_custom_all_reduce",), False),
    **{"torch_compile_backend": "inductor", "batching.strategy": "static"},
}

WARMUP = "warm-up ends when time and power have settled; use --energy-warmup=N for a number of iterations"
GAPS = "idle power is measured in the quiet gaps around each round; use --energy-gap=SECONDS"
CHECKPOINT = "the checkpoint decides on quantisation"
CYCLES = "use --energy-rounds=N, or llenergy ab for a process per round"
BATCHING = "use the load option batching"
SERVER_OPTION = "an option of the server; give it in --energy-server-command"

#: Why a key has no counterpart, by the beginning of its path; in the section of an engine, the path starts
#: with the name of the backend.
REASONS = {
    **dict.fromkeys(("dataset_order", "task.dataset.order"), "prompts come in the order of their file"),
    **dict.fromkeys(("max_input_tokens", "task.max_input_tokens"), "prompts are not cut; give shorter ones"),
    **dict.fromkeys(("warmup", "measurement.warmup", "offline.warmup", "server.warmup"), WARMUP),
    **dict.fromkeys(("baseline", "measurement.baseline"), GAPS),
    **{
        f"{section}.thermal_floor_seconds": GAPS
        for section in ("warmup", "measurement.warmup", "offline.warmup")
    },
    **dict.fromkeys(("energy", "measurement.energy_sampler"), "use --energy-meter=NAME"),
    "measurement": "rounds are measured whole",
    "timeseries": "the record has the power over one round",
    **dict.fromkeys(
        ("runners", "images"), "tests run where pytest runs; use --energy-python for other environments"
    ),
    **dict.fromkeys(("gpus", "study_execution.gpu_indices"), "use --energy-gpus=0,1"),
    "server.cooldown_seconds": GAPS,
    "server.traffic.ramp_exclusion_seconds": "steady metrics begin with the first request that is done",
    "traffic_simulation": "a batch has no arrivals; use backend.serve of a server, with request_rate",
    "streaming": "the times of tokens are recorded in any case",
    **{"num_cycles": CYCLES},
    **{
        f"{section}.{key}": reason
        for section in ("execution", "study_execution")
        for key, reason in {
            "n_cycles": CYCLES,
            **dict.fromkeys(("experiment_order", "cycle_order", "shuffle_seed"), "tests run in file order"),
            **dict.fromkeys(("experiment_gap_seconds", "cycle_gap_seconds"), GAPS),
            "experiment_timeout_seconds": "use --energy-timeout=SECONDS",
            "max_consecutive_failures": "use --maxfail=N of pytest",
        }.items()
    },
    **dict.fromkeys(("output", "output_dir"), "use --energy-report=FILE.json"),
    "lora": "use the load option lora with the directory of the adapter",
    "transformers.use_cache": "generate always uses a key-value cache",
    "transformers.trust_remote_code": "code that a model brings along is not run",
    **dict.fromkeys(("batching.strategy", "transformers.batching_strategy"), BATCHING),
    "vllm.swap_space": "vLLM has no swap space any more",
    "vllm.beam_search": "beams are not a part of vLLM's engine",
    **dict.fromkeys(
        ("tensorrt-llm.build_cache", "tensorrt-llm.fast_build"),
        "TensorRT-LLM's PyTorch backend builds no engine",
    ),
    **dict.fromkeys(("tensorrt-llm.quant", "tensorrt-llm.quant_config", "tensorrt-llm.calib"), CHECKPOINT),
}

#: Most reasons; most keys of one reason, and values of one key, that a note names; length of one of them.
MAX_REASONS, MAX_LISTED, MAX_LENGTH = 100, 25, 100


@dataclass
class Case:
    """One experiment as a test: what a backend loads, and what it does with prompts.

    ``engine`` is the library of a server, whose ``params`` are those of a load; empty for a batch.
    """

    backend: str
    model: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    degrees: dict[str, int] = field(default_factory=dict)
    engine: str = ""


class Notes:
    """Keys without a counterpart, with their values, by reason."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, None]]] = {}

    def add(self, path: str, value: object, reason: str) -> None:
        """Add a value of a key; a secret is hidden."""
        text = HIDDEN if _explain_secret(path) else _text(value)
        self._values.setdefault(reason, {}).setdefault(path, {})[text] = None

    def lines(self) -> list[str]:
        """Return one line per reason, since many keys have the same."""
        lines = [
            _join(", ", (f"{_cut(path)} = {_join(' | ', values)}" for path, values in paths.items()))
            + f": {reason}"
            for reason, paths in self._values.items()
        ]
        more = len(lines) - MAX_REASONS
        return lines if more <= 0 else [*lines[:MAX_REASONS], f"and {more} more reasons"]


def show(value: object) -> str:
    """Return a value for a message."""
    return _cut(_text(value))


def _explain_secret(path: str) -> str | None:
    """Return why no part of a path may name a secret; None if none does."""
    return next(filter(None, map(explain_secret, path.split("."))), None)


def _text(value: object) -> str:
    return json.dumps(hide_secrets(value), default=str)


def _join(separator: str, texts: Iterable[str]) -> str:
    found = list(texts)
    more = [f"{len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
    # A path with its values consists of parts that have been cut already.
    cut = found[:MAX_LISTED] if separator == ", " else [_cut(each) for each in found[:MAX_LISTED]]
    return separator.join([*cut, *more])


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}…"


@dataclass(frozen=True)
class Key:
    """A key that only some engines have.

    Attributes:
        path: As the file has it.
        name: Without its sections.
        value: Its value.
        in_engine: Whether it is in the section of an engine.
        sampling: Whether it is in a section for sampling.
    """

    path: str
    name: str
    value: Any
    in_engine: bool
    sampling: bool


def convert_keys(case: Case, keys: Iterable[Key], row: Capabilities, notes: Notes) -> None:
    """Make load options and parameters of keys, or notes.

    Args:
        case: The case that gets them.
        keys: Keys of the experiment.
        row: Capabilities of the backend.
        notes: Gets the keys that have no counterpart.
    """
    found = [each for each in keys if each.value is not None and each.value != {}]
    given = {each.name: each.value for each in found}
    for key in found:
        if key.name in NEUTRAL and NEUTRAL[key.name] == key.value:
            continue
        reason = _convert_key(case, key, given, row)
        if reason is not None:
            notes.add(key.path, key.value, reason)
    if case.options.get("quantization") == "8bit" and case.options.get("dtype") != "float16":
        if "dtype" in case.options:
            notes.add("dtype", case.options["dtype"], "with load_in_8bit, arithmetic is in float16")
        case.options["dtype"] = "float16"
    if "compile" in case.options and case.backend == "transformers" and case.params.get("cache") != "static":
        notes.add("torch_compile", True, "carried over with a static cache, which compiling needs")
        case.params["cache"] = "static"


def explain_refusal(case: Case, row: Capabilities) -> str | None:
    """Return why the backend would refuse a case as a whole; None if it would not."""
    try:
        for name, value in (*case.options.items(), *case.params.items()):
            if not _is_plain(value):
                return f"{name} is {value!r}, needs a plain number, text or list"
        common = CommonOptions.parse(case.backend, case.options)
        params = (ServeParams if case.engine else GenerationParams).parse(case.params)
        if common.dtype not in (None, *DTYPES):
            return f"dtype is {common.dtype!r}, needs one of {', '.join(DTYPES)}"
        if case.engine:
            return None
        degrees = Parallel(**case.degrees)
        for kind in row.unsupported_degrees(degrees):
            return row.reasons.get(kind, f"{case.backend} has no {kind} parallelism")
        if case.backend == "transformers":
            names = {*case.options} & {*COMMON_OPTIONS} - {"prefix_cache", "kv_cache_dtype"}
            options = LoadOptions(**{name: getattr(common, name) for name in names})
            options.check_degrees(degrees)
            options.check(params, case.batch)
    except BackendError as error:
        return str(error)
    return None


def _is_plain(value: object) -> bool:
    """Whether a test file can have a value as a literal: not an infinite number, nor a date of YAML."""
    if isinstance(value, (str, int, Slo)):
        return True
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    return True


def _convert_key(case: Case, key: Key, given: Mapping[str, Any], row: Capabilities) -> str | None:
    """Make a load option or a parameter of a key. Returns the reason if that is not possible."""
    name, value = RENAMED.get(key.name, key.name), key.value
    if reason := _explain_secret(key.path):
        return reason
    place = f"{case.backend}.{key.name}" if key.in_engine else key.path
    reason = next((REASONS[each] for each in _prefixes(place) if each in REASONS), None)
    if reason is not None:
        return reason
    if hide_secrets(value) is not value:
        return "it holds a secret, and options are recorded"
    if name == "cache_implementation":
        if value not in row.caches:
            return f"the cache of {case.backend} is {' or '.join(row.caches)}"
        case.params["cache"] = value
        return None
    if name == "ignore_eos":
        case.params[name] = value
        return None
    if name in EXTRA_PARAMS:
        if name not in row.sampling:
            takes = f"{case.backend} takes {', '.join(row.sampling)}"
            return f"{takes}; {row.reasons['sampling']}" if "sampling" in row.reasons else takes
        if name == "min_p" and "do_sample" not in case.params:
            return "greedy decoding draws nothing"
        if name == "repetition_penalty" and _is_padded(case):
            return "it would also apply to the tokens that pad shorter prompts of a batch; use batch_size: 1"
        case.params[name] = value
        return None
    if case.engine and key.in_engine:
        return SERVER_OPTION
    if case.backend == "transformers":
        return _convert_for_transformers(case, key, name, given, row)
    if key.sampling:
        return RESERVED[case.backend].get(name, "generate has no such argument")
    if not key.in_engine:
        return "no counterpart"
    if key.name == "attention.backend":
        value = str(value).upper()  # as vLLM itself does with values of this key
    return _add_option(case, name, value, row)


def _is_padded(case: Case) -> bool:
    """Return whether a rank gets several prompts, which need not have one length, and pads them."""
    return case.backend == "transformers" and case.batch > case.degrees.get("data", 1)


def _convert_for_transformers(
    case: Case, key: Key, name: str, given: Mapping[str, Any], row: Capabilities
) -> str | None:
    """Convert a key whose meaning may depend on ``given``, the values of all keys by name."""
    value = key.value
    if name == "load_in_8bit":
        return _add_option(case, "quantization", "8bit", row)
    if name == "load_in_4bit":
        if given.get("bnb_4bit_quant_type") != "nf4":
            return "of the types of 4 bits, the backend has nf4 (bnb_4bit_quant_type: nf4)"
        return _add_option(case, "quantization", "nf4", row)
    if name == "bnb_4bit_quant_type":
        return None if given.get("load_in_4bit") is True else "needs load_in_4bit: true"
    if name == "bnb_4bit_compute_dtype":
        return None if value == case.options.get("dtype") else "the arithmetic has the type of dtype"
    if name.startswith("bnb_4bit_"):
        return "bitsandbytes is used with its defaults"
    if name == "torch_compile":
        if given.get("num_beams", 1) != 1:
            return "compiling is not available with beam search"
        mode = given.get("torch_compile_mode", "default") if value in (True, "inductor") else value
        return _add_option(case, "compile", mode, row)
    if name == "torch_compile_mode":
        return None if given.get("torch_compile") else "needs torch_compile: true"
    if name == "torch_compile_backend":
        return "models are compiled with inductor"
    if name == "prompt_lookup_num_tokens":
        if case.batch > 1:
            return "speculative decoding takes one prompt at a time; use batch_size: 1"
        return _add_option(case, "speculative", {"method": PROMPT_LOOKUP, "num_tokens": value}, row)
    if name == "prefix_cache" and value is True:
        return NO_PREFIX_CACHE
    if name == "chunked_prefill" and value is True:
        return "the load option chunked_prefill is the tokens of a step"
    if not (key.in_engine or key.sampling):
        return "no counterpart"
    return _add_option(case, name, value, row)


def _add_option(case: Case, name: str, value: Any, row: Capabilities) -> str | None:
    """Add a load option. Returns the reason if the backend would refuse it."""
    if name in COMMON_OPTIONS:
        if name not in row.options:
            return "; ".join(row.option_reasons([name])) or f"{case.backend} has no load option {name}"
        known = VALUES.get(name, ()) if case.backend == "transformers" else ()
        if known and value not in (*known, False):
            return f"the load option {name} is one of {', '.join(known)}"
        try:
            CommonOptions.parse(case.backend, {name: value})
        except BackendError as error:
            return str(error)
    elif name not in row.options:
        root, _, part = name.partition(".")
        reserved = RESERVED[case.backend].get(root)
        if reserved is None and root not in KNOWN[case.backend]:
            reserved = _ask_library(case.backend, root)
        if reserved is not None:
            return reserved
        if part:
            return f"is a part of {root}, which backend.with_options({root}=…) takes as a whole"
    case.options[name] = value
    return None


@lru_cache
def _ask_library(backend: str, name: str) -> str | None:
    """Return why the installed library does not take an option; None if it takes it."""
    try:
        if backend == "transformers":
            from transformers import PretrainedConfig

            library_options.sort_library_options({name: None}, PretrainedConfig())
        elif backend == "vllm":
            vllm_options.engine_keywords(CommonOptions(), {name: None}, on_cpu=False)
        else:
            from tensorrt_llm.llmapi import TorchLlmArgs

            if name not in TorchLlmArgs.model_fields:
                return f"{backend} has no such option"
    except BackendError as error:
        return str(error).partition("; it takes: ")[0]
    except ImportError:
        return (
            f"not checked, since {backend} is not installed here; if it has the option, "
            f"use backend.with_options({name}=…)"
        )
    return None


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))
