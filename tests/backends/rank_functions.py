# SPDX-License-Identifier: Apache-2.0
"""Functions that run inside ranks: what a rank holds of a model and what it computes."""

from __future__ import annotations

from typing import Any


def held(degrees: dict[str, int], model: str) -> dict[str, Any]:
    """Load a model by the backend. Returns the local and full shapes of parameters."""
    import os

    from pytest_llenergy.backends.base import RankContext
    from pytest_llenergy.backends.models import resolve_model
    from pytest_llenergy.backends.transformers.backend import TransformersBackend
    from pytest_llenergy.record.record import Parallel

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = TransformersBackend()
    context = RankContext(rank=rank, local_rank=rank, world_size=world_size, parallel=Parallel(**degrees))
    info = backend.load(resolve_model(model), {"dtype": "float32"}, context)
    loaded = backend._model
    shapes = {}
    for name, parameter in loaded.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        shapes[name] = (tuple(local.shape), tuple(parameter.shape))
    return {"shapes": shapes, "options": info.options}


def refusal_of_no_shards() -> str:
    """Verify an unsharded layer on a rank whose plan has shards."""
    import torch

    from pytest_llenergy.backends.transformers.parallel import verify_shards
    from pytest_llenergy.errors import BackendError

    try:
        return str(verify_shards(torch.nn.Linear(3, 3), 2))
    except BackendError as error:
        return str(error)


def refusals(factory: str, model: str | None, cases: list[dict[str, Any]]) -> list[str | None]:
    """Load a model with each of these options. Returns the error of each; None if it was loaded."""
    from pytest_llenergy.backends.base import RankContext, create_backend
    from pytest_llenergy.backends.models import resolve_model
    from pytest_llenergy.errors import LLEnergyError

    found: list[str | None] = []
    for options in cases:
        backend = create_backend(factory)
        try:
            backend.load(resolve_model(model), options, RankContext())
        except LLEnergyError as error:
            found.append(str(error))
        else:
            backend.close()
            found.append(None)
    return found


def refused_batches(
    factory: str, model: str | None, cases: list[tuple[dict[str, Any], list[str], dict[str, Any]]]
) -> list[str | None]:
    """Prepare a batch for each of these options, prompts and parameters. Returns the errors, if any."""
    from pytest_llenergy.backends.base import RankContext, create_backend
    from pytest_llenergy.backends.models import resolve_model
    from pytest_llenergy.backends.tasks import GenerationParams
    from pytest_llenergy.errors import LLEnergyError

    found: list[str | None] = []
    backend, loaded = create_backend(factory), None
    for options, prompts, params in cases:
        if options != loaded:
            if loaded is not None:
                backend.close()
            backend.load(resolve_model(model), options, RankContext())
            loaded = options
        try:
            backend.prepare(prompts, GenerationParams.parse(params))
        except LLEnergyError as error:
            found.append(str(error))
        else:
            found.append(None)
    backend.close()
    return found
