# SPDX-License-Identifier: Apache-2.0
"""pytest-llenergy: joules per token, with their uncertainty, as pytest tests.

Import nothing here: every rank imports this package before the devices that it may see are set. Public names
are in the subpackages; ``slo`` is imported from there on first use.

PYTEST_DONT_REWRITE: the process of an isolated test imports it before pytest, which would warn of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_llenergy.record.load_curve import slo

__all__ = ["__version__", "slo"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "slo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_llenergy.record import load_curve

    return load_curve.slo
