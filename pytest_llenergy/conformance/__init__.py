# SPDX-License-Identifier: Apache-2.0
"""The tests that every backend passes, for those that come from elsewhere too: see docs/extending.md."""

from pytest_llenergy.conformance.suite import BackendConformance

__all__ = ["BackendConformance"]
