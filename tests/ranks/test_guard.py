# SPDX-License-Identifier: Apache-2.0
"""However and whenever pytest ends, all its descendants end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.host import StartMethod
from pytest_llenergy.ranks.local import LocalHost

from .groups import (
    METHODS,
    run,
    start,
)
from .survivors import await_none, survivors


class TestImports:
    """Modules that are imported before the ranks start may hang, or start processes."""

    SCRIPT = """
import sys
from pathlib import Path
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.ranks.local import LocalHost
from tests.ranks.groups import *
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    Path(sys.argv[1], "started").touch()
    start(LocalHost("forkserver"), 1, Capabilities(data=True, preload=("endless",)))
"""

    def test_an_endless_preload_ends_with_pytest(self, mark: str, tmp_path: Path) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        (tmp_path / "endless.py").write_text(
            "import pathlib, subprocess, time\n"
            "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
            "pathlib.Path(__file__).with_name('imported').touch()\n"
            "time.sleep(300)\n"
        )
        script = tmp_path / "script.py"
        script.write_text(self.SCRIPT)
        with subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "TMPDIR": str(temporary),
            },
            stderr=subprocess.DEVNULL,
        ) as pytest_:
            while not (tmp_path / "imported").exists():
                assert pytest_.poll() is None
            assert any("sleep" in line for line in survivors(mark).values())
            pytest_.kill()
            assert await_none(mark) == {}
        assert list(temporary.iterdir()) == []

    @pytest.mark.parametrize("method", METHODS)
    def test_processes_started_by_an_import_end_with_the_ranks(
        self, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: StartMethod
    ) -> None:
        (tmp_path / "starts.py").write_text(
            "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n"
            "raise ImportError('x')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        host = LocalHost(method)
        with pytest.raises(WorkerError, match="ImportError: x"):
            run(start(host, 1, Capabilities(data=True, preload=("starts",))), "starts:x")
        host.close()
        assert await_none(mark) == {}


class TestKilledPytest:
    """A plain process stands for pytest; it has ranks and is killed."""

    SCRIPT = """
import os, sys, time
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.ranks.local import LocalHost
from tests.ranks.groups import *
if __name__ == "__main__":
    host = LocalHost(sys.argv[1])
    ranks = start(host)
    daemons = run(ranks, leave_daemon)
    print(host.directory(ranks._name).parent, *(rank.pid for rank in ranks.ranks), *daemons, flush=True)
    run(ranks, hold_the_lock_of_the_interpreter)
"""

    @pytest.mark.parametrize(("method", "how"), [("forkserver", "alone"), ("spawn", "stopped")])
    def test_a_killed_pytest_leaves_no_rank_no_grandchild_and_no_directory(
        self, mark: str, tmp_path: Path, method: str, how: str
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text(self.SCRIPT)
        with subprocess.Popen(
            [sys.executable, str(script), method, how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ) as pytest_:
            assert pytest_.stdout is not None
            directory, *pids = pytest_.stdout.readline().split()
            assert len(pids) == 4
            assert {int(pid) for pid in pids} <= set(survivors(mark))
            if how == "stopped":
                # Its guard kills a stopped supervisor.
                os.kill(psutil.Process(int(pids[0])).ppid(), signal.SIGSTOP)
            pytest_.kill()
            pytest_.wait()
            assert await_none(mark) == {}
        assert not Path(directory).exists()
