# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers; quantisation and compilation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from typing import Any

from pytest_llenergy.backends.engine_options import (
    DEVICES,
    DRAFT_MODEL,
    PROMPT_LOOKUP,
    SOURCE,
    CommonOptions,
    Positive,
    refuse_options,
)
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Parallel

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

BATCHING_KINDS = ("static", "continuous")

DRAFTING = "it is part of the load option speculative"
COUNTED = "outputs are counted as one sequence of tokens per prompt"

#: Options of transformers that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    "attn_implementation": "use the load option attention",
    "torch_dtype": "use the load option dtype",
    **dict.fromkeys(("device_map", "max_memory", "device_mesh", "tp_plan", "tp_size"), DEVICES),
    **dict.fromkeys(("distributed_config", "offload_folder"), DEVICES),
    **dict.fromkeys(("pretrained_model_name_or_path", "config", "state_dict", "output_loading_info"), SOURCE),
    "eos_token_id": "use ignore_eos and stop_token_ids of generate",
    "max_length": "use max_new_tokens of generate",
    "cache_implementation": "use cache of generate",
    **dict.fromkeys(("compile_config", "disable_compile"), "use the load option compile"),
    "prefill_chunk_size": "use the load option chunked_prefill",
    "continuous_batching_config": "use batching, num_blocks and max_batch_tokens",
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "is_assistant"),
        DRAFTING,
    ),
    **dict.fromkeys(("num_return_sequences", "return_dict_in_generate", "stop_strings"), COUNTED),
    **dict.fromkeys(("pad_token_id", "use_cache", "max_time"), COUNTED),
}


def compile_config(mode: str) -> Any:
    """Return the compile config of ``GenerationConfig``. By default transformers compiles on GPUs only."""
    import torch._inductor.config as inductor
    from transformers import CompileConfig

    # Otherwise torch starts a process per core, which would run during the measurement.
    inductor.compile_threads = 1
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def count_compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_job(job: Any) -> None:
    """Run a job once so that nothing is left to compile.

    Code compiled for earlier batches is dropped first: with it, torch would compile this batch for any shape,
    or after a few more not at all, and results would depend on earlier runs.

    Raises:
        BackendError: If nothing was compiled.
    """
    import torch

    torch.compiler.reset()
    before = count_compiled_graphs()
    job.run()
    if count_compiled_graphs() == before:
        raise BackendError(
            "transformers: compile: generate did not compile this model; not every quantizer and "
            "architecture is supported; leave compile out"
        )


@dataclass(frozen=True)
class QuantizerPackage:
    """A package that quantises: ``name`` is installed, ``module`` is imported."""

    name: str
    module: str


TORCHAO = QuantizerPackage("torchao", "torchao")
QUANTO = QuantizerPackage("optimum-quanto", "optimum.quanto")
BITSANDBYTES = QuantizerPackage("bitsandbytes", "bitsandbytes")

#: Packages by value of the load option ``quantization``. ``int8dyn`` also quantises activations, dynamically.
QUANTIZERS = {
    "int8wo": TORCHAO,
    "int8dyn": TORCHAO,
    "int8": QUANTO,
    "8bit": BITSANDBYTES,
    "nf4": BITSANDBYTES,
}

#: Those that quantise activations while the model runs.
QUANTISES_ACTIVATIONS = ("int8dyn", "8bit")


def quantization_keywords(name: str, config: Any, dtype: str, device: str) -> dict[str, Any]:
    """Return keywords for ``from_pretrained``, the device included: some quantised weights cannot be moved
    later.

    Args:
        name: Key of ``QUANTIZERS``.
        config: Config of the model.
        dtype: Type of everything not quantised, and of the arithmetic; ``auto`` is that of the config.
        device: Device of the weights.
    """
    import torch

    torch_dtype = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    return {
        "quantization_config": _quantization_config(name, torch_dtype or torch.float32),
        "device_map": {"": device},
    }


def describe_quantization(name: str, model: Any) -> dict[str, str | int]:
    """Return the quantizer and the number of quantised layers.

    Raises:
        BackendError: If there are none.
    """
    package = QUANTIZERS[name]
    layers = sum(_is_quantized(module, package) for module in model.modules())
    if layers == 0:
        raise BackendError(f"transformers: {package.name} quantised no layer of this model")
    return {"quantizer": f"{package.name} {version(package.name)}", "quantized_layers": layers}


def _quantization_config(name: str, dtype: Any) -> Any:
    import transformers

    if name in ("int8wo", "int8dyn"):
        from torchao import quantization

        kind = (
            quantization.Int8WeightOnlyConfig
            if name == "int8wo"
            else quantization.Int8DynamicActivationInt8WeightConfig
        )
        return transformers.TorchAoConfig(kind())
    if name == "int8":
        return transformers.QuantoConfig(weights="int8")
    if name == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _is_quantized(module: Any, package: QuantizerPackage) -> bool:
    """Whether a layer or its weight tensor is a class of the package."""
    kinds = (type(module), type(getattr(module, "weight", None)))
    top = package.module
    # A parameter is an instance of the weight's subclass, except for plain tensors.
    return hasattr(module, "weight") and any(f"{kind.__module__}.".startswith(f"{top}.") for kind in kinds)


