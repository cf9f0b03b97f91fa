# SPDX-License-Identifier: Apache-2.0
"""From a model's files onto the devices of a rank, as the degrees say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.backends.transformers.placement import DEVICE_MAP, seen_placement
from pytest_llenergy.backends.transformers.tensor import check_heads, seen_shards, sharded_load
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel


def check_degrees(path: str, degrees: Parallel, label: str) -> None:
    """Refuse what cannot be, before any weight is read. Raises ``BackendError``."""
    if degrees.tensor == 1:
        return
    if degrees.placement > 1:
        raise BackendError(
            f"transformers: parallel(tensor={degrees.tensor}, placement={degrees.placement}) cannot be: a "
            "layer is either sharded or placed whole; use one of the two"
        )
    from transformers import AutoConfig

    check_heads(AutoConfig.from_pretrained(path), degrees.tensor, label)


def load_onto(
    loader: Any, path: str, keywords: Mapping[str, Any], context: RankContext, device: str
) -> tuple[Any, dict[str, Any]]:
    """``loader.from_pretrained(path, **keywords)`` on the rank's devices, the inputs going to ``device``.

    Returns the model and what was seen of it, for the record. Raises ``BackendError`` when that is not what
    was asked for.
    """
    degrees = context.parallel
    if degrees.tensor > 1:
        with sharded_load(context, device) as distributed_config:
            model = loader.from_pretrained(path, **keywords, distributed_config=distributed_config)
        return model, {"tp_plan": "auto", **seen_shards(model, context)}
    if degrees.placement > 1:
        model = loader.from_pretrained(path, **keywords, device_map=DEVICE_MAP)
        return model, dict(seen_placement(model, degrees.placement))
    model = loader.from_pretrained(path, **keywords)
    # Quantised weights are on the device from the start, and some cannot be moved.
    return model if "quantization_config" in keywords else model.to(device), {}
