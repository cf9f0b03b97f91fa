# SPDX-License-Identifier: Apache-2.0
"""What blocks is run in a thread beside the event loop, of asyncio or of trio."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[[], object]) -> None:
    """Call it where it may block."""
    trio: Any = sys.modules.get("trio")
    if trio is not None and _runs(trio):
        await trio.to_thread.run_sync(function)
        return
    import asyncio

    await asyncio.get_running_loop().run_in_executor(None, function)


def _runs(trio: Any) -> bool:
    # Asked first: a loop of asyncio may run around it.
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
