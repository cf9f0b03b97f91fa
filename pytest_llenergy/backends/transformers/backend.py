# SPDX-License-Identifier: Apache-2.0
"""Loading a model, and preparing batches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.backends.base import Job, RankContext
from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import ModelSource, explain_load_error
from pytest_llenergy.backends.tasks import EmbeddingParams, GenerationParams, Result
from pytest_llenergy.backends.transformers import continuous, jobs
from pytest_llenergy.backends.transformers import options as quantize
from pytest_llenergy.backends.transformers.continuous import ContinuousBatcher, ContinuousJob
from pytest_llenergy.backends.transformers.flops import job_flops
from pytest_llenergy.backends.transformers.jobs import (
    TransformersJob,
    generation_config,
    is_encoder,
    prepare_embedding,
)
from pytest_llenergy.backends.transformers.options import LoadOptions, compile_config, compile_job
from pytest_llenergy.backends.transformers.parallel import check_degrees, load_onto_devices
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import Flops


class TransformersBackend:
    """``AutoModelForCausalLM.generate`` with left padding and an attention mask; the load options are those
    of ``LoadOptions``. A model that only encodes is loaded by ``AutoModel``, to embed.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._tensor = context.parallel.tensor
        self._device = "cpu" if context.devices == ("cpu",) else "cuda:0"
        self._engine: ContinuousBatcher | None = None
        self._assistant: Any = None
        self._label = model.label
        chosen = self._options = LoadOptions.parse(options, on_cpu=self._device == "cpu")
        chosen.check_degrees(context.parallel)
        seen = self._read(model, chosen, context)
        loaded, attention = self._model, str(self._model.config._attn_implementation)
        if chosen.attn_implementation not in (None, attention):
            raise BackendError(
                f"transformers: {chosen.attn_implementation} was asked for and model {model.label} runs with "
                f"{attention}; ask for that"
            )
        self._eos = self._without_defaults() if self._generates else set[int]()
        return BackendInfo(
            name="transformers",
            version=transformers.__version__,
            model=model.label,
            model_revision=getattr(loaded.config, "_commit_hash", None),
            dtype=str(loaded.dtype).removeprefix("torch."),
            options={
                **{name: str(value) for name, value in options.items()},
                "attn_implementation": attention,
                "torch": str(torch.__version__),
                "device": self._device,
                **seen,
                **self._prepared(chosen),
            },
        )

    def _read(self, model: ModelSource, chosen: LoadOptions, context: RankContext) -> dict[str, Primitive]:
        """Model and tokenizer. Returns what is seen of the devices they are on. Raises ``ModelError``."""
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

        keywords: dict[str, Any] = {"dtype": chosen.dtype}
        if chosen.attn_implementation is not None:
            keywords["attn_implementation"] = chosen.attn_implementation
        path = pretrained_path(model)
        try:
            check_degrees(path, context.parallel, model.label)
            config = AutoConfig.from_pretrained(path)
            if chosen.quantization is not None:
                keywords |= quantize.quantization_keywords(
                    chosen.quantization, config, chosen.dtype, self._device
                )
            self._generates = not is_encoder(config)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
            kind = AutoModelForCausalLM if self._generates else AutoModel
            loaded, seen = load_onto_devices(kind, path, keywords, context, self._device)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelError(explain_load_error(model, error)) from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = loaded.eval()
        return seen

    def _without_defaults(self) -> set[int]:
        """Take the model's generation config away; returns the ends of sequence that it named.

        ``generate()`` fills what a call leaves open from the model's own defaults, the end of sequence and
        penalties among them. None of that would be in the record.
        """
        from transformers import GenerationConfig

        eos = self._model.generation_config.eos_token_id
        eos = self._tokenizer.eos_token_id if eos is None else eos
        self._model.generation_config = GenerationConfig()
        return {eos} if isinstance(eos, int) else set(eos or ())

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        """A padded batch; with continuous batching one request a prompt. Compiles what is to be compiled."""
        self._end()
        if not self._generates:
            raise BackendError(
                f"transformers: model {self._label} only encodes and generates nothing; use backend.embed"
            )
        self._options.check(params, len(prompts))
        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True).to(self._device)
        mask = inputs["attention_mask"]
        if int(mask.sum(dim=1).min()) == 0:
            raise BackendError("transformers: a prompt has no tokens; leave empty prompts out")
        self._check_room(int(mask.sum(dim=1).max()) + params.max_new_tokens)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})
        pad = self._tokenizer.pad_token_id
        if self._options.continuous:
            ids = [
                row[row_mask.bool()].tolist() for row, row_mask in zip(inputs["input_ids"], mask, strict=True)
            ]
            self._engine = ContinuousBatcher(
                self._model, generation_config(params, ends, pad), ids, self._options
            )
            return ContinuousJob(self._engine, self._tokenizer)
        mode = self._options.compile
        config = generation_config(
            params,
            ends,
            pad,
            # On a GPU transformers would compile a static cache's steps unasked.
            **({"compile_config": compile_config(mode)} if mode else {"disable_compile": True}),
            **jobs.prompt_lookup_options(self._options.prompt_lookup_num_tokens),
        )
        more = {} if self._assistant is None else {"assistant_model": self._assistant}
        job = TransformersJob(self._model, self._tokenizer, dict(inputs), config, params.seed, ends, more)
        if mode:
            compile_job(job)
        return job

    def prepare_embedding(self, texts: Sequence[str], params: EmbeddingParams) -> Job:
        """A padded batch of texts, for all of the model but the head that generates."""
        self._end()
        self._options.check_embedding()
        return prepare_embedding(self._model, self._tokenizer, texts, params, self._device)

    def flops(self, job: Any, done: Result) -> Flops:
        if isinstance(job, ContinuousJob):
            return Flops.unknown(
                "continuous batching runs in a thread that torch.utils.flop_counter does not see"
            )
        return job_flops(self._model, job, done, self._tensor)

    def synchronize(self) -> None:
        if self._device != "cpu":
            # Those of this rank, of which placement has several.
            for index in range(self._torch.cuda.device_count()):
                self._torch.cuda.synchronize(index)

    def close(self) -> None:
        self._end()
        del self._model, self._assistant
        if self._device != "cpu":
            self._torch.cuda.empty_cache()

    def _prepared(self, chosen: LoadOptions) -> dict[str, Primitive]:
        """Load what an option needs besides the model; what of it goes into records."""
        told: dict[str, Primitive] = {"batching": chosen.batching}
        if chosen.compile:
            told |= {"compile": chosen.compile, "compiled": "decoding steps"}
        if chosen.quantization:
            told |= quantize.describe_quantization(chosen.quantization, self._model)
        if chosen.continuous:
            told |= continuous.describe_settings(chosen.num_blocks, chosen.max_batch_tokens)
        if chosen.assistant is not None:
            self._assistant, described = jobs.load_assistant(chosen.assistant, self._model)
            told |= described
        return told | jobs.prompt_lookup_options(chosen.prompt_lookup_num_tokens)

    def _check_room(self, tokens: int) -> None:
        """Beyond its positions a model goes on without an error, and gives nonsense."""
        room = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and tokens > room:
            raise BackendError(
                f"transformers: longest prompt and max_new_tokens are {tokens} tokens; the model has room "
                f"for {room}"
            )

    def _end(self) -> None:
        """Free the cache of the last batch."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
