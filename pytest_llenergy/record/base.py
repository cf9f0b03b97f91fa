# SPDX-License-Identifier: Apache-2.0
"""Base types of stored data, and the cache directory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec

EnergyKind = Literal["measured", "attributed", "estimated"]

#: Whether less of a metric is better (J, s, W, bytes) or more (tokens/s).
Direction = Literal["less", "more"]

#: What became of a test.
Status = Literal["measured", "invalid", "failed", "skipped", "crashed"]

Primitive = str | int | float | bool | None

#: Quantities and counts of stored rounds. Larger ones, which no machine has, would overflow in arithmetic.
LARGEST = 1e30
Number = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]

#: What decoding raises for data that is no JSON of the expected type.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class StoredStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of everything stored: immutable, keyword-only, and strict about unknown fields.

    Instances hold primitives and other stored data without cycles, so the garbage collector ignores them.
    """


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause collection while a large report is decoded: it finds nothing and takes half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def cache_directory() -> Path:
    """Return ``LLENERGY_CACHE_DIR``, or the cache directory of the platform."""
    named = os.environ.get("LLENERGY_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("pytest-llenergy", appauthor=False))
