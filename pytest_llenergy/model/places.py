# SPDX-License-Identifier: Apache-2.0
"""Where this tool keeps things between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``LLENERGY_CACHE_DIR``, or the directory that the platform gives to caches."""
    named = os.environ.get("LLENERGY_CACHE_DIR")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("pytest-llenergy", appauthor=False))
