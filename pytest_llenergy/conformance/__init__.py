# SPDX-License-Identifier: Apache-2.0
"""The tests that every backend must pass, also third-party ones; see docs/extending.md."""

from pytest_llenergy.conformance.suite import BackendConformance

__all__ = ["BackendConformance"]
