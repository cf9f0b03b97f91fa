# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations: counted by torch, or estimated from the shape of a dense decoder.

Estimates count like ``torch.utils.flop_counter``: matrix products only, two operations per multiply-add, and
the whole square of an attention matrix, whether or not a kernel skips what a causal mask hides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.models import ModelSource, check_gguf_head
from pytest_llenergy.backends.tasks import Generation, Result
from pytest_llenergy.errors import ModelError
from pytest_llenergy.record.files import read_limited
from pytest_llenergy.record.timeline import Flops

#: Supported architectures: grouped-query attention, a gated feed-forward layer, and an output layer. Named as
#: in config.json (``model_type``) and in GGUF (``general.architecture``).
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

#: Fields of config.json that mixture-of-experts models have.
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")

SOURCE = "analytic: linear layers and attention of a dense decoder, its output layer for one position a step"

#: Attention implementations that torch.utils.flop_counter counts, with the help of ``_count_by_torch``.
COUNTED_ATTENTION = ("eager", "sdpa")

NOT_COUNTED = "torch.utils.flop_counter does not see"


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense decoder. ``window`` is the span of sliding-window attention in tokens, None for full
    attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    window: int | None = None

    @property
    def linear_flop(self) -> int:
        """Operations of one token in the linear layers of all blocks: query, key, value, output; gate, up,
        down.
        """
        attention = 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        return 2 * self.layers * self.hidden * (attention + 3 * self.intermediate)

    @property
    def output_flop(self) -> int:
        """Operations of one position in the output layer."""
        return 2 * self.hidden * self.vocabulary

    def attention_flop(self, queries: int, keys: int) -> int:
        """Operations of attention in all blocks, scores and weighted values, for ``queries`` positions over
        ``keys``.
        """
        return 4 * self.layers * self.heads * self.head_dim * queries * keys

    def flop(self, prompt: int, new: int) -> int:
        """Operations of one sequence: the prefill of ``prompt`` tokens gives the first of ``new`` tokens,
        each step one more.
        """
        steps = range(1, new)
        attention = self.attention_flop(prompt, prompt)
        attention += sum(self.attention_flop(1, prompt + step) for step in steps)
        return self.linear_flop * (prompt + len(steps)) + self.output_flop * new + attention


