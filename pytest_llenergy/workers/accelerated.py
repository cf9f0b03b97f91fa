# SPDX-License-Identifier: Apache-2.0
"""What accelerate takes for the world, held against the process group."""

from __future__ import annotations

import sys

from pytest_llenergy.errors import PlanError


def check_accelerate() -> None:
    """Raise ``PlanError`` when work has shared itself out over fewer processes than the group has.

    ``PartialState()`` on a CPU takes no notice of a process group, nor of ``WORLD_SIZE``, unless it is told
    ``cpu=True`` (accelerate 1.15, ``state.py``, ``_prepare_backend``). Each rank then does all of the work.
    """
    state, dist = sys.modules.get("accelerate.state"), sys.modules.get("torch.distributed")
    if state is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return
    seen, world_size = state.PartialState._shared_state.get("num_processes"), dist.get_world_size()
    if seen is not None and seen != world_size:
        raise PlanError(
            f"accelerate sees {seen} process{'es' if seen > 1 else ''} in a world of {world_size} ranks, so "
            "each has done the work of all; on CPU ranks write PartialState(cpu=True), before anything else "
            "of accelerate"
        )
