# SPDX-License-Identifier: Apache-2.0
"""What pytest's own process means for its ranks: the environment they inherit, and what would break them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.workers.plan import STALE_PREFIXES

#: Told anew for every phase of every test; ranks outlive the test that started them.
OF_ONE_TEST = ("PYTEST_CURRENT_TEST",)


@dataclass(frozen=True)
class Surroundings:
    """What ranks take over from pytest's process when they start."""

    environment: dict[str, str]
    directory: str
    search_path: tuple[str, ...]


def surroundings() -> Surroundings:
    """As they are now. A directory that is gone is none."""
    try:
        directory = str(Path.cwd())
    except OSError:
        directory = ""
    return Surroundings(inherited(), directory, tuple(path for path in sys.path if isinstance(path, str)))


def inherited() -> dict[str, str]:
    """The environment of ranks that are started now, but for what the plan sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_ONE_TEST and not name.startswith(STALE_PREFIXES)
    }


def hazards() -> Iterator[str]:
    """What a test file or a plugin has done to this process that users take for a fault of the ranks."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        chosen = multiprocessing.get_start_method(allow_none=True)
        # The platform's own is set by any library that makes a queue or a lock, by no choice of anybody's.
        if chosen not in (None, "spawn", multiprocessing.get_all_start_methods()[0]):
            yield (
                f"multiprocessing's start method was set to {chosen!r} in pytest's process; ranks do not "
                "follow it, they are started as --energy-start-method says"
            )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield (
            "CUDA is initialised in pytest's own process, by a test file or a plugin: it holds memory of a "
            "GPU, and processes forked from it cannot use CUDA; move the call into workers.run"
        )
