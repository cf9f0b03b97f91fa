# SPDX-License-Identifier: Apache-2.0
"""The load option ``compile``: decoding steps compiled by torch before anything is measured."""

from __future__ import annotations

from typing import Any

from pytest_llenergy.backends.models import first_error_line
from pytest_llenergy.errors import BackendError


def compile_config(mode: str) -> Any:
    """Return the compile config of ``GenerationConfig``. By default transformers compiles on GPUs only."""
    import torch._inductor.config as inductor
    from transformers import CompileConfig

    # Otherwise torch starts a process per core, which would run during the measurement.
    inductor.compile_threads = 1
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def count_compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_job(job: Any) -> None:
    """Run a job once so that nothing is left to compile.

    Code compiled for earlier batches is dropped first: with it, torch would compile this batch for any shape,
    or after a few more not at all, and results would depend on earlier runs.
    """
    import torch

    torch.compiler.reset()
    before = count_compiled_graphs()
    try:
        job.run()
    except RuntimeError as error:
        raise BackendError(f"transformers: compile: {first_error_line(error)}") from error
    if count_compiled_graphs() == before:
        raise BackendError("transformers: compile: generate compiled nothing; it does with cache='static'")
