# SPDX-License-Identifier: Apache-2.0
"""The tests that every backend must pass, also third-party ones; see docs/extending.md."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.conformance.suite import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> object:
    """Import the suite late: ranks need ``conformance.ranks``, and their interpreter may have no pytest."""
    if name != "BackendConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_llenergy.conformance.suite import BackendConformance

    return BackendConformance
