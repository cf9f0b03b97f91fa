# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from typing import Any

from pytest_llenergy.backends.base import is_installed
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel

# ``torch.compile`` of decoding steps, as ``generate`` does it with a static cache.


def compile_config(mode: str) -> Any:
    """For ``GenerationConfig``. By itself transformers compiles on GPUs only."""
    import torch._inductor.config as inductor
    from transformers import CompileConfig

    # Else torch starts a process for each core, which would run beside what is measured.
    inductor.compile_threads = 1
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def count_compiled_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_job(job: Any) -> None:
    """Run a job once, so that nothing is left to compile. Raises ``BackendError`` when nothing was.

    What was compiled for the batch before is dropped first: with it, torch would compile this one for any
    shape, or after a few more not at all, and figures would depend on what has run earlier.
    """
    import torch

    torch.compiler.reset()
    before = count_compiled_graphs()
    job.run()
    if count_compiled_graphs() == before:
        raise BackendError(
            "transformers: compile: generate has compiled nothing of this model, which it does not support "
            "with every quantiser and architecture; leave compile out"
        )


# Quantised weights, by packages that need not be installed.


@dataclass(frozen=True)
class QuantizerPackage:
    """What quantises: ``module`` is what is imported, ``name`` what is installed."""

    name: str
    module: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.name}"


TORCHAO = QuantizerPackage("torchao", "torchao")
QUANTO = QuantizerPackage("optimum-quanto", "optimum.quanto")
BITSANDBYTES = QuantizerPackage("bitsandbytes", "bitsandbytes")

#: By the name of the load option. ``int8dyn`` quantises activations too, as they come.
QUANTIZERS = {
    "int8wo": TORCHAO,
    "int8dyn": TORCHAO,
    "int8": QUANTO,
    "8bit": BITSANDBYTES,
    "nf4": BITSANDBYTES,
}


def quantization_keywords(name: str, config: Any, dtype: str, device: str) -> dict[str, Any]:
    """What ``from_pretrained`` is given, the device too: some packages' weights cannot be moved later.

    ``dtype`` is that of what is not quantised, and of the arithmetic; ``auto`` is that of the model's config.
    """
    import torch

    own = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    return {
        "quantization_config": _quantization_config(name, own or torch.float32),
        "device_map": {"": device},
    }


def describe_quantization(name: str, model: Any) -> dict[str, str | int]:
    """For the record: by whom and how many layers. Raises ``BackendError`` when there are none."""
    package = QUANTIZERS[name]
    layers = sum(_is_quantized(module, package) for module in model.modules())
    if layers == 0:
        raise BackendError(f"transformers: {package.name} has quantised no layer of this model")
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
    """Whether a layer, or the tensor that is its weight, is the package's own kind."""
    kinds = (type(module), type(getattr(module, "weight", None)))
    top = package.module
    # A parameter of a subclass is an instance of the subclass, except for the plain ones.
    return hasattr(module, "weight") and any(f"{kind.__module__}.".startswith(f"{top}.") for kind in kinds)


# The load options, checked before a model is read for minutes.

DTYPES = ("auto", "float32", "bfloat16", "float16")

#: What each needs besides torch: a module and the command that installs it.
ATTENTIONS: dict[str, tuple[str, str] | None] = {
    "sdpa": None,
    "eager": None,
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build it from its hopper directory"),
    "flex_attention": None,
}
#: Those without kernels for CPUs (transformers raises or fails to compile; tried with torch 2.13).
GPU_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "flex_attention")

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

