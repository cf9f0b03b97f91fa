# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI on the CPU: reads GGUF files and OpenVINO IR, needs no torch."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.batches import batch_result, check_lengths, check_processed, encode_prompts
from pytest_llenergy.backends.convert import build_cached
from pytest_llenergy.backends.gguf_files import converted_gguf, describe_gguf_weights, read_gguf_field
from pytest_llenergy.backends.models import ModelSource, first_error_line, translate_load_errors
from pytest_llenergy.backends.options import select_options
from pytest_llenergy.backends.precision import captured_log, list_types, type_name
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Precision
from pytest_llenergy.scratch import ScratchDirectory

#: Prompt tokens per step, high enough to prefill most batches at once. Of others no token has a time.
MAX_BATCHED_TOKENS = 8192

#: Graph of a model in OpenVINO's representation.
IR_FILE = "openvino_model.xml"

#: Environment variable that is read at each message, and its value for the properties of compiled models.
LOG_LEVEL, PRINTS_PROPERTIES = "OPENVINO_LOG_LEVEL", "3"

#: Properties with which every product is one of float32 numbers, if the weights are.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def refuses(model: ModelSource) -> str | None:
    """Return why OpenVINO GenAI cannot read a model. It reads GGUF files and OpenVINO IR directories."""
    is_ir = model.kind == "directory" and (Path(model.location) / IR_FILE).exists()
    if model.kind == "gguf" or is_ir:
        return None
    return f"openvino reads .gguf files and OpenVINO IR directories, not {model.label}"


SPEC = BackendSpec(
    name="openvino",
    factory="pytest_llenergy.backends.openvino:OpenVinoBackend",
    requires=("openvino_genai", "gguf"),
    install="pip install 'pytest-llenergy[openvino]'",
    capabilities=Capabilities(
        data=True,
        options=("dtype",),
        passes=True,
        timestamps="step",
    ),
    refuses=refuses,
)


@dataclass
class OpenVinoJob:
    """A tokenised batch. ``lengths`` are the prompts' token counts without padding."""

    pipeline: Any
    tokenizer: Any
    inputs: Any
    lengths: list[int]
    config: Any

    def run(self) -> tuple[Any, int, int]:
        start_ns = time.monotonic_ns()
        try:
            output = self.pipeline.generate(self.inputs, self.config)
        except RuntimeError as error:
            raise BackendError(f"openvino cannot generate: {first_error_line(error)}") from error
        return output, start_ns, time.monotonic_ns()

    def result(self, outcome: tuple[Any, int, int]) -> Generation:
        output, start_ns, end_ns = outcome
        # It counts the first prompt only.
        check_processed("openvino", self.lengths[:1], [output.perf_metrics.get_num_input_tokens()])
        token_ids = [[int(token) for token in ids] for ids in output.tokens]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        steps_ns = self._read_steps_ns(output.perf_metrics.raw_metrics, start_ns, end_ns)
        return batch_result(texts, token_ids, self.lengths, steps_ns)

    def _read_steps_ns(self, metrics: Any, start_ns: int, end_ns: int) -> list[int]:
        """Return when each step produced its tokens; empty unless the batch stepped together in the round."""
        # Milliseconds of the steady clock, which is CLOCK_MONOTONIC on Linux, rounded to microseconds.
        steps_ns = [round(stamp * 1e6) for stamp in metrics.m_new_token_times]
        if not steps_ns or metrics.m_batch_sizes[0] != len(self.lengths):
            return []
        return steps_ns if start_ns <= steps_ns[0] and steps_ns[-1] <= end_ns + 1000 else []


