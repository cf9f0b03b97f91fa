# SPDX-License-Identifier: Apache-2.0
"""Base types of stored data, and the user's cache directory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

# What everything stored has in common.

EnergyKind = Literal["measured", "estimated"]
Primitive = str | int | float | bool | None


class StoredStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of everything stored: immutable, named fields, unknown fields refused on reading.

    It holds primitives and never itself, so that the garbage collector need not look at it.
    """


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Do not look for garbage while millions of objects are made that are none: that takes half the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# Where this tool keeps things between runs.


def cache_directory() -> Path:
    """``LLENERGY_CACHE_DIR``, or the directory that the platform gives to caches."""
    named = os.environ.get("LLENERGY_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("pytest-llenergy", appauthor=False))