class LoadOptions(CommonOptions, frozen=True, kw_only=True):
    """How to load a model and how to run it.

    Attributes:
        num_blocks: Pages of the cache of continuous batching; None to fit each batch.
        max_batch_tokens: Tokens per step of continuous batching; None to fit each batch.
    """

    batching: str = "static"
    num_blocks: Positive | None = None
    max_batch_tokens: Positive | None = None

    @classmethod
    def parse(cls, backend: str, options: Mapping[str, Any]) -> LoadOptions:
        """Validate the load options of a test.

        Raises:
            BackendError: If an option cannot be used; names the first problem.
        """
        parsed = super().parse(backend, options)
        parsed.find_step_tokens(backend)
        for problem in chain(parsed._invalid_values(), parsed._conflicts()):
            raise BackendError(f"{backend}: {problem}")
        return parsed

    @classmethod
    def not_ours(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that are passed on to transformers.

        Raises:
            BackendError: If this backend sets one of them.
        """
        passed = {name: value for name, value in options.items() if name not in cls.__struct_fields__}
        refuse_options("transformers", passed, RESERVED)
        return passed

    @property
    def mode(self) -> str | None:
        """Mode of ``torch.compile``; None for none."""
        return "reduce-overhead" if self.compile is True else self.compile or None

    @property
    def continuous(self) -> bool:
        """Whether batching is continuous: requests join and leave a batch as they come and end."""
        return self.batching == "continuous"

    def check(self, params: GenerationParams, batch: int) -> None:
        """Raise ``BackendError`` if the parameters of a call conflict with these options."""
        for problem in self._conflicts_with_call(params, batch):
            raise BackendError(f"transformers: {problem}")

    def check_degrees(self, degrees: Parallel) -> None:
        """Raise ``BackendError`` for options that do not work on several devices."""
        given = {
            "quantization": self.quantization,
            "compile": self.compile,
            "batching='continuous'": self.continuous,
            "speculative": self.speculative,
            "lora": self.lora,
        }
        for kind in ("tensor", "placement"):
            degree = getattr(degrees, kind)
            names = [name for name, value in given.items() if value]
            if degree > 1 and names:
                raise BackendError(
                    f"transformers: {', '.join(names)} and {kind}={degree} cannot be combined; leave one out"
                )

    def check_embedding(self, passed: Collection[str]) -> None:
        """Raise ``BackendError`` for options of generation, which embedding would ignore.

        ``passed`` are those that are attributes of ``GenerationConfig``.
        """
        given = {
            "batching": self.continuous,
            "compile": self.compile,
            "chunked_prefill": self.chunked_prefill,
            "speculative": self.speculative,
        }
        names = [*(name for name, value in given.items() if value), *passed]
        if names:
            raise BackendError(
                f"transformers: embed runs one padded batch; {', '.join(names)} applies to generate only; "
                "leave it out"
            )

    def _invalid_values(self) -> Iterator[str]:
        for name, value, known in (
            ("compile", self.mode, COMPILE_MODES),
            ("quantization", self.quantization, tuple(QUANTIZERS)),
            ("batching", self.batching, BATCHING_KINDS),
        ):
            if value is not None and value not in known:
                yield f"{name} is {value!r}, needs one of {', '.join(known)}"
        if self.speculative is not None and self.speculative.kind not in (DRAFT_MODEL, PROMPT_LOOKUP):
            yield (
                f"speculative: transformers does not draft by {self.speculative.kind}; it does by "
                f"{DRAFT_MODEL} and {PROMPT_LOOKUP}"
            )

    def _conflicts(self) -> Iterator[str]:
        if self.continuous and self.compile:
            yield "compile and batching='continuous' cannot be combined; leave one out"
        if self.continuous and self.speculative:
            yield "speculative decoding takes one prompt at a time; leave out batching='continuous'"
        if self.continuous and self.attention == "flex_attention":
            yield "batching='continuous' runs with sdpa, eager or flash attention, not with flex_attention"
        if self.compile and self.speculative:
            yield "speculative needs a growing cache, compile a static one; leave one out"
        if self.quantization == "8bit" and self.dtype != "float16":
            yield "quantization '8bit' always multiplies in float16; give dtype='float16'"
        if self.speculative and self.chunked_prefill:
            yield "speculative takes the whole prompt in its first step; leave out chunked_prefill"
        if self.continuous and self.chunked_prefill:
            yield "batching='continuous' always prefills in steps; max_batch_tokens is their size"
        if not self.continuous:
            for name in ("num_blocks", "max_batch_tokens"):
                if getattr(self, name) is not None:
                    yield f"{name} is an option of batching='continuous'; leave it out"

    def _conflicts_with_call(self, params: GenerationParams, batch: int) -> Iterator[str]:
        if self.compile and params.cache != "static":
            yield "compile needs cache='static', whose shapes do not change; pass it to generate"
        if self.continuous and params.cache != "dynamic":
            yield f"batching='continuous' has its own paged cache; leave out cache={params.cache!r}"
        if self.continuous and params.extras:
            yield f"batching='continuous' does not honour {', '.join(params.extras)}; leave it out"
        if self.continuous and params.do_sample:
            yield (
                "batching='continuous' samples in the order in which requests are scheduled, so a seed does "
                "not reproduce it; use do_sample=False"
            )
        if self.speculative and params.cache != "dynamic":
            yield f"speculative needs a growing cache; leave out cache={params.cache!r}"
        if self.speculative and batch > 1:
            yield f"speculative takes one prompt at a time, not {batch}; give one, or leave out speculative"
        if self.speculative and params.num_beams > 1:
            yield "speculative drafts for one sequence; leave out num_beams"
        if self.compile and params.num_beams > 1:
            yield "compile is not available with beam search; leave out num_beams"
