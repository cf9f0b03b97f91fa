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

import msgspec

from pytest_llenergy.backends.gguf_files import read_gguf, read_gguf_field
from pytest_llenergy.backends.models import ModelSource
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


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def flop(self, prompt: int, new: int) -> int:
        """Operations of one sequence: the prefill of ``prompt`` tokens gives the first of ``new`` tokens,
        each step one more.
        """
        projections = 2 * (self.heads + self.kv_heads) * self.head_dim
        linear = 2 * self.layers * self.hidden * (projections + 3 * self.intermediate)
        pairs = prompt**2 + sum(prompt + step for step in range(1, new))
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        output = 2 * self.hidden * self.vocabulary
        return linear * (prompt + new - 1) + attention + output * new


def shape_from_config(config: Mapping[str, Any]) -> DecoderShape:
    """Read the shape from the content of a config.json.

    Raises:
        ModelError: If it is not a plain dense decoder.
    """
    kind = config.get("model_type")
    others = [name for name in (*EXPERT_FIELDS, "sliding_window") if config.get(name)]
    if others == ["sliding_window"] and not config.get("use_sliding_window", True):
        others = []
    if kind not in ARCHITECTURES or others:
        what = f"model_type {kind}{f' with {others[0]}' if others else ''}"
        raise ModelError(f"{what} is no dense decoder with full attention of {', '.join(ARCHITECTURES)}")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    sizes = {
        "layers": config.get("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (hidden // heads if hidden and heads else None),
        "intermediate": config.get("intermediate_size"),
        "vocabulary": config.get("vocab_size"),
    }
    try:
        # Models whose layers differ have lists there.
        return msgspec.convert(sizes, DecoderShape)
    except msgspec.ValidationError as error:
        raise ModelError(f"sizes in the model's metadata: {error}") from None


def config_of_gguf(file: Path) -> dict[str, Any]:
    """Return what a GGUF file says under the names of a config.json.

    Raises:
        ModelError: If it cannot be read.
    """
    names = {
        "model_type": "general.architecture",
        "num_experts": "expert_count",
        "sliding_window": "attention.sliding_window",
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
    }
    embedding = (each for each in read_gguf(file).tensors if each.name == "token_embd.weight")
    found = {name: read_gguf_field(file, field) for name, field in names.items()}
    return {**found, "vocab_size": next((int(each.shape[1]) for each in embedding), None)}


def shape_from_source(model: ModelSource) -> DecoderShape:
    """Read the shape from a GGUF file or a directory.

    Raises:
        ModelError: If the model is neither, or no plain dense decoder.
    """
    if model.kind == "gguf":
        return shape_from_config(config_of_gguf(Path(model.location)))
    file = Path(model.location) / "config.json"
    if model.kind != "directory" or not file.exists():
        raise ModelError(f"{model.label} has no config.json here to estimate operations from")
    return shape_from_config(json.loads(read_limited(file)))


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
    except (ModelError, OSError, ValueError) as error:
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
    attention = model.config._attn_implementation
    if uncounted is None:
        note = ", on CPUs from the shapes of its calls" if attention == "sdpa" else ""
        source = f"counted by torch.utils.flop_counter, {attention}{note}"
        return Flops(count=_count_by_torch(model, job), source=source)
    unseen = f"torch.utils.flop_counter does not see {uncounted}"
    if getattr(getattr(job, "config", None), "cache_implementation", None) == "static":
        # Whether its empty part is computed depends on the kernel and on padding.
        return Flops.unknown(f"{unseen}, and operations with a static cache are not estimated")
    try:
        shape = shape_from_config(model.config.to_dict())
    except ModelError as error:
        return Flops.unknown(f"{unseen}, and {error}")
    estimated = estimate_generation_flops(shape, done, padded=True)
    if estimated.count is None:
        return estimated
    return msgspec.structs.replace(estimated, source=f"{SOURCE} (the counter does not see {uncounted})")


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
    compiled = ("_torchdynamo_orig_callable", "_orig_mod")
    if getattr(model, "_compiled_call", None) or any(hasattr(model.forward, name) for name in compiled):
        return "compiled code"
    if getattr(model, "hf_quantizer", None) is not None:
        return "products of quantised weights"
    return None if attention in COUNTED_ATTENTION else f"attention of {attention}"
