# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI on the CPU: reads GGUF files and OpenVINO IR, needs no torch."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, Capabilities, RankContext
from pytest_llenergy.backends.flops import estimate_flops_from_file
from pytest_llenergy.backends.models import ModelSource, check_context_length, gguf_hint, read_max_positions
from pytest_llenergy.backends.tasks import Generation, GenerationParams, Result
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import Flops, RequestTimeline

#: Prompt tokens per step, high enough to prefill a whole batch at once.
MAX_BATCHED_TOKENS = 8192


_HEADER = struct.Struct("<4sIQQ")
_LLM_PIPELINE = "https://docs.openvino.ai/2024/api/genai_api/_autosummary/openvino_genai.LLMPipeline.html"


def refuses(model: ModelSource) -> str | None:
    """Return why OpenVINO GenAI cannot read a model. It reads GGUF files and OpenVINO IR directories."""
    is_ir = model.kind == "directory" and (Path(model.location) / "openvino_model.xml").exists()
    if model.kind == "gguf" or is_ir:
        return None
    return f"openvino reads .gguf files and OpenVINO IR directories, not {model.label}{gguf_hint(model)}"


SPEC = BackendSpec(
    name="openvino",
    factory="pytest_llenergy.backends.openvino:OpenVinoBackend",
    requires=("openvino_genai",),
    install="pip install 'pytest-llenergy[openvino]'",
    capabilities=Capabilities(
        data=True,
        prefix_cache="switched off",
        timestamps="step",
        exact=True,
        clock="OpenVINO's own monotonic clock, per step",
        reasons={"tensor": "LLMPipeline takes one device", "gpu": "only its CPU plugin is used here"},
        sources={
            **dict.fromkeys(("launch", "managed_by", "cpu", "data", "tasks", "batching", "caches"), "tested"),
            **dict.fromkeys(("prefix_cache", "timestamps", "options", "hardware"), "tested"),
            "gpu": "this adapter",
            **dict.fromkeys(("tensor", "pipeline", "placement"), _LLM_PIPELINE),
        },
        hardware="CPU",
    ),
    refuses=refuses,
)


@dataclass
class OpenVinoOutcome:
    """Output of one call, and when it started and ended."""

    output: Any
    start_ns: int
    end_ns: int

    def steps_ns(self, batch: int) -> list[int]:
        """Return when each step produced its tokens; empty unless the whole batch stepped together on our
        clock.
        """
        metrics = self.output.perf_metrics.raw_metrics
        # Milliseconds of the steady clock, which is CLOCK_MONOTONIC on Linux.
        steps_ns = [round(stamp * 1e6) for stamp in metrics.m_new_token_times]
        together = bool(steps_ns) and metrics.m_batch_sizes[0] == batch
        # OpenVINO rounds to microseconds.
        on_our_clock = together and self.start_ns <= steps_ns[0] and steps_ns[-1] <= self.end_ns + 1000
        return steps_ns if on_our_clock else []


@dataclass
class OpenVinoJob:
    """A tokenised batch. ``lengths`` are the prompts' token counts without padding."""

    pipeline: Any
    tokenizer: Any
    inputs: Any
    lengths: list[int]
    config: Any

    def run(self) -> OpenVinoOutcome:
        start_ns = time.monotonic_ns()
        output = self.pipeline.generate(self.inputs, self.config)
        return OpenVinoOutcome(output, start_ns, time.monotonic_ns())

    def result(self, outcome: OpenVinoOutcome) -> Generation:
        token_ids = [[int(token) for token in ids] for ids in outcome.output.tokens]
        steps_ns = outcome.steps_ns(len(self.lengths))
        requests = [
            RequestTimeline(
                input_tokens=length,
                output_tokens=len(ids),
                first_token_ns=steps_ns[0] if steps_ns else None,
                last_token_ns=steps_ns[len(ids) - 1] if steps_ns else None,
            )
            for length, ids in zip(self.lengths, token_ids, strict=True)
        ]
        texts = [str(self.tokenizer.decode(ids)) for ids in token_ids]
        return Generation(texts=texts, token_ids=token_ids, requests=requests)


class OpenVinoBackend:
    """``LLMPipeline`` over its continuous-batching scheduler, one static batch per call.

    Prefix caching is on by default and would make every round but the first almost free; it is switched off
    here.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        import openvino_genai

        self._genai = openvino_genai
        self._source = model
        if model.kind == "gguf":
            _check_header(model)
        self._max_positions = read_max_positions(model)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        try:
            self._pipeline: Any = openvino_genai.LLMPipeline(
                model.location, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=context.threads
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(f"model {model.label}: openvino cannot load it ({reason})") from error
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        return BackendInfo(
            name="openvino",
            version=openvino_genai.__version__,
            model=model.label,
            dtype=_parse_quantization(model.label),
            options={"prefix_caching": False, "threads": context.threads, "device": "CPU"},
        )

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> OpenVinoJob:
        inputs = self._tokenizer.encode(list(prompts))
        # OpenVINO's own count covers the first prompt only.
        lengths = [int(row.sum()) for row in inputs.attention_mask.data]
        if min(lengths) == 0:
            raise BackendError("openvino: a prompt has no tokens; leave empty prompts out")
        if sum(lengths) > MAX_BATCHED_TOKENS:
            raise BackendError(
                f"openvino: {sum(lengths)} prompt tokens in one batch; {MAX_BATCHED_TOKENS} fit one prefill"
            )
        check_context_length("openvino", max(lengths) + params.max_new_tokens, self._max_positions)
        # A new one: the model's own defaults would not be recorded.
        config = self._genai.GenerationConfig()
        config.max_new_tokens = params.max_new_tokens
        config.do_sample = params.do_sample
        config.rng_seed = params.seed
        config.apply_chat_template = False
        if params.do_sample:
            config.temperature = params.temperature
            config.top_p, config.top_k = params.top_p, params.top_k
        end_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids.add(self._tokenizer.get_eos_token_id())
        # An unset end is filled with the model's own, and ignore_eos ignores stop tokens too.
        config.ignore_eos = not end_ids
        if end_ids:
            config.eos_token_id = min(end_ids)
            config.stop_token_ids = end_ids

        return OpenVinoJob(self._pipeline, self._tokenizer, inputs, lengths, config)

    def flops(self, _job: OpenVinoJob, done: Result) -> Flops:
        # The scheduler packs sequences without padding and ends each by itself.
        return estimate_flops_from_file(self._source, done, padded=False)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [int(self._tokenizer.encode(text).attention_mask.data.sum()) for text in texts]

    def synchronize(self) -> None:
        """``generate`` returns when the CPU has finished."""

    def close(self) -> None:
        del self._pipeline, self._tokenizer


def _check_header(model: ModelSource) -> None:
    """Check magic, version and counts of a GGUF header: OpenVINO crashes on invalid files.

    Raises ``ModelError``. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    path = Path(model.location)
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    magic, version, tensors, pairs = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    # A tensor description has at least 24 bytes, a key-value pair 13.
    if magic != b"GGUF" or version not in (2, 3) or 24 * tensors + 13 * pairs > path.stat().st_size:
        raise ModelError(f"model {model.label}: not a GGUF file of version 2 or 3, or damaged")


def _parse_quantization(file_name: str) -> str | None:
    """Return the encoding in a GGUF file's name, ``<model>.<encoding>.gguf`` by the format's naming rule."""
    match = re.search(r"[.-]((?:I?Q\d\w*)|BF16|F16|F32)\.gguf$", file_name, re.IGNORECASE)
    return match.group(1).lower() if match else None
