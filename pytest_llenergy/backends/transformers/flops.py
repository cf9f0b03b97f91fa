# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a job: counted by torch, or estimated where torch cannot see them."""

from __future__ import annotations

import copy
from typing import Any

from pytest_llenergy.backends.flops import estimate_generation_flops, shape_from_config
from pytest_llenergy.backends.tasks import Result
from pytest_llenergy.errors import ModelError
from pytest_llenergy.model.timeline import Flops

#: Attention implementations that torch.utils.flop_counter counts, with the help of ``_count_by_torch``.
COUNTED_ATTENTION = ("eager", "sdpa")

NOT_COUNTED = "torch.utils.flop_counter does not see"


def job_flops(model: Any, job: Any, done: Result, tensor: int) -> Flops:
    """Return the operations of one run of a job. To count them, the job is run once more.

    Args:
        model: The loaded model.
        job: The job.
        done: Result of an earlier run.
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
