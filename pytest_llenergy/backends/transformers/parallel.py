# SPDX-License-Identifier: Apache-2.0
"""Load a model onto the devices of a rank, by tensor parallelism or placement, and verify the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.errors import BackendError

#: How accelerate distributes layers: evenly by memory, without filling one device before the next.
DEVICE_MAP = "balanced"


def verify_placement(model: Any, n: int) -> dict[str, str]:
    """Return which modules are on which device after loading, for the record."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    layout = "; ".join(
        f"{name}: {device}" for name, device in (getattr(model, "hf_device_map", None) or {}).items()
    )
    if len(devices) != n or not all(device.startswith("cuda") for device in devices):
        raise BackendError(
            f"transformers: placement={n} was requested, but the layers are on {', '.join(devices)} (meta is "
            f"on disk or in the host's memory): {layout}; the model needs other GPUs"
        )
    return {"device_map": DEVICE_MAP, "hf_device_map": layout}


@contextmanager
def sharded_loading(context: RankContext, device: str) -> Iterator[Any]:
    """Make ``from_pretrained(distributed_config=...)`` shard over the ranks of this replica, which enter it.

    By default transformers takes the accelerator that torch was *built* for, numbered ``LOCAL_RANK``, and the
    whole world as one replica, or wraps replicas in FSDP. Here a rank sees only device 0, or none although
    torch was built for GPUs, and replicas share nothing.
    """
    import torch
    from transformers.distributed import DistributedConfig, mixin
    from transformers.distributed.mixin import initialize_distributed_mesh as original
    from transformers.distributed.utils import TransformersDeviceMesh

    degrees = context.parallel
    mesh = _device_mesh(device.partition(":")[0], degrees.data, degrees.tensor)

    def initialize_replica_mesh(_config: Any) -> tuple[Any, Any]:
        return torch.device(device), TransformersDeviceMesh(mesh, mesh)

    mixin.initialize_distributed_mesh = initialize_replica_mesh
    try:
        yield DistributedConfig(tp_size=degrees.tensor, tp_plan="auto")
    finally:
        mixin.initialize_distributed_mesh = original


def verify_shards(model: Any, tensor: int) -> dict[str, int]:
    """Return the number of parameters on this rank and in the whole model, for the record."""
    from torch.distributed.tensor import DTensor

    own = total = 0
    for parameter in model.parameters():
        own += (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        total += parameter.numel()
    if own == total:
        raise BackendError(
            f"transformers: tensor={tensor} was requested, but this rank holds all {total} parameters of "
            f"{type(model).__name__} unsharded"
        )
    return {"parameters_of_rank": own, "parameters": total}


@lru_cache(maxsize=1)
def _device_mesh(kind: str, data: int, tensor: int) -> Any:
    """Return the mesh of all ranks; consecutive ranks form a replica, as in the process plan.

    Cached: ranks stay for other models, and their groups are created once.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # Names that transformers expects; those of size 1 are unused.
    return init_device_mesh(kind, (data, 1, 1, tensor), mesh_dim_names=("replica", "pp", "fsdp", "tp"))


def load_onto_devices(
    loader: Any, path: str, keywords: Mapping[str, Any], context: RankContext, device: str
) -> tuple[Any, dict[str, Any]]:
    """Call ``loader.from_pretrained(path, **keywords)`` for the devices of the rank.

    Returns the model and what goes into the record.
    """
    degrees = context.parallel
    if degrees.tensor > 1 and degrees.placement > 1:
        raise BackendError("transformers: a layer is either sharded (tensor) or placed whole (placement)")
    if degrees.tensor > 1:
        with sharded_loading(context, device) as distributed_config:
            model = load_complete(loader, path, **keywords, distributed_config=distributed_config)
        return model, {"tp_plan": "auto", **verify_shards(model, degrees.tensor)}
    if degrees.placement > 1:
        model = load_complete(loader, path, **keywords, device_map=DEVICE_MAP)
        return model, dict(verify_placement(model, degrees.placement))
    model = load_complete(loader, path, **keywords)
    # Quantised weights are already on the device, and some cannot be moved.
    return model if "quantization_config" in keywords else model.to(device), {}


def load_complete(loader: Any, path: str, **keywords: Any) -> Any:
    """Call ``loader.from_pretrained(path, **keywords)`` for a model, all of whose weights are in its files.

    transformers would make random ones for the others. Raises ``ValueError`` if there are any.
    """
    model, report = loader.from_pretrained(path, **keywords, output_loading_info=True)
    random = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if random:
        raise ValueError(
            f"its files lack weights, or have them in another shape: {len(random)} would be random, such as "
            f"{min(random)}"
        )
    return model
