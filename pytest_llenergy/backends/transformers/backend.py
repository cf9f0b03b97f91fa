# SPDX-License-Identifier: Apache-2.0
"""The transformers backend in a rank: load a model, prepare batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.backends.base import Job, RankContext
from pytest_llenergy.backends.batches import check_lengths, encode_prompts
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import list_types, type_name
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.transformers import SPEC, jobs
from pytest_llenergy.backends.transformers.jobs import TransformersJob, generation_config
from pytest_llenergy.backends.transformers.parallel import load_onto_devices
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import BackendInfo, Precision

#: Options of transformers that decide about devices, the model, or how many sequences a prompt gets.
RESERVED = (
    *("device_map", "max_memory", "device_mesh", "tp_plan", "tp_size", "distributed_config"),
    *("offload_folder", "config", "state_dict", "num_return_sequences", "return_dict_in_generate"),
)

#: Options that do not work with parts of a model on several devices.
UNSHARDED = ("quantization_config", "prompt_lookup_num_tokens")


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
        for kind in ("tensor", "placement"):
            if (degree := getattr(context.parallel, kind)) > 1:
                given = [name for name in UNSHARDED if options.get(name)]
                if given:
                    raise BackendError(f"transformers: {kind}={degree} does not work with {', '.join(given)}")
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

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        """Prepare a padded batch."""
        rows = encode_prompts("transformers", self._encode, prompts)
        inputs = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths("transformers", [len(row) for row in rows], params.max_new_tokens, limit)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})
        pad = self._tokenizer.pad_token_id
        # On a GPU transformers would compile the steps of a static cache by default.
        compiles = {"disable_compile", "compile_config"} & self._generation.keys()
        with jobs.translate_value_errors(self._generation):
            config = generation_config(
                params,
                ends,
                pad,
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
            passed=self._generation,
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
