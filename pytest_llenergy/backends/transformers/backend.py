# SPDX-License-Identifier: Apache-2.0
"""The transformers backend in a rank: static batches, with a timestamp per step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.batches import batch_result, check_lengths, encode_prompts
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, first_error_line, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import list_types, type_name
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.backends.transformers import SPEC
from pytest_llenergy.backends.transformers.parallel import load_onto_devices
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import BackendInfo, Precision

#: Options of transformers that decide about devices, the model, or how many sequences a prompt gets.
RESERVED = (
    *("device_map", "max_memory", "device_mesh", "tp_plan", "tp_size", "distributed_config"),
    *("offload_folder", "config", "state_dict", "num_return_sequences", "return_dict_in_generate"),
)

#: What transformers raises for options and combinations that it does not take.
INVALID_VALUE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


@contextmanager
def translate_value_errors() -> Iterator[None]:
    """Raise what transformers raises for values that it checks late as ``BackendError``."""
    try:
        yield
    except INVALID_VALUE as error:
        raise BackendError(f"transformers cannot generate: {first_error_line(error)}") from error


class StepClock:
    """A streamer that records when each decoding step produced its tokens.

    ``generate`` calls ``put`` once with the prompt and then after each step, when its tokens have been copied
    to the host, so the device has finished the step. A step gives each sequence one token, shape
    ``(batch,)``; with drafted tokens it gives the only sequence several, shape ``(1, tokens)``.
    """

    def __init__(self) -> None:
        self.tokens_ns: list[int] = []
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        """Record the time of a step, once per token that it gave a sequence."""
        if self._prompt_seen:
            count = tokens.shape[1] if tokens.dim() == 2 else 1
            self.tokens_ns.extend([time.monotonic_ns()] * count)
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the last step was already recorded."""


@dataclass
class TransformersJob:
    """A padded batch on the device.

    Attributes:
        ends: Tokens that end a sequence.
    """

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]

    def run(self) -> tuple[Any, StepClock]:
        """Return the token ids with prompts, and the times of the steps."""
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        with torch.inference_mode(), translate_value_errors():
            output = self.model.generate(**self.inputs, generation_config=self.config, streamer=clock)
        return output, clock

    def result(self, outcome: tuple[Any, StepClock]) -> Generation:
        output, clock = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [cut_at_end(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return batch_result(texts, token_ids, mask.sum(dim=1).tolist(), clock.tokens_ns)


class TransformersBackend:
    """``AutoModelForCausalLM.generate`` with left padding and an attention mask."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._device = "cpu" if context.devices == ("cpu",) else "cuda:0"
        self._options = options
        passed = select_options("transformers", options, SPEC.capabilities.options, RESERVED)
        names = vars(transformers.GenerationConfig())
        #: Options of the library that apply to ``generate``; others are those of ``from_pretrained``.
        self._generation = {name: value for name, value in passed.items() if name in names}
        loading = {name: value for name, value in passed.items() if name not in names}
        with translate_load_errors("transformers", model, options):
            placement = self._read(model, loading, context)
        dtype = type_name(str(self._model.dtype))
        if options.get("dtype") not in (None, "auto", dtype):
            raise BackendError(
                f"transformers: dtype is {options['dtype']!r}, and {model.label} runs with {dtype}"
            )
        self._eos = self._drop_generation_config()
        return BackendInfo(
            name="transformers",
            version=transformers.__version__,
            model=model.label,
            model_revision=getattr(self._model.config, "_commit_hash", None),
            dtype=dtype,
            precision=self._precision(dtype),
            options={
                **{name: str(value) for name, value in options.items()},
                "attn_implementation": str(self._model.config._attn_implementation),
                "torch": str(torch.__version__),
                "device": self._device,
                **placement,
            },
        )

    def _precision(self, dtype: str) -> Precision:
        """Return the types of the loaded parameters, and of the cache, which has that of the arithmetic."""
        counts: Counter[str] = Counter()
        for each in self._model.parameters():
            counts[str(each.dtype)] += each.numel()
        # Quantised parameters may pretend to have the type of the arithmetic.
        quantizer = getattr(self._model, "hf_quantizer", None)
        method = None
        if quantizer is not None:
            found = quantizer.quantization_config.quant_method
            # An enumeration, or the name of a registered one.
            method = str(getattr(found, "value", found))
        return Precision(
            weights=", ".join(filter(None, (method, list_types(counts)))),
            compute=dtype,
            kv_cache=dtype,
        )

    def _read(
        self, model: ModelSource, loading: Mapping[str, Any], context: RankContext
    ) -> dict[str, Primitive]:
        """Read model and tokenizer. Returns which devices they are on, for the record."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = pretrained_path(model)
        keywords: dict[str, Any] = {"dtype": self._options.get("dtype") or "auto"}
        if "quantization_config" in loading:
            # Some quantised weights cannot be moved.
            keywords["device_map"] = {"": self._device}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        keywords = dict(**keywords, **loading)
        loaded, placement = load_onto_devices(AutoModelForCausalLM, path, keywords, context, self._device)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = loaded.eval()
        return placement

    def _drop_generation_config(self) -> set[int]:
        """Remove the model's generation config; returns the end-of-sequence tokens that it named.

        ``generate()`` fills missing arguments from the model's own defaults, such as the end of sequence and
        penalties. None of that would be recorded.
        """
        from transformers import GenerationConfig

        eos = self._model.generation_config.eos_token_id
        eos = self._tokenizer.eos_token_id if eos is None else eos
        self._model.generation_config = GenerationConfig()
        return {eos} if isinstance(eos, int) else set(eos or ())

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> TransformersJob:
        from transformers import GenerationConfig

        rows = encode_prompts("transformers", self._encode, prompts)
        inputs = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths("transformers", [len(row) for row in rows], params.max_new_tokens, limit)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})
        # On a GPU transformers would compile the steps of a static cache by default.
        compiles = {"disable_compile", "compile_config"} & self._generation.keys()
        with translate_value_errors():
            # Complete, so that nothing is left to the defaults of a model.
            config = GenerationConfig(
                max_new_tokens=params.max_new_tokens,
                eos_token_id=sorted(ends) or None,
                pad_token_id=self._tokenizer.pad_token_id,
                cache_implementation="static" if params.cache == "static" else None,
                do_sample=params.do_sample,
                **params.drawn,
                **({} if compiles else {"disable_compile": True}),
                **self._generation,
            )
        return TransformersJob(
            model=self._model,
            tokenizer=self._tokenizer,
            inputs=dict(inputs),
            config=config,
            seed=params.seed,
            ends=ends,
        )

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("transformers", self._encode, texts)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def synchronize(self) -> None:
        if self._device != "cpu":
            # All devices of this rank; with placement there are several.
            for index in range(self._torch.cuda.device_count()):
                self._torch.cuda.synchronize(index)

    def close(self) -> None:
        del self._model
        if self._device != "cpu":
            self._torch.cuda.empty_cache()
