# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI on the CPU: static batches with our own decoding loop."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.batches import batch_result, check_lengths, check_processed, encode_prompts
from pytest_llenergy.backends.convert import build_cached, download_hub_model, pretrained_path, source_key
from pytest_llenergy.backends.models import ModelSource, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import list_types
from pytest_llenergy.backends.tasks import Generation, GenerationParams, cut_at_end
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.scratch import ScratchDirectory

#: A directory with this file is an ONNX Runtime GenAI model.
GENAI_CONFIG = "genai_config.json"

#: Converts models. Runs in a subprocess: it imports torch, which inference does not need.
BUILDER = "onnxruntime_genai.models.builder"

#: Stops the telemetry thread that ONNX Runtime would run while energy is measured.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}

#: Names in records of the builder's precisions; others have the same.
NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

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
    """Return why ONNX Runtime GenAI reads a model neither as it is nor converted by its builder."""
    if is_onnx_directory(model):
        return None
    if model.kind == "directory" and not (Path(model.location) / "config.json").exists():
        return f"onnxruntime reads directories with {GENAI_CONFIG} or config.json, not {model.label}"
    return None


def is_onnx_directory(model: ModelSource) -> bool:
    """Whether ONNX Runtime GenAI can read the model as it is."""
    return model.kind == "directory" and (Path(model.location) / GENAI_CONFIG).exists()


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

    def run(self) -> tuple[list[list[int]], list[int], int]:
        """Return the tokens of each step, their times, and the length of a row at the end."""
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(**self.search)
        # A new one, without state of earlier runs.
        generator = self.genai.Generator(self.model, params)
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
        return tokens, times_ns, generator.token_count()

    def result(self, outcome: tuple[list[list[int]], list[int], int]) -> Generation:
        steps, times_ns, length = outcome
        check_processed("onnxruntime", [max(self.lengths)], [length - len(steps)])
        token_ids = [cut_at_end(list(row), self.ends) for row in zip(*steps, strict=True)]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        return batch_result(texts, token_ids, self.lengths, times_ns)


class OnnxRuntimeBackend:
    """``onnxruntime_genai.Generator``, a new one for each run.

    The kinds of cache are those of ``past_present_share_buffer``: ``static`` allocates the whole answer at
    once, ``dynamic`` makes a larger cache in each step.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        dtype, precision = options.get("dtype"), str(options.get("precision", "fp32"))
        session = _session_options(options)
        os.environ.update(NO_TELEMETRY)
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        source = download_hub_model(model)
        is_converted = is_onnx_directory(source)
        if is_converted and "precision" in options:
            raise BackendError(f"onnxruntime: {model.label} is already ONNX; leave out precision")
        directory = Path(source.location)
        if not is_converted:
            directory = onnx_directory(source, precision, onnxruntime_genai.__version__)
        types = _read_precision(directory)
        wanted = Precision(weights=dtype, compute=dtype, kv_cache=dtype)
        if dtype is not None and types not in (None, wanted):
            found = ", ".join(f"{name} {kind}" for name, kind in msgspec.structs.asdict(types).items())
            raise BackendError(f"onnxruntime: dtype is {dtype!r}, and {model.label} runs with {found}")
        with translate_load_errors("onnxruntime", model, session):
            self._read_shape(directory)
            config = onnxruntime_genai.Config(str(directory))
            config.clear_providers()
            config.overlay(json.dumps(self._overlay({**session, "intra_op_num_threads": context.threads})))
            self._model: Any = onnxruntime_genai.Model(config)
            self._tokenizer: Any = onnxruntime_genai.Tokenizer(self._model)
        return BackendInfo(
            name="onnxruntime",
            version=onnxruntime_genai.__version__,
            model=model.label,
            model_revision=Path(source.location).name if model.kind == "hub" else None,
            dtype=None if is_converted else NAMES.get(precision, precision),
            precision=types,
            options={
                **{name: str(value) for name, value in options.items()},
                "threads": context.threads,
                "device": "CPU",
                "padding_token": self._pad,
                **({} if is_converted else {"precision": precision}),
            },
        )

    def _read_shape(self, directory: Path) -> None:
        """Read the end tokens, vocabulary and context length of a model, and choose a padding token."""
        config = _read_config(directory)
        eos = config["eos_token_id"]
        self._ends = frozenset([eos] if isinstance(eos, int) else eos)
        self._vocabulary, self._context = int(config["vocab_size"]), int(config["context_length"])
        # Otherwise attention counts positions itself, and padding on the right is harmless.
        self._takes_positions = "position_ids" in config["decoder"]["inputs"]
        # Many models pad with their end token. ONNX Runtime would fill a row that ended with it, uncounted.
        pad = config.get("pad_token_id")
        unused = (token for token in reversed(range(self._vocabulary)) if token not in self._ends)
        self._pad = pad if isinstance(pad, int) and pad not in self._ends else next(unused)

    def _overlay(self, session: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that replace those of the directory.

        ONNX Runtime needs an end token, and fills rows that have reached it. So the padding token is the end
        token, and ``min_length`` keeps it from being chosen.
        """
        decoder = {"session_options": dict(session)}
        return {"model": {"eos_token_id": self._pad, "pad_token_id": self._pad, "decoder": decoder}}

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> OnnxRuntimeJob:
        import numpy

        rows = encode_prompts("onnxruntime", self._tokenizer.encode, prompts)
        lengths = [len(row) for row in rows]
        ends = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._ends)})
        self._check_batch(rows, ends, params)
        padded = [row + [self._pad] * (max(lengths) - len(row)) for row in rows]
        total = max(lengths) + params.max_new_tokens
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
            "top_k": min(params.top_k, self._vocabulary) if params.do_sample else 1,
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
        """Raise ``BackendError`` for batches that would be computed wrongly."""
        if any(self._pad in row for row in rows) or self._pad in ends:
            raise BackendError(f"onnxruntime: token {self._pad} pads batches, and cannot be in one or end it")
        lengths = [len(row) for row in rows]
        if self._takes_positions and len(set(lengths)) > 1:
            raise BackendError(
                "onnxruntime: this model takes position_ids and is wrong for prompts of unequal length in "
                "one batch; give one prompt at a time, or name the original model to have it converted"
            )
        check_lengths("onnxruntime", lengths, params.max_new_tokens, self._context)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("onnxruntime", self._tokenizer.encode, texts)]

    def synchronize(self) -> None:
        """Each step returns when the CPU has finished."""

    def close(self) -> None:
        del self._tokenizer, self._model


