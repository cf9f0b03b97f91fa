# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.convert import (
    GENAI_CONFIG,
    NO_TELEMETRY,
    download_hub_model,
    explain_missing_builder,
    is_onnx_directory,
    onnx_directory,
)
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RequestTimeline

# ONNX Runtime GenAI on the CPU: static batches, with the loop of decoding in our hands.


# What ONNX Runtime GenAI offers.


def refuses(model: ModelSource) -> str | None:
    """It reads its own directories, and what its builder can convert."""
    if is_onnx_directory(model):
        return None
    if model.kind != "directory" or (Path(model.location) / "config.json").exists():
        return explain_missing_builder(model)
    return f"onnxruntime reads directories with genai_config.json or config.json, not {model.label}"


SPEC = BackendSpec(
    name="onnxruntime",
    factory="pytest_llenergy.backends.onnxruntime:OnnxRuntimeBackend",
    requires=("onnxruntime_genai",),
    install="pip install 'pytest-llenergy[onnxruntime]'",
    capabilities=Capabilities(
        data=True,
        options=("precision",),
        caches=("dynamic", "static"),
        prefix_cache="none: every run has a generator of its own",
        timestamps="step",
        exact=True,
        clock="ours, after each step, when its tokens are on the host",
        reasons={
            "tensor": "a generator runs in one session",
            "pipeline": "a generator runs in one session",
            "placement": "only its CPU provider is used here",
            "gpu": "only its CPU provider is used here",
            "batching": "right-padded, since its fused attention counts positions from the start of a row",
        },
        sources={
            **dict.fromkeys(("launch", "managed_by", "cpu", "tasks", "hardware"), "tested"),
            **dict.fromkeys(("gpu", "tensor", "pipeline", "placement"), "this adapter"),
            "data": "tested",
            "caches": "tested",
            "batching": "tested",
            "prefix_cache": "tested",
            "timestamps": "tested",
            "options": "onnxruntime_genai/models/builder.py, --precision with the provider cpu",
        },
        hardware="CPU",
    ),
    refuses=refuses,
)


# One static batch, step by step.


@dataclass(frozen=True)
class Steps:
    """The tokens of each step, one a row, and when they were there."""

    tokens: list[list[int]]
    times_ns: list[int]


@dataclass
class OnnxRuntimeJob:
    """A right-padded batch; ``lengths`` are the prompts' token counts without padding.

    As in any static batch, a row that has ended is computed on until the last has; what comes after its end
    is not output.
    """

    genai: Any
    model: Any
    tokenizer: Any
    inputs: Any
    lengths: list[int]
    search: dict[str, Any]
    steps: int
    ends: frozenset[int]

    def generator(self) -> Any:
        """A new one, which knows nothing of earlier runs."""
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(**self.search)
        return self.genai.Generator(self.model, params)

    def run(self) -> Steps:
        generator = self.generator()
        generator.append_tokens(self.inputs)
        tokens: list[list[int]] = []
        times_ns: list[int] = []
        going = list(range(len(self.lengths)))
        for _ in range(self.steps):
            generator.generate_next_token()
            step: list[int] = generator.get_next_tokens().tolist()
            times_ns.append(time.monotonic_ns())
            tokens.append(step)
            if self.ends:
                going = [row for row in going if step[row] not in self.ends]
                if not going:
                    break
        return Steps(tokens, times_ns)

    def result(self, outcome: Steps) -> Generation:
        rows = zip(*outcome.tokens, strict=True)
        token_ids = [self._produced(list(row)) for row in rows]
        requests = [
            RequestTimeline(
                input_tokens=length,
                output_tokens=len(ids),
                first_token_ns=outcome.times_ns[0],
                last_token_ns=outcome.times_ns[len(ids) - 1],
                token_ns=tuple(outcome.times_ns[: len(ids)]),
            )
            for length, ids in zip(self.lengths, token_ids, strict=True)
        ]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        return Generation(texts=texts, token_ids=token_ids, requests=requests)

    def _produced(self, row: list[int]) -> list[int]:
        """A row up to and including the first token that ended it."""
        for index, token in enumerate(row):
            if token in self.ends:
                return row[: index + 1]
        return row


# Loading an ONNX model, converted where need be, and preparing batches for it.

#: The builder's precisions for the CPU, and how the weights are called in records.
PRECISIONS = {"fp32": "float32", "int8": "int8", "int4": "int4"}

#: The engine keeps its seed in a signed integer of 32 bits.
SEED_LIMIT = 2**31

#: Every other way to choose a token, switched off: the engine would take them from the model's own defaults,
#: which are not in the record.
PLAIN_SEARCH: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "chunk_size": 0,
}


@dataclass(frozen=True)
class ModelShape:
    """What the model's configuration says. ``pad`` is a token that ends nothing, to fill rows with.

    ``fused`` tells whether the positions are counted in the attention and not given to it.
    """

    ends: frozenset[int]
    pad: int
    vocabulary: int
    context: int
    fused: bool


