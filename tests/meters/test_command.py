# SPDX-License-Identifier: Apache-2.0
"""A power meter that is a program: real programs, with their real ways to fail."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.base import Targets, unknown_accuracy
from pytest_llenergy.meters.command import CommandMeter, open_command

STEADY = """
import time
while True:
    print(20.0, flush=True)
    time.sleep(0.01)
"""


#: Three lines, 0.2 s apart, and a long silence.
PAUSES = """
import time
for line in ({0!r}, {1!r}, {2!r}):
    print(line, flush=True)
    time.sleep(0.2)
time.sleep(60)
"""


def program(text: str) -> str:
    return shlex.join([sys.executable, "-c", text])


@contextmanager
def meter(argument: str) -> Iterator[CommandMeter]:
    (opened,) = open_command(Targets(("GPU-a",)), argument)
    try:
        yield opened
    finally:
        opened.close()


def value(opened: CommandMeter) -> float:
    (energy_j,) = opened.read()
    assert isinstance(energy_j, float), energy_j
    return energy_j


def first_joules(opened: CommandMeter, longest_s: float = 20) -> float:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        if energy_j := value(opened):
            return energy_j
        time.sleep(0.01)
    raise AssertionError("nothing was counted")


def reason(opened: CommandMeter, longest_s: float = 20) -> str:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        (said,) = opened.read()
        if isinstance(said, str):
            return said
        time.sleep(0.01)
    raise AssertionError("it went on measuring")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_watts_become_the_joules_between_two_lines(tmp_path: Path) -> None:
    go = tmp_path / "go"
    text = f"""
