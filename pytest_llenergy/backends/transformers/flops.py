# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of transformers, counted by torch: matrix products, two for each multiply-add."""

from __future__ import annotations

import copy
from typing import Any

from pytest_llenergy.record.timeline import Flops

#: Attention implementations that torch.utils.flop_counter counts, with the help of ``_count``.
COUNTED_ATTENTION = ("eager", "sdpa")


def count_flops(model: Any, job: Any, tensor: int) -> Flops:
    """Return the operations of one execution of a job, padding included. It is executed once more.

    ``tensor`` ranks hold a part of each weight.
    """
    uncounted = _uncounted_part(model, tensor)
    if uncounted is not None:
        return Flops.unknown(f"torch.utils.flop_counter does not see {uncounted}")
    attention = model.config._attn_implementation
    note = ", on CPUs from the shapes of its calls" if attention == "sdpa" else ""
    return Flops(count=_count(job), source=f"counted by torch.utils.flop_counter, {attention}{note}")


def _count(job: Any) -> int:
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
