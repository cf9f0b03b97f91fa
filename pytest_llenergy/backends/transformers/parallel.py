# SPDX-License-Identifier: Apache-2.0
"""Load a model onto the devices of a rank: tensor parallelism and placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Parallel

# Placement: layers of one model on several devices of one process, which work in turn.

#: How transformers and accelerate share layers out: evenly by memory, no device filled before the next.
DEVICE_MAP = "balanced"


def verify_placement(model: Any, n: int) -> dict[str, str]:
    """Which modules are on which device, as they were found after loading.

    Raises ``BackendError`` when the parameters are not on ``n`` GPUs, all of them: accelerate leaves devices
    out for small models, and moves what does not fit to the CPU or to disk, with a warning at most.
    """
    found = sorted({str(parameter.device) for parameter in model.parameters()})
    told = format_device_map(getattr(model, "hf_device_map", None) or {"": str(model.device)})
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


def format_device_map(device_map: Mapping[str, Any]) -> str:
    """A device map in one line, modules in their order: ``model.embed_tokens..model.layers.7: 0; …``."""
    parts = []
    for device, group in groupby(device_map.items(), key=lambda entry: str(entry[1])):
        names = [name or "all" for name, _ in group]
        parts.append(f"{names[0] if len(names) == 1 else f'{names[0]}..{names[-1]}'}: {device}")
    return "; ".join(parts)


# Tensor parallelism: the ranks of a replica each hold a shard of every large matrix.
#
# The matrices are split by transformers' own plan of the architecture. It neither looks whether the attention
# heads can be split, nor knows that a rank sees one device only, nor of replicas that have nothing to do with
# each other; all of that is seen to here.

#: The last part of the names of projections that split by heads, in the plans of transformers 5.23: those
#: that make queries, and those that make keys. Where queries, keys and values are one matrix it is both.
QUERY_PROJECTIONS = {"q_proj", "q_b_proj", "qkv_proj", "query_key_value"}
KEY_PROJECTIONS = {"k_proj", "kv_b_proj", "qkv_proj", "query_key_value"}

#: How plans call a projection whose output stays split, so that each rank has heads of its own.
COLUMNWISE = "colwise"


def check_heads(config: Any, tensor: int, label: str) -> None:
    """Refuse a degree that does not divide the heads of a model; nothing but its configuration is needed.

    transformers would load it, and fail with a tensor of a wrong shape in the first forward pass. Raises
    ``BackendError`` naming heads, KV heads and the degrees that fit.
    """
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise BackendError(
            f"transformers: it has no tensor-parallel plan for models of type {text.model_type!r}, so "
            f"nothing of {label} would be sharded; use parallel(data=...) or another model"
        )
    split = {name.rpartition(".")[2] for name, style in plan.items() if style == COLUMNWISE}
    heads = _layer_counts(text, "num_attention_heads")
    kv_heads = _layer_counts(text, "num_key_value_heads") or heads
    counts = [*(heads if split & QUERY_PROJECTIONS else ()), *(kv_heads if split & KEY_PROJECTIONS else ())]
    if all(count % tensor == 0 for count in counts):
        return
    largest = math.gcd(*counts)
    fitting = [str(degree) for degree in range(2, largest + 1) if largest % degree == 0]
    fit = f"tensor={' or tensor='.join(fitting)} fits" if fitting else "no degree above 1 fits"
    raise BackendError(
        f"transformers: {label} has {_join_counts(heads)} attention heads and "
        f"{_join_counts(kv_heads)} KV heads, and tensor={tensor} does not divide both; {fit}"
    )


@contextmanager
def sharded_loading(context: RankContext, device: str) -> Iterator[Any]:
    """While it lasts ``from_pretrained(distributed_config=...)`` shards over the ranks of this replica.

    Gives the configuration to pass. All ranks must come here together, for they form groups. Raises
    ``BackendError`` when transformers cannot do it in this way.

    By itself transformers takes the accelerator that torch was *built* for, with the number ``LOCAL_RANK``,
    and the whole world for one replica, or else wraps replicas in FSDP. Here a rank sees one device, number
    0, or none although torch was built for them, and replicas share nothing.
    """
    try:
        from transformers.distributed import DistributedConfig, mixin
        from transformers.distributed.mixin import initialize_distributed_mesh as its_own
        from transformers.distributed.utils import TransformersDeviceMesh
    except ImportError as error:
        import transformers

        raise BackendError(
            f"transformers: tensor parallelism is known to work with version 5.23, not with "
            f"{transformers.__version__}, which is installed ({error}); pip install 'transformers>=5.23'"
        ) from error
    import torch

    degrees = context.parallel
    mesh = _device_mesh(device.partition(":")[0], degrees.data, degrees.tensor)

    def of_this_replica(_config: Any) -> tuple[Any, Any]:
        return torch.device(device), TransformersDeviceMesh(mesh, mesh)

    mixin.initialize_distributed_mesh = of_this_replica
    try:
        yield DistributedConfig(tp_size=degrees.tensor, tp_plan="auto")
    finally:
        mixin.initialize_distributed_mesh = its_own


def verify_shards(model: Any, context: RankContext) -> dict[str, int]:
    """How many elements the parameters of this rank have, and how many the model has, as they were found.

    Raises ``BackendError`` when no parameter is a shard, or when one is shared with other ranks than those of
    this replica.
    """
    from torch.distributed.tensor import DTensor

    tensor = context.parallel.tensor
    first = context.rank - context.rank % tensor
    replica = list(range(first, first + tensor))
    own = whole = shards = 0
    for name, parameter in model.named_parameters():
        local = parameter
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            if ranks != replica:
                raise BackendError(
                    f"transformers: {name} is shared by ranks {ranks}, planned were the ranks {replica}"
                )
        own += local.numel()
        whole += parameter.numel()
        shards += local.numel() < parameter.numel()
    if not shards:
        raise BackendError(
            f"transformers: tensor={tensor} was asked for, and this rank holds all {whole} parameters of "
            f"{type(model).__name__} and no shard of any"
        )
    return {"parameters_of_rank": own, "parameters": whole}


@lru_cache(maxsize=1)
def _device_mesh(kind: str, data: int, tensor: int) -> Any:
    """Of all ranks: consecutive ones form a replica, as in the process plan.

    Ranks stay for other models; the groups are made once.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # The names that transformers looks for; those of size 1 are not used.
    return init_device_mesh(kind, (data, 1, 1, tensor), mesh_dim_names=("replica", "pp", "fsdp", "tp"))


