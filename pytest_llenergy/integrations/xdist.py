# SPDX-License-Identifier: Apache-2.0
"""pytest-xdist: who has the say, and what becomes of a test whose worker died.

Records travel on test reports, so a worker that dies takes with it only the test that it was running.
"""

from __future__ import annotations

import pytest


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for a controller."""
    return hasattr(config, "workerinput")


class Running:
    """Which tests are between set-up and teardown, and whether they measure."""

    def __init__(self) -> None:
        self._measured: dict[str, bool] = {}

    def see(self, report: pytest.TestReport, *, measured: bool) -> None:
        """Follow the reports of the workers."""
        if report.when == "setup":
            self._measured[report.nodeid] = measured
        elif report.when == "teardown":
            self._measured.pop(report.nodeid, None)

    def was_measuring(self, node_id: str) -> bool:
        """Whether a crash lost a measurement. A test that died in its set-up may have been one."""
        return self._measured.pop(node_id, True)
