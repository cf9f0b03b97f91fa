# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI on the CPU: static batches with our own decoding loop."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.batches import batch_result, check_lengths, check_processed, encode_prompts
from pytest_llenergy.backends.convert import (
    GENAI_CONFIG,
    NO_TELEMETRY,
    download_hub_model,
    explain_missing_builder,
    is_onnx_directory,
    onnx_directory,
)
from pytest_llenergy.backends.engine_options import CommonOptions, refuse_options
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.precision import list_types
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.files import read_limited
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.record.text import did_you_mean

#: Names in records of the builder's precisions; others have the same.
NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

#: Fields of the session's options that are set here, with the reason.
RESERVED = {"intra_op_num_threads": "set OMP_NUM_THREADS"}

#: Products of block-quantised weights. With ``accuracy_level`` 4 they quantise their inputs too
#: (docs/ContribOperators.md of ONNX Runtime).
QUANTISED_PRODUCT, QUANTISES_INPUTS = "MatMulNBits", 4

#: The seed is a signed 32-bit integer.
SEED_LIMIT = 2**31

#: Every other way to choose a token, switched off: the model's own defaults would not be recorded.
PLAIN_SEARCH: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "chunk_size": 0,
}


def refuses(model: ModelSource) -> str | None:
    """Return why ONNX Runtime GenAI cannot read a model. It reads its own directories and what its builder
    converts.
    """
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
        options=("dtype", "precision"),
        passes=True,
        caches=("dynamic", "static"),
        timestamps="step",
    ),
    refuses=refuses,
)


@dataclass(frozen=True)
class Steps:
    """The tokens of each step, one per row, and when they were available; the length of a row at the end."""

    tokens: list[list[int]]
    times_ns: list[int]
    length: int


@dataclass
class OnnxRuntimeJob:
    """A right-padded batch. ``lengths`` are the prompts' token counts without padding.

    As in any static batch, a row that has ended is computed until the last row ends; tokens after its end are
    not output.
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
        """Return a new generator, without state of earlier runs."""
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(**self.search)
        return self.genai.Generator(self.model, params)

    def run(self) -> Steps:
        generator = self.generator()
        generator.append_tokens(self.inputs)
        tokens: list[list[int]] = []
        times_ns: list[int] = []
        unfinished = list(range(len(self.lengths)))
        for _ in range(self.steps):
            generator.generate_next_token()
            step: list[int] = generator.get_next_tokens().tolist()
            times_ns.append(time.monotonic_ns())
            tokens.append(step)
            if self.ends:
                unfinished = [row for row in unfinished if step[row] not in self.ends]
                if not unfinished:
                    break
        return Steps(tokens, times_ns, generator.token_count())

    def result(self, outcome: Steps) -> Generation:
        check_processed("onnxruntime", [max(self.lengths)], [outcome.length - len(outcome.tokens)])
        rows = zip(*outcome.tokens, strict=True)
        token_ids = [cut_at_end(list(row), self.ends) for row in rows]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        return batch_result(texts, token_ids, self.lengths, outcome.times_ns)


@dataclass(frozen=True)
class ModelShape:
    """What the model's configuration specifies.

    Attributes:
        pad: A token that does not end a sequence, to fill rows with.
        fused: Whether positions are counted inside attention rather than passed to it.
    """

    ends: frozenset[int]
    pad: int
    vocabulary: int
    context: int
    fused: bool


class OnnxRuntimeBackend:
    """``onnxruntime_genai.Generator``, a new one for each run.

    Load option ``precision`` of converted models: those of ONNX Runtime GenAI's builder, such as ``fp32``
    (default), ``int8`` and ``int4`` (weights only, in blocks). The kinds of cache are those of
    ``past_present_share_buffer``: ``static`` allocates the whole answer at once, ``dynamic`` makes a larger
    cache in each step.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        dtype = CommonOptions.parse("onnxruntime", options).dtype
        precision = str(options.get("precision", "fp32"))
        session = _session_options(options)
        os.environ.update(NO_TELEMETRY)
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        source = download_hub_model(model)
        converted = is_onnx_directory(source)
        if converted and "precision" in options:
            raise BackendError(f"onnxruntime: {model.label} is already ONNX; leave out precision")
        if converted:
            directory = Path(source.location)
        else:
            directory = onnx_directory(source, precision, onnxruntime_genai.__version__)
        types = _read_precision(directory)
        wanted = Precision(weights=dtype, compute=dtype, kv_cache=dtype, activations="none")
        if dtype is not None and types not in (None, wanted):
            found = ", ".join(f"{name} {kind}" for name, kind in msgspec.structs.asdict(types).items())
            raise BackendError(f"onnxruntime: dtype is {dtype!r}, and {model.label} runs with {found}")
        with translate_load_errors("onnxruntime", model, session):
            self._shape = read_model_shape(directory)
            config = onnxruntime_genai.Config(str(directory))
            config.clear_providers()
            config.overlay(json.dumps(_overlay(self._shape, context.threads, session)))
            self._model: Any = onnxruntime_genai.Model(config)
            self._tokenizer: Any = onnxruntime_genai.Tokenizer(self._model)
        return BackendInfo(
            name="onnxruntime",
            version=onnxruntime_genai.__version__,
            model=model.label,
            model_revision=Path(source.location).name if model.kind == "hub" else None,
            dtype=None if converted else NAMES.get(precision, precision),
            precision=types,
            options={
                **{name: str(value) for name, value in options.items()},
                "threads": context.threads,
                "device": "CPU",
                "padding_token": self._shape.pad,
                **({} if converted else {"precision": precision}),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> OnnxRuntimeJob:
        import numpy

        shape = self._shape
        rows = encode_prompts("onnxruntime", self._tokenizer.encode, prompts)
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else shape.ends)})
        total = longest + params.max_new_tokens
        self._check_batch(rows, ends, params)
        padded = [row + [shape.pad] * (longest - len(row)) for row in rows]
        search = {
            **PLAIN_SEARCH,
            "batch_size": len(rows),
            "max_length": total,
            # No token ends a row inside ONNX Runtime, which has one set of ends only: the job handles ends.
            "min_length": total,
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

    def _check_batch(self, rows: list[list[int]], ends: frozenset[int], params: GenerationParams) -> None:
        """Raise ``BackendError`` for batches that would fail or be computed wrongly."""
        shape = self._shape
        if any(shape.pad in row for row in rows) or shape.pad in ends:
            raise BackendError(
                f"onnxruntime: token {shape.pad} pads the rows of a batch and cannot be in a prompt or be a "
                "stop token"
            )
        if not shape.fused and len({len(row) for row in rows}) > 1:
            raise BackendError(
                "onnxruntime: this model takes position_ids and is wrong for prompts of unequal length in "
                "one batch; give one prompt at a time, or name the original model to have it converted"
            )
        lengths = [len(row) for row in rows]
        check_lengths("onnxruntime", lengths, params.max_new_tokens, shape.context)
        if params.seed >= SEED_LIMIT:
            raise BackendError(f"onnxruntime: seed is {params.seed}, needs less than 2**31")

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("onnxruntime", self._tokenizer.encode, texts)]

    def synchronize(self) -> None:
        """Each step returns when the CPU has finished."""

    def close(self) -> None:
        del self._tokenizer, self._model