import os, time
print(20, flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print(20, flush=True)
time.sleep(60)
"""
    start_s = time.monotonic()
    with meter(program(text)) as opened:
        first_s = time.monotonic()
        assert value(opened) == 0.0
        time.sleep(0.2)
        go_s = time.monotonic()
        go.touch()
        energy_j = first_joules(opened)
    # Whenever the lines came: the first before it was open, the second after they were let go.
    assert go_s - first_s <= energy_j / 20 <= time.monotonic() - start_s


def test_a_number_holds_for_the_time_before_it() -> None:
    start_s = time.monotonic()
    with meter(program(PAUSES.format("1000", "0", "7"))) as opened:
        energy_j = first_joules(opened)
    assert energy_j <= 7 * (time.monotonic() - start_s)


def test_lines_that_had_piled_up_share_the_time_for_which_they_did() -> None:
    """Taken as they come, the first of them would have all of the half second, and it says 0 W."""
    text = """
import time
for _ in range(10):
    print(20, flush=True)
    time.sleep(0.02)
time.sleep(0.5)
print("0\\n" + "40\\n" * 3, end="", flush=True)
time.sleep(60)
"""
    with meter(program(text)) as opened:
        end_s = time.monotonic() + 20
        while value(opened) < 15 and time.monotonic() < end_s:
            time.sleep(0.01)
        assert value(opened) >= 30 * 0.5


def test_it_says_what_it_is() -> None:
    command = program(STEADY)
    with meter(command) as opened:
        (domain,) = opened.domains
    assert domain.name == f"external:{Path(sys.executable).name}"
    assert (domain.kind, domain.scope) == ("measured", "external: whatever the meter is plugged to")
    assert domain.source == f"watts printed by: {command}"
    assert domain.limits(5.0, 1.0) == (5.0, 5.0)
    assert [flag.name for flag in domain.flags] == ["accuracy-unknown"]


def test_accuracy_stated_by_the_user_sets_the_limits() -> None:
    with meter(f"{program(STEADY)}@1.5%") as opened:
        (domain,) = opened.domains
    assert domain.accuracy == "within 1.5% of the reading, as stated by the user"
    assert domain.limits(100.0, 1.0) == pytest.approx((98.5, 101.5))
    assert domain.flags == ()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("import sys; sys.exit('no such device')", "ended with exit status 1: no such device"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("print('watts')", "printed 'watts', which is no number of watts"),
        ("print('nan')", "printed 'nan', which is no number of watts"),
        ("print(-1)", "printed '-1', which is no number of watts"),
        ("print()", "printed '', which is no number of watts"),
    ],
)
def test_a_program_that_does_not_begin_to_measure_is_no_meter(text: str, end: str) -> None:
    with pytest.raises(MeterError) as caught:
        open_command(Targets(), program(text))
    assert str(caught.value) == f"command: {Path(sys.executable).name} {end}"


def test_a_program_that_prints_nothing_is_no_meter() -> None:
    with pytest.raises(MeterError) as caught:
        CommandMeter("sleep 60", unknown_accuracy("the program"), first_line_s=0.2)
    assert str(caught.value) == (
        "command: sleep printed no line within 0.2 s; it must flush each one (try: stdbuf -oL sleep)"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "command: no program; write --energy-meter='command:PROGRAM ARGS'"),
        ("meter 'a", 'command: "meter \'a" is no command line (No closing quotation)'),
        ("/no/such/meter", "command: meter cannot be started (No such file or directory)"),
    ],
)
def test_what_is_no_program_is_told(argument: str, message: str) -> None:
    with pytest.raises(MeterError) as caught:
        open_command(Targets(), argument)
    assert str(caught.value) == message


def test_a_program_that_dies_later_gives_a_reason_with_its_last_words() -> None:
    text = """
import sys, time
print(20, flush=True)
time.sleep(0.2)
print(20, "half a num", sep="\\n", end="")
print("warning", "lost", sep="\\n", file=sys.stderr)
sys.exit(3)
"""
    with meter(program(text)) as opened:
        assert reason(opened) == f"command: {Path(sys.executable).name} ended with exit status 3: lost"


def test_a_line_that_is_no_number_gives_a_reason_for_good() -> None:
    with meter(program(PAUSES.format("20", "ERR 7", "20"))) as opened:
        said = reason(opened)
        assert said == f"command: {Path(sys.executable).name} printed 'ERR 7', which is no number of watts"
        time.sleep(0.5)
        assert opened.read() == [said]


def test_a_program_that_falls_silent_gives_a_reason() -> None:
    text = "import time\nfor _ in range(5): print(20, flush=True); time.sleep(.01)\ntime.sleep(60)"
    with meter(program(text)) as opened:
        silent = rf"command: {re.escape(Path(sys.executable).name)} has printed nothing for ([\d.]+) s\b.*"
        told = re.fullmatch(silent, reason(opened))
        # On a busy machine it is looked at late.
        assert told is not None
        assert float(told[1]) >= 2


def test_closing_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        f"echo $$ > {pids}; (trap '' TERM; echo $BASHPID >> {pids}; while echo 5; do sleep .05; done) & wait"
    )
    with meter(shlex.join(["bash", "-c", script])):
        leader, child = (int(line) for line in pids.read_text().split())
        assert alive(leader)
        assert alive(child)
    assert not alive(leader)
    end_s = time.monotonic() + 20
    while alive(child) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not alive(child)


def test_a_program_that_ignores_its_end_is_killed() -> None:
    text = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with meter(program(text)) as opened:
        pid = opened._process.pid
    assert not alive(pid)


def test_no_descriptor_is_left_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with meter(program(STEADY)):
        pass
    with pytest.raises(MeterError, match="no number of watts"):
        open_command(Targets(), "echo watts")
    with pytest.raises(MeterError, match="cannot be started"):
        open_command(Targets(), "/no/such/meter")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_the_program_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    meter = tmp_path / "watts.py"
    meter.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_IGN)\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "while True:\n    os.write(2, b'.')\n"
        "    try:\n        os.write(1, b'5\\n')\n    except OSError:\n        pass\n    time.sleep(0.05)\n"
    )
    parent = (
        "import os, signal\nfrom pytest_llenergy.meters.command import open_command\n"
        "from pytest_llenergy.meters.base import Targets\n"
        f"open_command(Targets(), {f'{sys.executable} {meter}'!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", parent], check=False).returncode == -signal.SIGKILL
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