def shape_from_config(config: Mapping[str, Any]) -> DecoderShape:
    """Read the shape from the content of a config.json.

    Raises:
        ModelError: If it is not a plain dense decoder.
    """
    if not isinstance(config, Mapping):
        raise ModelError(_unsupported("a config.json without keys"))
    kind = str(config.get("model_type"))
    experts = [name for name in EXPERT_FIELDS if config.get(name)]
    if kind not in ARCHITECTURES or experts:
        raise ModelError(_unsupported(f"model_type {kind}" + (f" with {experts[0]}" if experts else "")))
    heads, hidden = _read_size(config, "num_attention_heads"), _read_size(config, "hidden_size")
    slides = config.get("use_sliding_window", True) and config.get("sliding_window")
    return DecoderShape(
        layers=_read_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_read_size(config, "num_key_value_heads", heads),
        head_dim=_read_size(config, "head_dim", hidden // heads),
        intermediate=_read_size(config, "intermediate_size"),
        vocabulary=_read_size(config, "vocab_size"),
        window=_read_size(config, "sliding_window") if slides else None,
    )


def shape_from_gguf(file: Path) -> DecoderShape:
    """Read the shape from a GGUF file.

    Raises:
        ModelError: If it is unreadable or not a plain dense decoder.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("reading GGUF metadata needs the module gguf; pip install gguf") from None
    try:
        check_gguf_head(file)
        reader = GGUFReader(file)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            # Reading the vocabulary would take seconds.
            if not name.startswith("tokenizer.")
        }
        embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    except Exception as error:
        # A damaged file can make its reader raise anything.
        raise ModelError(f"{file.name}: its GGUF metadata cannot be read ({error})") from error
    kind = str(fields.get("general.architecture"))
    sizes = {name.removeprefix(f"{kind}."): value for name, value in fields.items()}
    if kind not in ARCHITECTURES or sizes.get("expert_count"):
        experts = " with experts" if sizes.get("expert_count") else ""
        raise ModelError(_unsupported(f"architecture {kind}{experts}"))
    hidden, heads = _read_size(sizes, "embedding_length"), _read_size(sizes, "attention.head_count")
    return DecoderShape(
        layers=_read_size(sizes, "block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_read_size(sizes, "attention.head_count_kv", heads),
        head_dim=_read_size(sizes, "attention.key_length", hidden // heads),
        intermediate=_read_size(sizes, "feed_forward_length"),
        vocabulary=int(embedding.shape[1]),
        window=_read_size(sizes, "attention.sliding_window")
        if sizes.get("attention.sliding_window")
        else None,
    )


def shape_from_source(model: ModelSource) -> DecoderShape:
    """Read the shape from a GGUF file or a directory.

    Raises:
        ModelError: If the model is neither.
    """
    if model.kind == "gguf":
        return shape_from_gguf(Path(model.location))
    file = Path(model.location) / "config.json"
    if model.kind != "directory" or not file.exists():
        raise ModelError(f"{model.label} has no config.json here to estimate operations from")
    try:
        return shape_from_config(json.loads(read_limited(file)))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{model.label}: its config.json cannot be read ({error})") from error


def estimate_generation_flops(shape: DecoderShape, done: Result, *, padded: bool) -> Flops:
    """Estimate the operations of one call of ``generate``, summed over the ranks that share it.

    Args:
        shape: Sizes of the model.
        done: Result of the call.
        padded: Whether every sequence was computed at the length of the longest prompt and output. Padding
            counts: the number is of executed, not of useful, operations.
    """
    if not isinstance(done, Generation):
        return Flops.unknown("operations are estimated for generate only")
    lengths = [(each.input_tokens, each.output_tokens) for each in done.requests]
    if padded:
        longest = max(prompt for prompt, _ in lengths), max(new for _, new in lengths)
        lengths = [longest] * len(lengths)
    most = max(prompt + new for prompt, new in lengths)
    if shape.window is not None and most > shape.window:
        return Flops.unknown(
            f"attention covers the last {shape.window} of {most} tokens, which is not estimated"
        )
    count = sum(shape.flop(prompt, new) for prompt, new in lengths)
    return Flops(count=count, source=SOURCE, shared=True)


def estimate_flops_from_file(model: ModelSource, done: Result, *, padded: bool) -> Flops:
    """Estimate the operations of one call for a backend that has nothing but the model's file.

    Args:
        model: The model, with a GGUF file or a config.json.
        done: Result of the call.
        padded: As for ``estimate_generation_flops``.
    """
    try:
        return estimate_generation_flops(shape_from_source(model), done, padded=padded)
    except ModelError as error:
        return Flops.unknown(str(error))


def transformers_job_flops(model: Any, job: Any, done: Result, tensor: int) -> Flops:
    """Return the operations of one execution of a transformers job. To count them, it is executed once more.

    Args:
        model: The loaded model.
        job: The job.
        done: Result of an earlier execution.
        tensor: Number of ranks that hold a part of each weight.
    """
    uncounted = _uncounted_part(model, tensor)
    if uncounted is None:
        return Flops(count=_count_by_torch(model, job), source=_counter_source(model))
    if getattr(getattr(job, "config", None), "cache_implementation", None) == "static":
        # Whether its empty part is computed depends on the kernel and on padding.
        return Flops.unknown(
            f"{NOT_COUNTED} {uncounted}, and operations with a static cache are not estimated"
        )
    try:
        estimated = estimate_generation_flops(shape_from_config(model.config.to_dict()), done, padded=True)
    except ModelError as error:
        return Flops.unknown(f"{NOT_COUNTED} {uncounted}, and {error}")
    if estimated.count is None:
        return estimated
    return Flops(
        count=estimated.count,
        shared=True,
        source=f"{estimated.source} (the counter does not see {uncounted})",
    )


def _count_by_torch(model: Any, job: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    # The one sdpa kernel that torch's own table lacks; without it attention on the CPU counts as 0.
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    job = copy.copy(job)
    if getattr(job, "config", None) is not None:
        # A compiled step, as with a static cache on a GPU, would not be counted. The products are the same.
        job.config = copy.deepcopy(job.config)
        job.config.disable_compile = True
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        job.run()
    return int(counter.get_total_flops())


def _uncounted_part(model: Any, tensor: int) -> str | None:
    """Return what would not be counted, or counted on each rank as if it were alone; None if nothing."""
    attention = str(model.config._attn_implementation)
    if tensor > 1:
        return "how a product is sharded over ranks"
    if getattr(model, "_compiled_call", None) is not None or _is_compiled(model.forward):
        return "compiled code"
    if getattr(model, "hf_quantizer", None) is not None:
        return "products of quantised weights"
    return None if attention in COUNTED_ATTENTION else f"attention of {attention}"


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def _counter_source(model: Any) -> str:
    attention = str(model.config._attn_implementation)
    note = ", on CPUs from the shapes of its calls" if attention == "sdpa" else ""
    return f"counted by torch.utils.flop_counter, {attention}{note}"


def _read_size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive size. Models whose layers differ have a list there."""
    value = fields.get(name) or default
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{name} is {value!r} in the model's metadata; estimating operations needs one positive number"
        )
    return value


def _unsupported(what: str) -> str:
    return f"{what} is not a supported dense decoder; supported: {', '.join(ARCHITECTURES)}"
