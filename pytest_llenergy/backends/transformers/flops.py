# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a job: counted as torch executes them, or worked out where it is blind."""

from __future__ import annotations

import copy
from typing import Any

from pytest_llenergy.backends.flops import estimate_generation_flops, shape_from_config
from pytest_llenergy.backends.tasks import Result
from pytest_llenergy.errors import ModelError
from pytest_llenergy.model.timeline import Flops

#: Attention that torch.utils.flop_counter sees, or that is told to it here.
COUNTED_ATTENTION = ("eager", "sdpa")

NOT_COUNTED = "torch.utils.flop_counter does not see"


def job_flops(model: Any, job: Any, done: Result, tensor: int) -> Flops:
    """Those of one run of a job, which is run once more where they are counted.

    ``tensor`` is how many ranks hold a part of each weight. ``done`` is what the job has made before.
    """
    unseen = _uncounted_part(model, tensor)
    if unseen is None:
        return Flops(count=_count_by_torch(model, job), source=_counter_source(model))
    if getattr(getattr(job, "config", None), "cache_implementation", None) == "static":
        # Whether its empty part takes part depends on the kernel, and on whether there is padding.
        return Flops.unknown(f"{NOT_COUNTED} {unseen}, and a static cache is not worked out")
    try:
        told = estimate_generation_flops(shape_from_config(model.config.to_dict()), done, padded=True)
    except ModelError as error:
        return Flops.unknown(f"{NOT_COUNTED} {unseen}, and {error}")
    if told.count is None:
        return told
    return Flops(count=told.count, shared=True, source=f"{told.source} ({unseen} is not seen by a counter)")


def _count_by_torch(model: Any, job: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    # The one kernel of sdpa that torch's own table leaves out; without it attention on the CPU is 0.
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    job = copy.copy(job)
    if getattr(job, "config", None) is not None:
        # A compiled step, as a static cache has on a GPU, would run unseen. It multiplies the same matrices.
        job.config = copy.deepcopy(job.config)
        job.config.disable_compile = True
    with FlopCounterMode(display=False, custom_mapping={on_cpu: attention}) as counter:
        job.run()
    return int(counter.get_total_flops())


def _uncounted_part(model: Any, tensor: int) -> str | None:
    """What would not be counted, or counted on each rank as if it were alone."""
    attention = str(model.config._attn_implementation)
    if tensor > 1:
        return "which part of a sharded product is a rank's own"
    if getattr(model, "_compiled_call", None) is not None or _is_compiled(model.forward):
        return "compiled code"
    if getattr(model, "hf_quantizer", None) is not None:
        return "products of quantised weights"
    return None if attention in COUNTED_ATTENTION else f"attention of {attention}"


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def _counter_source(model: Any) -> str:
    attention = str(model.config._attn_implementation)
    told = ", on CPUs from the shapes of its calls" if attention == "sdpa" else ""
    return f"counted by torch.utils.flop_counter, {attention}{told}"
