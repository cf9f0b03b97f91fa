# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: static batches, one process for each device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import (
    BackendSpec,
    Capabilities,
    Generation,
    GenerationParams,
    RankContext,
)
from pytest_llenergy.backends.convert import local_directory
from pytest_llenergy.backends.hub import explain
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

SPEC = BackendSpec(
    name="transformers",
    factory="pytest_llenergy.backends.transformers:TransformersBackend",
    requires=("torch", "transformers"),
    install="pip install 'pytest-llenergy[transformers]'",
    capabilities=Capabilities(
        framework="torch",
        preload=("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
        data=True,
        gpu=True,
        options=("dtype", "attn_implementation"),
        caches=("dynamic", "static"),
        timestamps="per step, after the device has finished it",
    ),
    refuses=lambda model: (
        "transformers does not read OpenVINO IR"
        if model.kind == "directory" and not _has(model, "config.json")
        else None
    ),
)


def _has(model: ModelSource, file: str) -> bool:
    return (Path(model.location) / file).exists()


class StepClock:
    """A streamer that only notes when each decoding step had its tokens.

    ``generate`` calls ``put`` once with the prompt and then after each step, when the tokens have
    been copied to the host, that is after the device has finished the step.
    """

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self._prompt_seen = False

    def put(self, _tokens: Any) -> None:
        """Note the time of a step."""
        if self._prompt_seen:
            self.steps_ns.append(time.monotonic_ns())
        self._prompt_seen = True

    def end(self) -> None:
        """The last step has been seen already."""


@dataclass
class TransformersJob:
    """A padded batch on the device. ``ends`` are the tokens that end a sequence."""

    model: Any
    tokenizer: Any
    inputs: dict[str, Any]
    config: Any
    seed: int
    ends: frozenset[int]

    def run(self) -> tuple[Any, StepClock]:
        import torch

        torch.manual_seed(self.seed)
        clock = StepClock()
        with torch.inference_mode():
            output = self.model.generate(**self.inputs, generation_config=self.config, streamer=clock)
        return output, clock

    def result(self, outcome: tuple[Any, StepClock]) -> Generation:
        output, clock = outcome
        mask = self.inputs["attention_mask"]
        token_ids = [_produced(row, self.ends) for row in output[:, mask.shape[1] :].tolist()]
        steps_ns = clock.steps_ns
        requests = [
            RequestTimeline(
                input_tokens=int(length),
                output_tokens=len(ids),
                first_token_ns=steps_ns[0],
                last_token_ns=steps_ns[len(ids) - 1],
            )
            for length, ids in zip(mask.sum(dim=1).tolist(), token_ids, strict=True)
        ]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


class TransformersBackend:
    """``AutoModelForCausalLM.generate`` with left padding and an attention mask.

    Load options: ``dtype`` (``auto``, ``float32``, ``bfloat16``, ``float16``) and
    ``attn_implementation`` (``sdpa``, ``eager``, …), as in ``from_pretrained``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._device = "cpu" if context.devices == ("cpu",) else "cuda:0"
        dtype = options.get("dtype", "auto")
        if dtype != "auto" and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise BackendError(f"transformers: dtype {dtype!r} is none of torch's; try 'float32'")
        keywords: dict[str, Any] = {"dtype": dtype}
        if "attn_implementation" in options:
            keywords["attn_implementation"] = options["attn_implementation"]
        path = local_directory(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, **keywords)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelError(explain(model, error)) from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = loaded.to(self._device).eval()
        eos = loaded.generation_config.eos_token_id
        eos = self._tokenizer.eos_token_id if eos is None else eos
        self._eos = {eos} if isinstance(eos, int) else set(eos or ())
        # generate() fills what a call leaves open from the model's own defaults, the end of sequence and
        # penalties among them. None of that would be in the record, so the model keeps no defaults.
        loaded.generation_config = GenerationConfig()
        return BackendInfo(
            name="transformers",
            version=transformers.__version__,
            model=model.label,
            model_revision=getattr(loaded.config, "_commit_hash", None),
            dtype=str(loaded.dtype).removeprefix("torch."),
            options={
                **{name: str(value) for name, value in options.items()},
                "attn_implementation": str(loaded.config._attn_implementation),
                "torch": str(torch.__version__),
                "device": self._device,
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> TransformersJob:
        from transformers import GenerationConfig

        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True).to(self._device)
        mask = inputs["attention_mask"]
        if int(mask.sum(dim=1).min()) == 0:
            raise BackendError("transformers: a prompt has no tokens; leave empty prompts out")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        sampling: dict[str, Any] = {"do_sample": False}
        if params.do_sample:
            sampling = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
            }
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=self._tokenizer.pad_token_id,
            cache_implementation="static" if params.cache == "static" else None,
            **sampling,
        )

        return TransformersJob(
            self._model, self._tokenizer, dict(inputs), config, params.seed, frozenset(ends)
        )

    def synchronize(self) -> None:
        if self._device != "cpu":
            self._torch.cuda.synchronize()

    def close(self) -> None:
        del self._model
        if self._device != "cpu":
            self._torch.cuda.empty_cache()


def _produced(row: list[int], ends: frozenset[int]) -> list[int]:
    """A row up to and including the first token that ended it; what follows is padding."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