def _layer_counts(config: Any, name: str) -> list[int]:
    """Of all layers, which may differ; empty where the configuration does not say."""
    layers = list(getattr(config, "per_layer_config", None) or [config])
    counts = [getattr(layer, name, None) for layer in layers]
    return [count for each in counts if each for count in ([each] if isinstance(each, int) else each)]


def _join_counts(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(set(counts))))


# From a model's files onto the devices of a rank, as the degrees say.


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


def load_onto_devices(
    loader: Any, path: str, keywords: Mapping[str, Any], context: RankContext, device: str
) -> tuple[Any, dict[str, Any]]:
    """``loader.from_pretrained(path, **keywords)`` on the rank's devices, the inputs going to ``device``.

    Returns the model and what was seen of it, for the record. Raises ``BackendError`` when that is not what
    was asked for.
    """
    degrees = context.parallel
    if degrees.tensor > 1:
        with sharded_loading(context, device) as distributed_config:
            model = loader.from_pretrained(path, **keywords, distributed_config=distributed_config)
        return model, {"tp_plan": "auto", **verify_shards(model, context)}
    if degrees.placement > 1:
        model = loader.from_pretrained(path, **keywords, device_map=DEVICE_MAP)
        return model, dict(verify_placement(model, degrees.placement))
    model = loader.from_pretrained(path, **keywords)
    # Quantised weights are on the device from the start, and some cannot be moved.
    return model if "quantization_config" in keywords else model.to(device), {}
