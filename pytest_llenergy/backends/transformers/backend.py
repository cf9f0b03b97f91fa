# SPDX-License-Identifier: Apache-2.0
"""The transformers backend in a rank: load a model, prepare batches and embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.backends.base import Job, RankContext
from pytest_llenergy.backends.batches import check_lengths, encode_prompts
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.options import (
    PROMPT_LOOKUP,
    Speculative,
    find_step_tokens,
    select_options,
)
from pytest_llenergy.backends.precision import list_types, type_name
from pytest_llenergy.backends.tasks import EmbeddingParams, GenerationParams, Result
from pytest_llenergy.backends.transformers import SPEC, jobs
from pytest_llenergy.backends.transformers.embeddings import is_encoder, prepare_embedding
from pytest_llenergy.backends.transformers.flops import count_flops
from pytest_llenergy.backends.transformers.jobs import TransformersJob, generation_config
from pytest_llenergy.backends.transformers.options import (
    RESERVED,
    compile_config,
    compile_job,
    refuse_together,
)
from pytest_llenergy.backends.transformers.parallel import check_degrees, load_onto_devices
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.record.timeline import Flops


class TransformersBackend:
    """``AutoModelForCausalLM.generate`` with left padding and an attention mask.

    A model without a generating head is loaded by ``AutoModel``, to embed.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._tensor = context.parallel.tensor
        self._device = "cpu" if context.devices == ("cpu",) else "cuda:0"
        self._label = model.label
        self._options = options
        passed = select_options("transformers", options, SPEC.capabilities.options, RESERVED)
        names = vars(transformers.GenerationConfig())
        #: Options of the library that apply to ``generate``; others are those of ``from_pretrained``.
        self._generation = {name: value for name, value in passed.items() if name in names}
        loading = {name: value for name, value in passed.items() if name not in names}
        self._draft = Speculative.parse("transformers", options)
        if self._draft is not None and self._draft.method != PROMPT_LOOKUP:
            raise BackendError(f"transformers: speculative: the only method is {PROMPT_LOOKUP}")
        self._step = find_step_tokens("transformers", options)
        mode = options.get("compile")
        self._mode = "reduce-overhead" if mode is True else mode or None
        for kind in ("tensor", "placement"):
            if (degree := getattr(context.parallel, kind)) > 1:
                alone = ("quantization_config", "compile", "speculative", "lora")
                refuse_together(f"{kind}={degree}", options, alone)
        with translate_load_errors("transformers", model, options):
            placement = self._read(model, loading, context)
        attention, dtype = str(self._model.config._attn_implementation), type_name(str(self._model.dtype))
        for name, value in {"attention": attention, "dtype": dtype}.items():
            if options.get(name) not in (None, "auto", value):
                raise BackendError(
                    f"transformers: {name} is {options[name]!r}, and {model.label} runs with {value}"
                )
        self._eos = self._drop_generation_config() if self._generates else set[int]()
        return BackendInfo(
            name="transformers",
            version=transformers.__version__,
            model=model.label,
            model_revision=getattr(self._model.config, "_commit_hash", None),
            dtype=dtype,
            precision=self._precision(dtype),
            options={
                **{name: str(value) for name, value in options.items()},
                "attention": attention,
                "torch": str(torch.__version__),
                "device": self._device,
                **placement,
                **self._apply_options(),
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
            kv_cache=dtype if self._generates else None,
            activations=None if method else "none",
        )

    def _read(
        self, model: ModelSource, loading: Mapping[str, Any], context: RankContext
    ) -> dict[str, Primitive]:
        """Read model and tokenizer. Returns which devices they are on, for the record."""
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

        path = pretrained_path(model)
        config = AutoConfig.from_pretrained(path)
        check_degrees(config, context.parallel, model.label)
        dtype = self._options.get("dtype") or "auto"
        keywords: dict[str, Any] = {"dtype": dtype}
        if (attention := self._options.get("attention")) is not None:
            keywords["attn_implementation"] = attention
        if "quantization_config" in loading:
            # Some quantised weights cannot be moved.
            keywords["device_map"] = {"": self._device}
        self._generates = not is_encoder(config)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        kind = AutoModelForCausalLM if self._generates else AutoModel
        keywords = dict(**keywords, **loading)
        loaded, placement = load_onto_devices(kind, path, keywords, context, self._device)
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
        """Prepare a padded batch, compiled if that was asked for."""
        if not self._generates:
            raise BackendError(f"transformers: model {self._label} cannot generate; use backend.embed")
        if self._draft and (self._step or params.num_beams > 1):
            raise BackendError(
                "transformers: speculative takes a whole prompt and makes one sequence; leave out "
                "chunked_prefill and num_beams"
            )
        rows = encode_prompts("transformers", self._encode, prompts)
        inputs = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
        if params.repetition_penalty != 1 and not bool(inputs["attention_mask"].all()):
            raise BackendError(
                "transformers: repetition_penalty would also apply to the token that pads shorter prompts; "
                "give prompts of one length"
            )
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths("transformers", [len(row) for row in rows], params.max_new_tokens, limit)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})
        pad = self._tokenizer.pad_token_id
        mode = self._mode
        with jobs.translate_value_errors(self._generation):
            config = generation_config(
                params,
                ends,
                pad,
                # On a GPU transformers would compile the steps of a static cache by default.
                **({"compile_config": compile_config(mode)} if mode else {"disable_compile": True}),
                **self._lookup(),
                prefill_chunk_size=self._step,
                **self._generation,
            )
        job = TransformersJob(
            model=self._model,
            tokenizer=self._tokenizer,
            inputs=dict(inputs),
            config=config,
            seed=params.seed,
            ends=ends,
            drafts=self._draft is not None,
            passed=self._generation,
        )
        if mode:
            compile_job(job)
        return job

    def prepare_embedding(self, texts: Sequence[str], params: EmbeddingParams) -> Job:
        """Prepare a padded batch of texts for the model without its generating head."""
        ignored = ("compile", "chunked_prefill", "speculative", *self._generation)
        refuse_together("embed", self._options, ignored)
        return prepare_embedding(self._model, self._tokenizer, texts, params, self._device)

    def flops(self, job: Any, _done: Result) -> Flops:
        return count_flops(self._model, job, self._tensor)

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

    def _apply_options(self) -> dict[str, Primitive]:
        """Load what options need besides the model. Returns what goes into the record."""
        recorded: dict[str, Primitive] = {"batching": "static"}
        if self._mode:
            recorded |= {"compile": self._mode, "compiled": "decoding steps"}
        if (lora := self._options.get("lora")) is not None:
            recorded |= jobs.load_adapter(self._model, str(lora))
        return recorded | self._lookup()

    def _lookup(self) -> dict[str, Primitive]:
        """Return what drafts from the prompt, for ``GenerationConfig`` and records."""
        draft = self._draft
        if draft is None:
            return {}
        return {"prompt_lookup_num_tokens": draft.num_tokens, "max_matching_ngram_size": draft.max_ngram}
