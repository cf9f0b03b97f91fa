# SPDX-License-Identifier: Apache-2.0
"""Functions that the suites run in ranks, and whether this is a dry run."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

#: Set in dry runs: tests that need a GPU then use the CPU.
DRY_VARIABLE = "LLENERGY_VALIDATION_DRY"
DRY = os.environ.get(DRY_VARIABLE) == "1"

GPU = pytest.mark.gpus(1, fallback="cpu") if DRY else pytest.mark.gpus(1)

#: File in which a suite records its observations.
OUT_VARIABLE = "LLENERGY_VALIDATION_OUT"


def note(**facts: Any) -> None:
    """Append one line of JSON for the part that started this run."""
    with Path(os.environ[OUT_VARIABLE]).open("a") as out:
        out.write(json.dumps(facts) + "\n")


def describe_visible_gpus() -> dict[str, Any]:
    """Return what this rank sees of the GPUs."""
    import torch

    count = torch.cuda.device_count()
    uuids = [str(getattr(torch.cuda.get_device_properties(place), "uuid", "")) for place in range(count)]
    return {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "count": count,
        "uuids": [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in uuids],
        "names": [torch.cuda.get_device_name(place) for place in range(count)],
    }


def multiply(seconds: float) -> int:
    """Multiply matrices for ``seconds``, on the GPU if the rank has one. Returns the number of products."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn((4096, 4096) if device == "cuda" else (128, 128), device=device)
    begin_s, products = time.monotonic(), 0
    while time.monotonic() - begin_s < seconds:
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        products += 1
    return products


def exchange() -> dict[str, Any]:
    """Run a collective over the rank's process group."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1 << 20, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(ones)
    return {"backend": dist.get_backend(), "ranks": dist.get_world_size(), "sum": float(ones[0])}


def occupy(ready: str, mebibytes: int) -> None:
    """Hold and use memory of the GPU until killed; creates the file ``ready`` once it does."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.zeros((mebibytes if device == "cuda" else 1) << 20, dtype=torch.uint8, device=device)
    multiply(0.1)
    Path(f"{ready}.new").write_text(str(os.getpid()))
    Path(f"{ready}.new").rename(ready)
    while held is not None:
        multiply(0.5)


_decoders: dict[str, Any] = {}


def decode(steps: int) -> int:
    """Run decoding steps; the first call in a rank builds the decoder. Returns the number of tokens."""
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device not in _decoders:
        # Import by the full name: the rank may have this function from a pickled copy of the module.
        _decoders[device] = import_module("benchmarks.validation.decoder").Decoder(device)
    decoder = _decoders[device]
    decoder.run(steps)
    return steps * int(decoder.tokens_per_step)
