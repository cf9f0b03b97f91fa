# SPDX-License-Identifier: Apache-2.0
"""Load options of transformers: which combinations work; quantisation and compilation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.backends.options import (
    DEVICES,
    DRAFT_MODEL,
    PROMPT_LOOKUP,
    SOURCE,
    Speculative,
    find_step_tokens,
    select_options,
)
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import Parallel

_DRAFTING = "it is part of the load option speculative"
_COUNTED = "outputs are counted as one sequence of tokens per prompt"

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
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _DRAFTING),
    **dict.fromkeys(("num_assistant_tokens", "is_assistant"), _DRAFTING),
    **dict.fromkeys(("num_return_sequences", "return_dict_in_generate", "stop_strings"), _COUNTED),
    **dict.fromkeys(("pad_token_id", "use_cache", "max_time"), _COUNTED),
}

#: Values of ``quantization`` with the package that each needs. ``int8dyn`` and ``8bit`` also quantise
#: activations while the model runs.
QUANTIZERS = {
    **{"int8wo": "torchao", "int8dyn": "torchao", "int8": "optimum-quanto"},
    **{"8bit": "bitsandbytes", "nf4": "bitsandbytes"},
}
QUANTISES_ACTIVATIONS = ("int8dyn", "8bit")


@dataclass(frozen=True)
class LoadOptions:
    """The load options of a test.

    Attributes:
        given: All of them.
        loading: Those that are passed on to ``from_pretrained``.
        generation: Those that are passed on to ``GenerationConfig``.
        speculative: How tokens are drafted; None if they are not.
        step: Tokens of a step of the prefill; None for whole prompts.
        mode: Mode of ``torch.compile``; None for none.
        continuous: Whether requests join and leave a batch as they come and end.
    """

    given: Mapping[str, Any]
    loading: Mapping[str, Any]
    generation: Mapping[str, Any]
    speculative: Speculative | None
    step: int | None
    mode: str | None
    continuous: bool

    @classmethod
    def parse(cls, options: Mapping[str, Any], generation_names: Collection[str]) -> LoadOptions:
        """Sort the load options.

        Raises:
            BackendError: A value is unknown, or this backend sets an option itself.
        """
        passed = select_options("transformers", options, SPEC.capabilities.options, RESERVED)
        choices = {
            "quantization": (None, *QUANTIZERS),
            "batching": (None, "static", "continuous"),
        }
        for name, known in choices.items():
            if options.get(name) not in known:
                listed = ", ".join(known[1:])  # type: ignore[arg-type]
                raise BackendError(f"transformers: {name} is {options[name]!r}, needs one of {listed}")
        speculative = Speculative.parse("transformers", options)
        if speculative is not None and speculative.method not in (DRAFT_MODEL, PROMPT_LOOKUP):
            raise BackendError(f"transformers: speculative: it has no method {speculative.method}")
        mode = options.get("compile")
        return cls(
            given=options,
            loading={name: value for name, value in passed.items() if name not in generation_names},
            generation={name: value for name, value in passed.items() if name in generation_names},
            speculative=speculative,
            step=find_step_tokens("transformers", options),
            mode="reduce-overhead" if mode is True else mode or None,
            continuous=options.get("batching") == "continuous",
        )

    @property
    def quantization(self) -> str | None:
        """Key of ``QUANTIZERS``."""
        return self.given.get("quantization")

    @property
    def lookup(self) -> dict[str, Primitive]:
        """What drafts from the prompt, for ``GenerationConfig`` and records; empty if nothing does."""
        draft = self.speculative
        if draft is None or draft.method != PROMPT_LOOKUP:
            return {}
        return {"prompt_lookup_num_tokens": draft.num_tokens, "max_matching_ngram_size": draft.max_ngram}

    def check_degrees(self, degrees: Parallel) -> None:
        """Raise ``BackendError`` for options that do not work on several devices."""
        for kind in ("tensor", "placement"):
            if (degree := getattr(degrees, kind)) > 1:
                names = ("quantization", "compile", "batching", "speculative", "lora")
                self._refuse(f"{kind}={degree}", names)

    def check(self, params: GenerationParams) -> None:
        """Raise ``BackendError`` for options and parameters that transformers would ignore in silence."""
        if self.continuous:
            also = [*self.generation, *params.extras]
            also += ["cache"] if params.cache != "dynamic" else []
            also += ["do_sample"] if params.do_sample else []
            self._refuse("batching='continuous'", ("compile", "speculative", "chunked_prefill"), also)
        if self.speculative and (self.step or params.num_beams > 1):
            raise BackendError(
                "transformers: speculative takes a whole prompt and makes one sequence; leave out "
                "chunked_prefill and num_beams"
            )

    def check_embedding(self) -> None:
        """Raise ``BackendError`` for options of generation, which embedding would ignore."""
        names = ("batching", "compile", "chunked_prefill", "speculative")
        self._refuse("embed", names, [*self.generation])

    def _refuse(self, what: str, names: Collection[str], also: Collection[str] = ()) -> None:
        given = [name for name in names if self.given.get(name) not in (None, False, "static")]
        if found := ", ".join([*given, *also]):
            raise BackendError(f"transformers: {what} does not work with {found}; leave one out")


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
        BackendError: Nothing was compiled.
    """
    import torch

    torch.compiler.reset()
    before = count_compiled_graphs()
    try:
        job.run()
    except RuntimeError as error:
        raise BackendError(f"transformers: compile: {first_error_line(error)}") from error
    if count_compiled_graphs() == before:
        raise BackendError(
            "transformers: compile: generate compiled nothing; it does with cache='static', one beam and "
            "most architectures"
        )


def quantization_keywords(name: str, config: Any, dtype: str, device: str) -> dict[str, Any]:
    """Return keywords for ``from_pretrained``, the device included: some quantised weights cannot be moved.

    Args:
        name: Key of ``QUANTIZERS``.
        config: Config of the model.
        dtype: Type of everything not quantised, and of the arithmetic; ``auto`` is that of the config.
        device: Device of the weights.
    """
    import torch
    import transformers

    if QUANTIZERS[name] == "torchao":
        from torchao import quantization as torchao

        kind = {"int8wo": "Int8WeightOnlyConfig", "int8dyn": "Int8DynamicActivationInt8WeightConfig"}[name]
        settings: Any = transformers.TorchAoConfig(getattr(torchao, kind)())
    elif name == "int8":
        settings = transformers.QuantoConfig(weights="int8")
    elif name == "8bit":
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        compute = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute or torch.float32
        )
    return {"quantization_config": settings, "device_map": {"": device}}


def describe_quantization(name: str, model: Any) -> dict[str, Primitive]:
    """Return the quantizer and the number of quantised layers.

    Raises:
        BackendError: There are none.
    """
    package = QUANTIZERS[name]
    module = package.replace("-", ".")
    # A parameter is an instance of the weight's subclass, except for plain tensors.
    kinds = ((type(each), type(each.weight)) for each in model.modules() if hasattr(each, "weight"))
    layers = sum(any(f"{kind.__module__}.".startswith(f"{module}.") for kind in pair) for pair in kinds)
    if layers == 0:
        raise BackendError(f"transformers: {package} quantised no layer of this model")
    return {"quantizer": f"{package} {version(package)}", "quantized_layers": layers}