def onnx_directory(source: ModelSource, precision: str, version: str) -> Path:
    """Return the model as ONNX, converted on first use by the builder of this version."""

    def build(directory: Path) -> None:
        path = pretrained_path(source)
        with ScratchDirectory(directory.parent) as scratch:
            places = ["-i", path, "-o", str(directory), "-c", str(scratch.path)]
            done = subprocess.run(
                module_command(BUILDER, *places, "-p", precision, "-e", "cpu"),
                env={**os.environ, **NO_TELEMETRY, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode or not (directory / GENAI_CONFIG).exists():
            said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
            raise ModelError(
                f"model {source.label}: onnxruntime-genai's builder cannot convert it to {precision} "
                f"({said[-1]})"
            )

    return build_cached(f"{source_key(source)}-onnx-{precision}-{version}", build)


def _session_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for ONNX Runtime's session, which would ignore names that it does not know."""
    session = select_options("onnxruntime", options, SPEC.capabilities.options, ("intra_op_num_threads",))
    if session:
        import onnxruntime

        unknown = [name for name in session if not hasattr(onnxruntime.SessionOptions, name)]
        if unknown:
            raise BackendError(f"onnxruntime: SessionOptions has no option {', '.join(unknown)}")
    return session


def _read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / GENAI_CONFIG).read_bytes())["model"]
    return config


def _read_precision(directory: Path) -> Precision | None:
    """Return the number types of the graph that the session has loaded; None if they cannot be read."""
    try:
        import onnx_ir

        graph = onnx_ir.load(directory / _read_config(directory)["decoder"]["filename"]).graph
    except (ImportError, OSError, KeyError, TypeError, ValueError):
        return None
    weights: Counter[str] = Counter()
    for value in graph.initializers.values():
        if value.const_value is not None:
            weights[value.const_value.dtype.name] += value.const_value.size
    quantised = [node.attributes for node in graph if node.op_type == "MatMulNBits"]
    for attributes in quantised:
        weights[f"int{attributes['bits'].value}"] += attributes["K"].value * attributes["N"].value
    if quantised:
        # The bytes into which those numbers are packed.
        del weights["UINT8"]
    caches = Counter(str(value.dtype) for value in graph.inputs if str(value.name).startswith("past_"))
    outputs = Counter(str(value.dtype) for value in graph.outputs if value.name == "logits")
    return Precision(weights=list_types(weights), compute=list_types(outputs), kv_cache=list_types(caches))