BATCHING_KINDS = ("static", "continuous")


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model and how to run it.

    ``compile`` is the mode of ``torch.compile``, ``None`` for none. ``num_blocks`` and ``max_batch_tokens``
    are those of continuous batching, ``None`` where they are to fit each batch. ``assistant`` names a model
    that drafts, ``prompt_lookup_num_tokens`` is how many tokens are drafted from the prompt.
    """

    dtype: str = "auto"
    attn_implementation: str | None = None
    compile: str | None = None
    quantization: str | None = None
    batching: str = "static"
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    assistant: str | None = None
    prompt_lookup_num_tokens: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], *, on_cpu: bool) -> LoadOptions:
        """Check what a test asks for. Raises ``BackendError`` with one line for what cannot be."""
        values = {name: value for name, value in given.items() if name in cls.__dataclass_fields__}
        if isinstance(values.get("compile"), bool):
            values["compile"] = "reduce-overhead" if values["compile"] else None
        options = cls(**values)
        # The later ones look up what the first have found to be known.
        for problem in chain(options._unknown(), options._unavailable(on_cpu), options._at_odds()):
            raise BackendError(f"transformers: {problem}")
        return options

    @property
    def continuous(self) -> bool:
        """Whether requests join and leave a batch as they come and end."""
        return self.batching == "continuous"

    @property
    def assisted(self) -> bool:
        """Whether something drafts tokens that the model then checks."""
        return self.assistant is not None or self.prompt_lookup_num_tokens is not None

    def check(self, params: GenerationParams, batch: int) -> None:
        """Raises ``BackendError`` where a call asks for what these options rule out."""
        for problem in self._ruled_out(params, batch):
            raise BackendError(f"transformers: {problem}")

    def check_degrees(self, degrees: Parallel) -> None:
        """Raises ``BackendError`` for options that are not offered where a model is on several devices."""
        given = {
            "quantization": self.quantization,
            "compile": self.compile,
            "batching='continuous'": self.continuous,
            "assistant": self.assistant,
            "prompt_lookup_num_tokens": self.prompt_lookup_num_tokens,
        }
        for kind in ("tensor", "placement"):
            degree = getattr(degrees, kind)
            names = [name for name, value in given.items() if value]
            if degree > 1 and names:
                raise BackendError(
                    f"transformers: {', '.join(names)} and {kind}={degree} are not offered together; "
                    "leave one out"
                )

    def check_embedding(self) -> None:
        """Raises ``BackendError`` for options that say how to generate, which embedding would ignore."""
        given = {
            "batching": self.continuous,
            "compile": self.compile,
            "assistant": self.assistant,
            "prompt_lookup_num_tokens": self.prompt_lookup_num_tokens,
        }
        names = [name for name, value in given.items() if value]
        if names:
            raise BackendError(
                f"transformers: embed runs one padded batch; {', '.join(names)} is for generate, leave it out"
            )

    def _unknown(self) -> Iterator[str]:
        for name, known in (
            ("dtype", DTYPES),
            ("attn_implementation", (None, *ATTENTIONS)),
            ("compile", (None, *COMPILE_MODES)),
            ("quantization", (None, *QUANTIZERS)),
            ("batching", BATCHING_KINDS),
        ):
            value = getattr(self, name)
            if value not in known:
                names = ", ".join(each for each in known if each is not None)
                yield f"{name} is {value!r}, needs one of {names}"
        for name in ("num_blocks", "max_batch_tokens", "prompt_lookup_num_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                yield f"{name} is {value!r}, needs a whole number of 1 or more"
        assistant = getattr(self, "assistant")  # noqa: B009 - tests may have given anything
        if not (assistant is None or isinstance(assistant, str)):
            yield f"assistant is {assistant!r}, needs a model's name, as for --energy-model"

    def _unavailable(self, on_cpu: bool) -> Iterator[str]:
        attention = self.attn_implementation
        if attention in GPU_ATTENTIONS and on_cpu:
            yield f"{attention} does not run on a CPU; use sdpa or eager"
        needs = ATTENTIONS[attention] if attention is not None else None
        if needs is not None and not is_installed(needs[0]):
            yield f"{attention} needs the module {needs[0]}, which is not installed; {needs[1]}"
        if self.quantization is not None:
            package = QUANTIZERS[self.quantization]
            if not is_installed(package.module):
                yield (
                    f"quantization {self.quantization!r} needs {package.name}, which is not installed; "
                    f"{package.install}"
                )

    def _at_odds(self) -> Iterator[str]:
        if self.continuous and self.compile:
            yield "compile and batching='continuous' are not offered together; leave one out"
        if self.continuous and self.assisted:
            yield "assisted generation takes one prompt at a time; leave out batching='continuous'"
        if self.continuous and self.attn_implementation == "flex_attention":
            yield "batching='continuous' runs with sdpa, eager or flash attention, not with flex_attention"
        if self.compile and self.assisted:
            yield "assisted generation needs a cache that grows, compile one that does not; leave one out"
        if self.quantization == "8bit" and self.dtype != "float16":
            yield "quantization '8bit' multiplies in float16 whatever the dtype; give dtype='float16'"
        if self.assistant is not None and self.prompt_lookup_num_tokens is not None:
            yield "assistant and prompt_lookup_num_tokens both draft tokens; leave one out"
        if not self.continuous:
            for name in ("num_blocks", "max_batch_tokens"):
                if getattr(self, name) is not None:
                    yield f"{name} is an option of batching='continuous'; leave it out"

    def _ruled_out(self, params: GenerationParams, batch: int) -> Iterator[str]:
        if self.compile and params.cache != "static":
            yield "compile needs cache='static', whose shapes stay as they are; give it to generate"
        if self.continuous and params.cache != "dynamic":
            yield f"batching='continuous' has a paged cache of its own; leave out cache={params.cache!r}"
        if self.continuous and params.do_sample:
            yield (
                "batching='continuous' draws in the order in which requests are scheduled, so that no seed "
                "repeats it; use do_sample=False"
            )
        if self.assisted and params.cache != "dynamic":
            yield f"assisted generation needs a cache that grows; leave out cache={params.cache!r}"
        if self.assisted and batch > 1:
            yield (
                f"assisted generation takes one prompt at a time and there are {batch}; give one, or leave "
                "out assistant and prompt_lookup_num_tokens"
            )
