# SPDX-License-Identifier: Apache-2.0
"""Progress on a terminal and without one, without disturbing the measurement."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from pytest_llenergy.plugin.progress import can_redraw

from ..conftest import TEN_WATTS
from ..terminals import TerminalOutput, pytest_on_terminal

Read = Callable[..., dict[str, Any]]

#: Plain tests around two measured ones.
AMONG_OTHERS = """
import time
def test_a(): pass
def test_measured(energy):
    energy(time.sleep, 0.1)
def test_b(): pass
def test_also_measured(energy):
    energy(time.sleep, 0.1)
def test_c(): pass
"""

#: Options that select the first measured test.
ONE = ("-k", "test_measured")

#: Source of a conftest that prints progress lines after 0.2 s instead of ten seconds.
SOON = (
    TEN_WATTS
    + "\nfrom pytest_llenergy.plugin import progress\n"
    + "progress.FIRST_LINE_S, progress.NEXT_LINE_S = 0.2, 0.2\n"
)

#: Escape sequences that move up and erase a line.
UP, ERASE = "\x1b[A", "\x1b[K"


def dots(seen: TerminalOutput) -> list[str]:
    return [line for line in seen.screen if line.startswith("test_it.py")]


def test_terminal_shows_one_line_and_clears_it(quick: pytest.Pytester) -> None:
    quick.makepyfile(test_it=AMONG_OTHERS)
    seen = pytest_on_terminal("test_it.py", "--energy-warmup=1")
    assert seen.code == 0
    for step in ("preparing", "warm-up 1 of 1", "round 1 of 2", "round 2 of 2, "):
        assert seen.showed(f"test_it.py::test_measured: {step}"), step
    assert seen.showed("s left")
    assert seen.showed("test_it.py::test_also_measured: round 1 of 2")
    assert not [line for line in seen.screen if "round" in line and "::" in line]
    (line,) = dots(seen)
    assert line.split() == ["test_it.py", ".....", "[100%]"]
    assert " energy " in seen.screen[seen.screen.index(line) + 1]
    # The progress line follows the dots and is the last line.
    shown = [frame for frame in seen.frames if any("test_also_measured: round" in line for line in frame)]
    assert shown
    for frame in shown:
        (place,) = (number for number, line in enumerate(frame) if "test_also_measured: round" in line)
        assert frame[place - 1] == "test_it.py ..."
        assert not any(frame[place + 1 :])


@pytest.mark.parametrize("before", [29, 30, 58])
@pytest.mark.slow
def test_full_line_of_dots_is_not_overwritten(quick: pytest.Pytester, before: int) -> None:
    """Forty columns hold the file name and 29 dots."""
    quick.makepyfile(
        test_it=f"""
        import pytest, time
        @pytest.mark.parametrize("i", range({before}))
        def test_a(i): pass
        def test_measured(energy): energy(time.sleep, 0.05)
        def test_b(): pass
        """
    )
    seen = pytest_on_terminal("test_it.py", "-o", "console_output_style=classic", columns=40)
    assert seen.showed("test_measured: round 1")
    whole = f"test_it.py {'.' * (before + 2)}"
    first = seen.screen.index(whole[:40])
    lines = [whole[at : at + 40] for at in range(0, len(whole), 40)]
    assert seen.screen[first : first + len(lines)] == lines


@pytest.mark.parametrize("columns", [40, 200])
@pytest.mark.slow
def test_long_test_name_stays_on_one_line(quick: pytest.Pytester, columns: int) -> None:
    quick.makepyfile(
        test_it="""
        import pytest, time
        @pytest.mark.parametrize("i", [0, 1], ids=["x" * 300 + "-long", "\\u5b57" * 90 + "-wide"])
        def test_a_rather_long_name_of_a_test_that_says_all_that_it_does_and_more(energy, i):
            energy(time.sleep, 0.05)
        """
    )
    unescaped = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support=true"
    seen = pytest_on_terminal("-v", "-o", unescaped, "test_it.py", columns=columns, rows=200)
    assert seen.code == 0
    shown = [frame for frame in seen.frames if any("round 2 of 2" in line for line in frame)]
    assert shown
    for frame in shown:
        (place,) = (number for number, line in enumerate(frame) if "round 2 of 2" in line)
        assert frame[place].startswith("test")
        assert "long]: round 2" in frame[place] or "wide]: round 2" in frame[place] or columns == 40
        assert not any(frame[place + 1 :])
    # The name may be wrapped.
    assert "".join(seen.screen).count("PASSED") == 2


def test_verbose_results_follow_their_test_names(quick: pytest.Pytester) -> None:
    quick.makepyfile(test_it=AMONG_OTHERS)
    seen = pytest_on_terminal("-v", "test_it.py")
    results = [line.split()[:2] for line in seen.screen if line.startswith("test_it.py::")]
    names = ("a", "measured", "b", "also_measured", "c")
    assert results[:5] == [[f"test_it.py::test_{name}", "PASSED"] for name in names]


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """Return a writable stream that is a terminal."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        yield file
    os.close(master)


