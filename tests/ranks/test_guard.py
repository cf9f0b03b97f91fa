# SPDX-License-Identifier: Apache-2.0
"""However and whenever pytest ends, all its descendants end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
