# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the ranks of a replica each hold a shard of every large matrix.

The matrices are split by transformers' own plan of the architecture. It neither looks whether the attention
heads can be split, nor knows that a rank sees one device only, nor of replicas that have nothing to do with
each other; all of that is seen to here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from pytest_llenergy.backends.base import RankContext
from pytest_llenergy.errors import BackendError

#: The last part of the names of projections that split by heads, in the plans of transformers 5.23: those
#: that make queries, and those that make keys. Where queries, keys and values are one matrix it is both.
OF_QUERIES = {"q_proj", "q_b_proj", "qkv_proj", "query_key_value"}
OF_KEYS = {"k_proj", "kv_b_proj", "qkv_proj", "query_key_value"}

#: How plans call a projection whose output stays split, so that each rank has heads of its own.
SPLIT = "colwise"


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
    split = {name.rpartition(".")[2] for name, style in plan.items() if style == SPLIT}
    heads = _of_layers(text, "num_attention_heads")
    kv_heads = _of_layers(text, "num_key_value_heads") or heads
    counts = [*(heads if split & OF_QUERIES else ()), *(kv_heads if split & OF_KEYS else ())]
    if all(count % tensor == 0 for count in counts):
        return
    largest = math.gcd(*counts)
    fitting = [str(degree) for degree in range(2, largest + 1) if largest % degree == 0]
    fit = f"tensor={' or tensor='.join(fitting)} fits" if fitting else "no degree above 1 fits"
    raise BackendError(
        f"transformers: {label} has {_told(heads)} attention heads and {_told(kv_heads)} KV heads, and "
        f"tensor={tensor} does not divide both; {fit}"
    )


@contextmanager
def sharded_load(context: RankContext, device: str) -> Iterator[Any]:
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
    mesh = _mesh(device.partition(":")[0], degrees.data, degrees.tensor)

    def of_this_replica(_config: Any) -> tuple[Any, Any]:
        return torch.device(device), TransformersDeviceMesh(mesh, mesh)

    mixin.initialize_distributed_mesh = of_this_replica
    try:
        yield DistributedConfig(tp_size=degrees.tensor, tp_plan="auto")
    finally:
        mixin.initialize_distributed_mesh = its_own


def seen_shards(model: Any, context: RankContext) -> dict[str, int]:
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
def _mesh(kind: str, data: int, tensor: int) -> Any:
    """Of all ranks: consecutive ones form a replica, as in the process plan.

    Ranks stay for other models; the groups are made once.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # The names that transformers looks for; those of size 1 are not used.
    return init_device_mesh(kind, (data, 1, 1, tensor), mesh_dim_names=("replica", "pp", "fsdp", "tp"))


def _of_layers(config: Any, name: str) -> list[int]:
    """Of all layers, which may differ; empty where the configuration does not say."""
    layers = list(getattr(config, "per_layer_config", None) or [config])
    counts = [getattr(layer, name, None) for layer in layers]
    return [count for each in counts if each for count in ([each] if isinstance(each, int) else each)]


def _told(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(set(counts))))
