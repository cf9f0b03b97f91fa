# SPDX-License-Identifier: Apache-2.0
"""Placement: layers of one model on several devices of one process, which work in turn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from pytest_llenergy.errors import BackendError

#: How transformers and accelerate share layers out: evenly by memory, no device filled before the next.
DEVICE_MAP = "balanced"


def seen_placement(model: Any, n: int) -> dict[str, str]:
    """Which modules are on which device, as they were found after loading.

    Raises ``BackendError`` when the parameters are not on ``n`` GPUs, all of them: accelerate leaves devices
    out for small models, and moves what does not fit to the CPU or to disk, with a warning at most.
    """
    found = sorted({str(parameter.device) for parameter in model.parameters()})
    told = told_map(getattr(model, "hf_device_map", None) or {"": str(model.device)})
    away = [device for device in found if not device.startswith("cuda")]
    if away:
        raise BackendError(
            f"transformers: placement={n} left parameters on {', '.join(away)} (meta is on disk or in the "
            f"host's memory): {told}; the model needs more or larger GPUs"
        )
    if len(found) != n:
        raise BackendError(
            f"transformers: placement={n} was asked for, and the layers are on {len(found)} of the devices: "
            f"{told}; a model with so few layers needs no more"
        )
    return {"device_map": DEVICE_MAP, "hf_device_map": told}


def told_map(device_map: Mapping[str, Any]) -> str:
    """A device map in one line, modules in their order: ``model.embed_tokens..model.layers.7: 0; …``."""
    parts = []
    for device, group in groupby(device_map.items(), key=lambda entry: str(entry[1])):
        names = [name or "all" for name, _ in group]
        parts.append(f"{names[0] if len(names) == 1 else f'{names[0]}..{names[-1]}'}: {device}")
    return "; ".join(parts)
