# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forks of a supervisor which has preloaded modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.local import LocalHost

from .groups import (
    run,
    start,
)


def test_ranks_never_descend_from_pytest_by_fork(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit neither its memory nor its open files, whatever libraries did to them."""
    monkeypatch.setattr(sys, "only_in_pytest", True, raising=False)
    with Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)

        def inherited(name: str) -> tuple[bool, bool]:
            open_files = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
            return hasattr(sys, "only_in_pytest"), Path(name) in open_files

        assert run(start(host), inherited, __file__) == [(False, False)] * 2


class TestForks:
    def test_forks_have_preloaded_modules_and_sessions_of_their_own(self, host: LocalHost) -> None:
        ranks = start(host, capabilities=Capabilities(data=True, preload=("this",)))

        def look() -> tuple[bool, bool, str]:

            return "this" in sys.modules, os.getsid(0) == os.getpid(), os.environ["RANK"]

        # Without a preload by the supervisor nobody would have imported it.
        assert run(ranks, look) == [(True, True, "0"), (True, True, "1")]
        ranks.close()

    def test_a_failed_preload_is_an_error_with_its_traceback(
        self, host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_wheel.py").write_text("raise ImportError('libcudnn.so.9: lost')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(WorkerError) as caught:
            start(host, capabilities=Capabilities(data=True, preload=("broken_wheel",)))
        assert str(caught.value).startswith(
            "importing broken_wheel before the ranks are forked failed: ImportError: libcudnn.so.9: lost\n"
        )
        assert "broken_wheel.py" in caught.value.details