class OnnxRuntimeBackend:
    """``onnxruntime_genai.Generator``, one new for each run.

    Load option: ``precision`` of what is converted, ``fp32`` by default, ``int8`` or ``int4`` (weights only,
    in blocks). The kinds of cache are ``past_present_share_buffer``: ``static`` sets the whole answer's room
    aside at once, ``dynamic`` makes a larger cache in each step.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        precision = str(options.get("precision", "fp32"))
        if precision not in PRECISIONS:
            raise BackendError(
                f"onnxruntime: precision {precision!r} is none of the builder's for the CPU; "
                f"it takes: {', '.join(PRECISIONS)}"
            )
        os.environ.update(NO_TELEMETRY)
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        found = download_hub_model(model)
        converted = is_onnx_directory(found)
        if converted and "precision" in options:
            raise BackendError(
                f"onnxruntime: {model.label} is ONNX already; leave out the load option precision, or name "
                "the model that it was made of"
            )
        if converted:
            directory = Path(found.location)
        else:
            directory = onnx_directory(found, precision, onnxruntime_genai.__version__)
        try:
            self._shape = read_model_shape(directory)
            config = onnxruntime_genai.Config(str(directory))
            config.clear_providers()
            config.overlay(json.dumps(_overlay(self._shape, context.threads)))
            self._model: Any = onnxruntime_genai.Model(config)
            self._tokenizer: Any = onnxruntime_genai.Tokenizer(self._model)
        except (RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(
                f"model {model.label}: onnxruntime-genai cannot load it ({type(error).__name__}: {reason})"
            ) from error
        return BackendInfo(
            name="onnxruntime",
            version=onnxruntime_genai.__version__,
            model=model.label,
            model_revision=Path(found.location).name if model.kind == "hub" else None,
            dtype=None if converted else PRECISIONS[precision],
            options={
                **_runtime_version(),
                "threads": context.threads,
                "device": "CPU",
                "padding_token": self._shape.pad,
                **({} if converted else {"precision": precision}),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> OnnxRuntimeJob:
        import numpy

        shape = self._shape
        rows = [[int(token) for token in self._tokenizer.encode(prompt)] for prompt in prompts]
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else shape.ends)})
        self._check(rows, ends, params, longest + params.max_new_tokens)
        padded = [row + [shape.pad] * (longest - len(row)) for row in rows]
        whole = longest + params.max_new_tokens
        search = {
            **PLAIN_SEARCH,
            "batch_size": len(rows),
            "max_length": whole,
            # No token ends a row for the engine, which knows only one set of ends: the job does.
            "min_length": whole,
            "past_present_share_buffer": params.cache == "static",
            "random_seed": params.seed,
            "do_sample": params.do_sample,
            "temperature": params.temperature if params.do_sample else 1.0,
            "top_p": params.top_p if params.do_sample else 1.0,
            "top_k": min(params.top_k, shape.vocabulary) if params.do_sample else 1,
        }
        return OnnxRuntimeJob(
            genai=self._genai,
            model=self._model,
            tokenizer=self._tokenizer,
            inputs=numpy.array(padded, dtype=numpy.int32),
            lengths=lengths,
            search=search,
            steps=params.max_new_tokens,
            ends=ends,
        )

    def _check(
        self, rows: list[list[int]], ends: frozenset[int], params: GenerationParams, whole: int
    ) -> None:
        """Raises ``BackendError`` for what would be computed wrongly, or not at all."""
        shape = self._shape
        if not all(rows):
            raise BackendError("onnxruntime: a prompt has no tokens; leave empty prompts out")
        if any(shape.pad in row for row in rows) or shape.pad in ends:
            raise BackendError(
                f"onnxruntime: token {shape.pad} fills the rows of a batch here and can be neither in a "
                "prompt nor a stop token"
            )
        if not shape.fused and len({len(row) for row in rows}) > 1:
            raise BackendError(
                "onnxruntime: this model takes position_ids, and is not right with prompts of unequal length "
                "in one batch; give it one prompt at a time, or let the engine convert the model"
            )
        if whole > shape.context:
            raise BackendError(
                f"onnxruntime: longest prompt and max_new_tokens are {whole} tokens; the model has room for "
                f"{shape.context}"
            )
        if params.seed >= SEED_LIMIT:
            raise BackendError(f"onnxruntime: seed is {params.seed}, needs less than 2**31")

    def synchronize(self) -> None:
        """Each step returns when the CPU has finished."""

    def close(self) -> None:
        del self._tokenizer, self._model


def read_model_shape(directory: Path) -> ModelShape:
    """What the directory's configuration says.

    Raises ``OSError``, ``KeyError``, ``TypeError`` or ``ValueError`` when that is nothing.
    """
    told = json.loads((directory / GENAI_CONFIG).read_text())["model"]
    given = told["eos_token_id"]
    ends = frozenset([given] if isinstance(given, int) else given)
    vocabulary = int(told["vocab_size"])
    own = told.get("pad_token_id")
    # Many models fill with their end; a row that ended there would be filled by the engine, uncounted.
    pad = own if isinstance(own, int) and own not in ends else max(set(range(vocabulary)) - ends)
    return ModelShape(
        ends=ends,
        pad=pad,
        vocabulary=vocabulary,
        context=int(told["context_length"]),
        fused="position_ids" not in told["decoder"]["inputs"],
    )


def _runtime_version() -> dict[str, str]:
    """The version of ONNX Runtime itself, where its package has that name."""
    try:
        return {"onnxruntime": version("onnxruntime")}
    except PackageNotFoundError:
        return {}


def _overlay(shape: ModelShape, threads: int) -> dict[str, Any]:
    """What is said otherwise than in the directory.

    The engine needs an end that is a token, and fills rows that have reached it. So that is the one for
    filling, which ``min_length`` keeps from being chosen.
    """
    return {
        "model": {
            "eos_token_id": shape.pad,
            "pad_token_id": shape.pad,
            "decoder": {"session_options": {"intra_op_num_threads": threads}},
        }
    }
