# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` of decoding steps, as ``generate`` does it with a static cache."""

from __future__ import annotations

from typing import Any

from pytest_llenergy.errors import BackendError


def compile_config(mode: str) -> Any:
    """For ``GenerationConfig``. By itself transformers compiles on GPUs only."""
    import torch._inductor.config as inductor
    from transformers import CompileConfig

    # Else torch starts a process for each core, which would run beside what is measured.
    inductor.compile_threads = 1
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def graphs() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_now(job: Any) -> None:
    """Run a job once, so that nothing is left to compile. Raises ``BackendError`` when nothing was.

    What was compiled for the batch before is dropped first: with it, torch would compile this one for any
    shape, or after a few more not at all, and figures would depend on what has run earlier.
    """
    import torch

    torch.compiler.reset()
    before = graphs()
    job.run()
    if graphs() == before:
        raise BackendError(
            "transformers: compile: generate has compiled nothing of this model, which it does not support "
            "with every quantiser and architecture; leave compile out"
        )