def read_model_shape(directory: Path) -> ModelShape:
    """Read the model's configuration.

    Raises:
        OSError: If it is missing or invalid.
        KeyError: If it is missing or invalid.
        TypeError: If it is missing or invalid.
        ValueError: If it is missing or invalid.
    """
    config = json.loads(read_limited(directory / GENAI_CONFIG))["model"]
    eos = config["eos_token_id"]
    ends = frozenset([eos] if isinstance(eos, int) else eos)
    vocabulary = int(config["vocab_size"])
    pad_id = config.get("pad_token_id")
    # Many models pad with their end token. ONNX Runtime would fill a row that ended with it, uncounted.
    unused = (token for token in reversed(range(vocabulary)) if token not in ends)
    pad = pad_id if isinstance(pad_id, int) and pad_id not in ends else next(unused, None)
    if pad is None:
        raise ValueError(f"every token of {vocabulary} ends the text")
    return ModelShape(
        ends=ends,
        pad=pad,
        vocabulary=vocabulary,
        context=int(config["context_length"]),
        fused="position_ids" not in config["decoder"]["inputs"],
    )


def _session_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for ONNX Runtime's session. Raises ``BackendError`` for an unknown one."""
    native = {name: value for name, value in options.items() if name not in SPEC.capabilities.options}
    refuse_options("onnxruntime", native, RESERVED)
    if native:
        import onnxruntime

        # The library would take a name that it does not know, and ignore it.
        unknown = [name for name in native if not hasattr(onnxruntime.SessionOptions, name)]
        if unknown:
            hint = did_you_mean(unknown, dir(onnxruntime.SessionOptions)) or "see its documentation"
            raise BackendError(
                f"onnxruntime: onnxruntime.SessionOptions has no option {', '.join(unknown)}; {hint}"
            )
    return native


def _read_precision(directory: Path) -> Precision | None:
    """Return the number types of the graph that the session has loaded; None if they cannot be read."""
    try:
        import onnx_ir

        config = json.loads(read_limited(directory / GENAI_CONFIG))
        graph = onnx_ir.load(directory / config["model"]["decoder"]["filename"]).graph
    except (ImportError, OSError, KeyError, TypeError, ValueError):
        return None
    weights: Counter[str] = Counter()
    for value in graph.initializers.values():
        if value.const_value is not None:
            weights[value.const_value.dtype.name] += value.const_value.size
    quantised = [node.attributes for node in graph if node.op_type == QUANTISED_PRODUCT]
    for attributes in quantised:
        weights[f"int{attributes['bits'].value}"] += attributes["K"].value * attributes["N"].value
    if quantised:
        # The bytes into which those numbers are packed.
        del weights["UINT8"]
    levels = {
        attributes["accuracy_level"].value for attributes in quantised if "accuracy_level" in attributes
    }
    caches = _type_names(value for value in graph.inputs if str(value.name).startswith("past_"))
    outputs = _type_names(value for value in graph.outputs if value.name == "logits")
    return Precision(
        weights=list_types(weights),
        compute=list_types(outputs),
        kv_cache=list_types(caches),
        activations="int8" if QUANTISES_INPUTS in levels else "none",
    )


def _type_names(values: Iterable[Any]) -> Counter[str]:
    return Counter(value.dtype.name for value in values if value.dtype is not None)


def _overlay(shape: ModelShape, threads: int, session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that replace those of the directory.

    ONNX Runtime needs an end token, and fills rows that have reached it. So the padding token is the end
    token, and ``min_length`` keeps it from being chosen.
    """
    return {
        "model": {
            "eos_token_id": shape.pad,
            "pad_token_id": shape.pad,
            "decoder": {"session_options": {**session, "intra_op_num_threads": threads}},
        }
    }
