# SPDX-License-Identifier: Apache-2.0
"""What a side is: code, interpreter, environment and options of pytest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llenergy.model.paired import SideName


@dataclass(frozen=True)
class Side:
    """One side. ``origin`` is what people call it, ``short`` is its name in a line.

    ``root`` is its checkout, ``directory`` where pytest is started, ``venv`` the environment that was made
    for it.
    """

    name: SideName
    origin: str
    short: str
    root: Path
    directory: Path
    python: Path
    environment: Mapping[str, str] = field(repr=False)
    options: tuple[str, ...] = ()
    venv: Path | None = None
