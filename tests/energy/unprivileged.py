# SPDX-License-Identifier: Apache-2.0
"""Run test code without root's privileges."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root's privileges temporarily, because root may read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def privileged(work: Callable[[float], None]) -> Callable[[float], None]:
    """Return a function that works with root's privileges again, if this process has them."""
    as_root = os.geteuid() == 0

    def run(argument: float) -> None:
        if as_root:
            os.seteuid(0)
        work(argument)
        if as_root:
            os.seteuid(NOBODY)

    return run


@contextmanager
def open_directory() -> Iterator[Path]:
    """Create a temporary directory that everybody may enter, unlike the parents of ``tmp_path``."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)