@pytest.mark.parametrize(
    ("arguments", "alone"),
    [
        ([], True),
        (["-p", "no:logging"], True),
        (["-s"], False),
        (["--capture=sys"], False),
        (["--setup-show"], False),
        (["-o", "log_cli=true"], False),
        (["--log-cli-level=INFO"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_line_is_redrawn_while_output_is_not_captured(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    terminal: TextIO,
    arguments: list[str],
    alone: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    config = pytester.parseconfigure(*arguments)
    assert can_redraw(config, pytest.TerminalReporter(config, terminal)) == alone

    class Another(pytest.TerminalReporter):  # type: ignore[misc]
        """Stands for the reporter of a plugin, which may draw its own line."""

    assert not can_redraw(config, Another(config, terminal))
    with Path(os.devnull).open("w") as file:
        assert not can_redraw(config, pytest.TerminalReporter(config, file))


def test_output_of_tests_with_s_is_kept(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        test_it="""
        def test_measured(energy):
            energy(lambda: print("printed by the test"))
        """
    )
    seen = pytest_on_terminal("test_it.py", "-s")
    assert seen.code == 0
    assert ERASE not in seen.raw
    assert "\n".join(seen.screen).count("printed by the test") == 2


@pytest.mark.slow
def test_quiet_shows_no_progress(quick: pytest.Pytester) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(test_it=AMONG_OTHERS)
    quick.runpytest_subprocess("-q", "-s", *ONE).stdout.no_fnmatch_line("*: round *")


def test_dumb_terminal_gets_whole_lines(quick: pytest.Pytester) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(test_it=AMONG_OTHERS)
    seen = pytest_on_terminal("test_it.py", *ONE, environment={"TERM": "dumb"})
    assert UP not in seen.raw
    assert ERASE not in seen.raw
    assert seen.showed("energy: test_it.py::test_measured: round 2 of 2")


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
@pytest.mark.slow
def test_long_work_without_a_terminal_prints_lines(quick: pytest.Pytester, capture: str) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(
        test_it="""
        import os, sys, time
        def work():
            print("printed by the test")
            os.write(2, b"written by the test\\n")
            time.sleep(0.1)
        def test_measured(energy):
            energy(work)
            raise RuntimeError("what was captured is shown")
        """
    )
    result = quick.runpytest_subprocess("test_it.py", f"--capture={capture}", "--color=no")
    lines = [line for line in result.stdout.lines if line.startswith("energy: test_it.py::")]
    # There is a first line only if the machine is slow.
    assert len(lines) <= 2
    message = r"energy: test_it.py::test_measured: round 2 of 2, \d+ s left \(\d+ s since it began\)"
    assert re.fullmatch(message, lines[-1])
    assert "\x1b" not in result.stdout.str()
    if capture in ("fd", "sys"):
        # No progress line was captured as output of the test, and no output was lost.
        captured = result.stdout.str().partition("Captured stdout call")[2]
        assert captured.partition("-----\n")[2].startswith("printed by the test\nprinted by the test\n")


@pytest.mark.slow
def test_xdist_workers_print_no_progress(quick: pytest.Pytester) -> None:
    quick.makeconftest(SOON)
    quick.makepyfile(test_it=AMONG_OTHERS)
    seen = pytest_on_terminal("test_it.py", *ONE, "-n1")
    assert seen.code == 0
    assert not seen.showed("round ")


def test_no_progress_is_written_during_a_round(quick: pytest.Pytester, read_report: Read) -> None:
    """Compare the times of all terminal writes with the times of the rounds."""
    quick.makeconftest(
        TEN_WATTS
        + """
import json, pathlib, threading, time
WRITTEN = []
@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    write_raw = reporter._tw.write_raw
    def noted(text, **kwargs):
        began_s = time.monotonic()
        write_raw(text, **kwargs)
        WRITTEN.append((began_s, time.monotonic(), text))
    reporter._tw.write_raw = noted
def pytest_unconfigure():
    pathlib.Path("written.json").write_text(json.dumps(WRITTEN))
"""
    )
    quick.makepyfile(
        test_it="""
        import threading, time
        def work():
            time.sleep(0.1)
            return sorted(each.name for each in threading.enumerate())
        def test_measured(energy):
            assert energy(work).result == ["MainThread", "llenergy-sampler"]
        """
    )
    seen = pytest_on_terminal("test_it.py", "--energy-report", "--energy-rounds=4")
    assert seen.code == 0
    (record,) = read_report()["records"]
    written = json.loads((quick.path / "written.json").read_text())
    gap_s = record["procedure"]["gap_s"]
    assert gap_s >= 0.1
    for number in range(1, 5):
        assert any(f"round {number} of 4" in text for _, _, text in written)
    for round_ in record["rounds"]:
        began_s, ended_s = round_["start_s"] - gap_s, round_["start_s"] + round_["duration_s"] + gap_s
        assert not [text for start_s, end_s, text in written if start_s < ended_s and end_s > began_s]


def test_progress_stops_while_a_debugger_runs(quick: pytest.Pytester) -> None:
    quick.makepyfile(
        test_it="""
        calls = []
        def work():
            calls.append(1)
            if len(calls) == 1:
                breakpoint()
        def test_measured(energy):
            energy(work)
        """
    )
    seen = pytest_on_terminal("test_it.py", answers=[("(Pdb) ", "p 'here' * 2\n"), ("herehere", "c\n")])
    assert seen.code == 0
    after = seen.raw.partition("PDB set_trace")[2]
    assert "herehere" in after
    assert "round 2" not in after


#: Source of a conftest that says at once what a test waits for, so that a busy machine cannot miss it.
SOON_WAITS = SOON + "from pytest_llenergy.devices import locks\nlocks.WAIT_MESSAGE_FIRST_S = 0.3\n"

HOLDER = """
import sys, time
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
held = acquire(LockRequest(always=(DeviceLock(CPU),)), 5.0, "other.py::test_of_others")
print("held", flush=True)
sys.stdin.read()
held.release()
"""


@pytest.mark.slow
def test_progress_names_the_holder_of_the_devices(quick: pytest.Pytester) -> None:
    quick.makeconftest(SOON_WAITS)
    quick.makepyfile(test_it=AMONG_OTHERS)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        arguments = ("test_it.py", *ONE, "--energy-lease-timeout=4")
        seen = pytest_on_terminal(*arguments, columns=200)
        lines = quick.runpytest_subprocess(*arguments).stdout.str()
        holder.stdin.close()
    assert seen.code == 1
    message = f"waiting for cpu: held by process {holder.pid} of "
    assert seen.showed(f"test_it.py::test_measured: {message}")
    assert seen.showed("(other.py::test_of_others)")
    assert f"energy: test_it.py::test_measured: {message}" in lines


@pytest.mark.parametrize("arguments", [["-q"], ["-qq"], ["-n1"]])
@pytest.mark.slow
def test_a_wait_for_devices_is_shown_even_if_progress_is_silent(
    quick: pytest.Pytester, arguments: list[str]
) -> None:
    quick.makeconftest(SOON_WAITS)
    quick.makepyfile(test_it=AMONG_OTHERS)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        result = quick.runpytest_subprocess("test_it.py", *ONE, "--energy-lease-timeout=4", *arguments)
        holder.stdin.close()
    message = f"energy: test_it.py::test_measured: waiting for cpu: held by process {holder.pid} of "
    seen = result.stderr if arguments == ["-n1"] else result.stdout
    (line,) = (line for line in seen.lines if line.startswith(message))
    assert "(other.py::test_of_others)" in line
    assert "round 1" not in result.stdout.str()