class OpenVinoBackend:
    """``LLMPipeline`` over its continuous-batching scheduler, one static batch per call.

    Prefix caching is on by default and would make every round but the first almost free; it is switched off
    here.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import openvino_genai

        self._genai = openvino_genai
        self._max_positions = _read_max_positions(model)
        scheduler = openvino_genai.SchedulerConfig()
        with translate_load_errors("openvino", model, options), captured_log(1, context.scratch) as log:
            properties = _apply_options(scheduler, options, context.threads)
            dtype = options.get("dtype")
            location = Path(model.location) if dtype is None else _float32_directory(model, dtype)
            # What it prints, it offers nowhere else.
            os.environ[LOG_LEVEL] = PRINTS_PROPERTIES
            self._pipeline: Any = openvino_genai.LLMPipeline(
                str(location),
                "CPU",
                scheduler_config=scheduler,
                **properties,
            )
            del os.environ[LOG_LEVEL]
            precision = _read_precision(log.read_text(errors="replace"), location)
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        return BackendInfo(
            name="openvino",
            version=openvino_genai.__version__,
            model=model.label,
            dtype=precision.weights,
            precision=precision,
            options={
                **{name: str(value) for name, value in options.items()},
                "prefix_caching": False,
                "threads": context.threads,
                "device": "CPU",
                "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
                "dynamic_split_fuse": bool(scheduler.dynamic_split_fuse),
            },
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> OpenVinoJob:
        inputs = self._tokenizer.encode(list(prompts))
        lengths = [int(row.sum()) for row in inputs.attention_mask.data]
        check_processed("openvino", self.count_tokens(prompts), lengths)
        check_lengths("openvino", lengths, params.max_new_tokens, self._max_positions)
        # A new one: the model's own defaults would not be recorded.
        config = self._genai.GenerationConfig()
        config.max_new_tokens = params.max_new_tokens
        config.do_sample = params.do_sample
        config.rng_seed = params.seed
        config.apply_chat_template = False
        for name, value in params.drawn.items():
            setattr(config, name, value)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else [self._tokenizer.get_eos_token_id()])}
        # An unset end is filled with the model's own, and ignore_eos ignores stop tokens too.
        config.ignore_eos = not ends
        if ends:
            config.eos_token_id = min(ends)
            config.stop_token_ids = ends
        return OpenVinoJob(self._pipeline, self._tokenizer, inputs, lengths, config)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(row) for row in encode_prompts("openvino", self._encode, texts)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).input_ids.data.ravel()) if text else []

    def synchronize(self) -> None:
        """``generate`` returns when the CPU has finished."""

    def close(self) -> None:
        del self._pipeline, self._tokenizer


def _read_max_positions(model: ModelSource) -> int | None:
    """Return the context length, or None. Raises ``ModelError`` for a file that would crash OpenVINO."""
    if model.kind == "gguf":
        limit = read_gguf_field(Path(model.location), "context_length")
    else:
        file = Path(model.location) / "config.json"
        limit = json.loads(file.read_bytes()).get("max_position_embeddings") if file.exists() else None
    return limit if isinstance(limit, int) and limit > 0 else None


def _apply_options(scheduler: Any, options: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Set options of the scheduler and return the properties of the plugin.

    Raises ``TypeError`` for one that the scheduler does not take.
    """
    # Rounds repeat their prompts, and with a prefix cache all but the first would be nearly free.
    ours: dict[str, Any] = {"enable_prefix_caching": False, "INFERENCE_NUM_THREADS": threads}
    if options.get("dtype") is not None:
        ours |= FLOAT32
    properties = {**ours, **select_options("openvino", options, SPEC.capabilities.options, ours)}
    properties.setdefault("max_num_batched_tokens", MAX_BATCHED_TOKENS)
    for name in [name for name in properties if hasattr(scheduler, name)]:
        setattr(scheduler, name, properties.pop(name))
    return properties


def _read_precision(log: str, location: Path) -> Precision:
    """Return the number types of the language model, which is compiled last, from OpenVINO's log."""
    compiled = dict(re.findall(r"^  (\w+): (.*)$", log.rpartition("\nModel: ")[2], re.MULTILINE))
    caches = [compiled[name] for name in ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION") if name in compiled]
    weights = _read_ir_weights(location) if location.is_dir() else describe_gguf_weights(location)
    compute = compiled.get("INFERENCE_PRECISION_HINT")
    return Precision(
        weights=weights,
        compute=None if compute is None else type_name(compute),
        kv_cache=list_types(Counter(caches)),
    )


def _read_ir_weights(directory: Path) -> str | None:
    """Return the types of the constants in OpenVINO's representation of a model."""
    text = (directory / IR_FILE).read_text()
    parameters: Counter[str] = Counter()
    for kind, shape in re.findall(r'type="Const"[^>]*>\s*<data element_type="(\w+)" shape="([\d, ]*)"', text):
        parameters[kind] += math.prod(int(size) for size in shape.split(",") if size.strip())
    return list_types(parameters)


def _float32_directory(model: ModelSource, dtype: str) -> Path:
    """Return a GGUF file as OpenVINO IR with float32 weights, converted on first use.

    OpenVINO reads GGUF files with float16 weights but not with float32, so their graph is widened. Raises
    ``BackendError`` for other models and types.
    """
    if model.kind != "gguf" or dtype != "float32":
        raise BackendError(
            f"openvino: dtype is {dtype!r}, and it converts .gguf files to float32 only; leave it out, and "
            "give INFERENCE_PRECISION_HINT for another arithmetic"
        )
    half = converted_gguf("openvino", model, "float16")
    return build_cached(f"{half.parent.name}-openvino-float32", lambda directory: _widen(half, directory))


def _widen(half: Path, directory: Path) -> None:
    import numpy
    import openvino
    import openvino_genai
    from openvino import opset13

    # The pipeline stores the graph next to the file that it has read.
    with ScratchDirectory(directory.parent) as scratch:
        file = scratch.path / half.name
        file.symlink_to(half)
        openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
        model = openvino.Core().read_model(scratch.path / IR_FILE)
        for node in model.get_ordered_ops():
            source = node.input_value(0).get_node() if node.get_type_name() == "Convert" else None
            if source is None or source.get_type_name() != "Constant":
                continue
            if source.get_element_type() == openvino.Type.f16:
                wide = opset13.constant(source.get_data().astype(numpy.float32))
                for target in node.output(0).get_target_inputs():
                    target.replace_source_output(wide.output(0))
        openvino.save_model(model, directory / IR_FILE, compress_to_fp16=False)
        for path in scratch.path.glob("openvino_*tokenizer.*"):
            shutil.copy(path, directory)
