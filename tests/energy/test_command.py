# SPDX-License-Identifier: Apache-2.0
"""Power meters that are programs: real programs, and the real ways in which they fail."""

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

from pytest_llenergy.energy.meters import command
from pytest_llenergy.energy.meters.base import Targets, parse_stated
from pytest_llenergy.energy.meters.command import CommandMeter, open_command
from pytest_llenergy.errors import MeterError

STEADY = """
import time
while True:
    print(20.0, flush=True)
    time.sleep(0.01)
"""


#: Prints three lines 0.7 s apart, then nothing for a long time.
PAUSES = """
import time
for line in ({0!r}, {1!r}, {2!r}):
    print(line, flush=True)
    time.sleep(0.7)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give programs the time that they may need on a busy machine."""
    for name in ("FIRST_LINE_TIMEOUT_S", "MIN_SILENCE_S", "PROGRAM_END_TIMEOUT_S"):
        monkeypatch.setattr(command, name, 60.0)
    monkeypatch.setattr(CommandMeter.__init__, "__defaults__", (60.0,))


def python_command(text: str) -> str:
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


def first_joules(opened: CommandMeter, longest_s: float = 60) -> float:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        if energy_j := value(opened):
            return energy_j
        time.sleep(0.01)
    raise AssertionError("nothing was counted")


def reason(opened: CommandMeter, longest_s: float = 60) -> str:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        (reading,) = opened.read()
        if isinstance(reading, str):
            return reading
        time.sleep(0.01)
    raise AssertionError("the meter still measures")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_watts_are_integrated_between_two_lines(tmp_path: Path) -> None:
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
    with meter(python_command(text)) as opened:
        first_s = time.monotonic()
        assert value(opened) == 0.0
        time.sleep(0.2)
        go_s = time.monotonic()
        go.touch()
        energy_j = first_joules(opened)
    # The first line came before the meter was open, the second after the file was touched.
    assert go_s - first_s <= energy_j / 20 <= time.monotonic() - start_s


def test_a_printed_power_applies_to_the_time_before_its_line() -> None:
    start_s = time.monotonic()
    with meter(python_command(PAUSES.format("1000", "0", "7"))) as opened:
        energy_j = first_joules(opened)
    assert energy_j <= 7 * (time.monotonic() - start_s)


def lines(*printed: str, pause_s: float = 0.05) -> str:
    """Return a program that prints each of these with a pause behind it, again and again."""
    text = (
        "import itertools, time\n"
        f"for each in itertools.cycle({printed!r}): print(each, flush=True); time.sleep({pause_s})"
    )
    return python_command(text)


SEVERAL = "prints several lines at a moment; if they are of N sensors, write @sum=N behind it to add them; "


@pytest.mark.parametrize("printed", ["1\n2\n3\n4", "1\n2"])
def test_several_lines_at_a_moment_are_refused_unless_the_user_says_that_they_are_added(printed: str) -> None:
    with pytest.raises(MeterError, match=re.escape(SEVERAL)):
        open_command(Targets(), lines(printed, pause_s=0.2))
    sensors = len(printed.split())
    start_s = time.monotonic()
    with meter(f"{lines(printed, pause_s=0.2)}@sum={sensors}") as opened:
        energy_j = first_joules(opened)
    assert energy_j / sum(map(int, printed.split())) == pytest.approx(0.2, abs=time.monotonic() - start_s)
    assert energy_j >= 0.15 * sum(map(int, printed.split()))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_another_number_of_lines_than_the_user_says_gives_a_reason(count: int) -> None:
    program = lines(*["100\n200"] * 3, chr(10).join(["100"] * count), pause_s=0.2)
    with meter(f"{program}@sum=2") as opened:
        assert f"printed {count} line" in reason(opened)
        before_j = value(opened)
        time.sleep(0.25)
        assert before_j < value(opened) < 300


@pytest.mark.parametrize(("apart_s", "pause_s"), [(0.005, 0.5), (0.03, 1.0)])
def test_several_lines_one_after_the_other_are_refused(apart_s: float, pause_s: float) -> None:
    """As a loop over GPUs prints them."""
    loop = f"print(100, flush=True); time.sleep({apart_s})"
    program = python_command(f"import time\nwhile 1:\n for _ in range(3): {loop}\n time.sleep({pause_s})")
    with pytest.raises(MeterError, match=re.escape(SEVERAL)):
        open_command(Targets(), program)
    with meter(f"{program}@sum=1"):
        pass


def test_more_power_than_is_possible_gives_a_reason_for_that_time_alone() -> None:
    name = Path(sys.executable).name
    with meter(lines(*["100"] * 9, "65535")) as opened:
        message = reason(opened)
        assert message == (
            f"command: {name} printed 65535 W, more than 20000 W; write @65535W behind it if that is possible"
        )
        before_j = value(opened)
        time.sleep(0.3)
        assert before_j <= value(opened) < 100


@pytest.mark.parametrize(
    ("watts", "stated"), [("4290000", ""), ("700", "@600W"), ("300\n400", "@sum=2@600W")]
)
def test_a_program_that_only_prints_impossible_power_is_refused(watts: str, stated: str) -> None:
    with pytest.raises(MeterError, match=r"W, more than \d+ W; write @\d+W behind it if that is possible$"):
        open_command(Targets(), lines(watts) + stated)


def test_a_higher_power_is_accepted_if_the_user_states_it() -> None:
    with meter(f"{lines('65535')}@70000W@2%") as opened:
        assert first_joules(opened) > 0
        (domain,) = opened.domains
    assert domain.limits(100.0, 1.0) == pytest.approx((98, 102))
    assert domain.highest_w == 70_000


def test_the_domain_names_the_program_and_its_scope() -> None:
    line = python_command(STEADY)
    with meter(line) as opened:
        (domain,) = opened.domains
    assert domain.name == f"external:{Path(sys.executable).name}"
    assert (domain.kind, domain.scope) == ("measured", "external: whatever the meter is plugged into")
    assert domain.source == f"watts printed by: {Path(sys.executable).name}"
    assert domain.limits(5.0, 1.0) == (5.0, 5.0)
    assert [flag.name for flag in domain.flags] == ["meter"]


def test_an_accuracy_stated_by_the_user_sets_the_limits() -> None:
    with meter(f"{python_command(STEADY)}@1.5%") as opened:
        (domain,) = opened.domains
    assert domain.accuracy == "within 1.5% of the reading, as stated by the user"
    assert domain.limits(100.0, 1.0) == pytest.approx((98.5, 101.5))
    assert domain.flags == ()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("import sys; sys.exit('no such device')", "ended with exit code 1: no such device"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("print('watts')", "printed 'watts', which is not a number of watts"),
        ("print('nan')", "printed 'nan', which is not a number of watts"),
        ("print(-1)", "printed '-1', which is not a number of watts"),
        ("print()", "printed '', which is not a number of watts"),
    ],
)
def test_a_program_that_fails_to_start_measuring_is_refused(text: str, end: str) -> None:
    with pytest.raises(MeterError) as caught:
        open_command(Targets(), python_command(text))
    assert str(caught.value) == f"command: {Path(sys.executable).name} {end}"


def test_a_program_that_prints_nothing_is_refused() -> None:
    with pytest.raises(MeterError) as caught:
        CommandMeter(*parse_stated("sleep 60", "the program"), first_line_s=0.2)
    assert str(caught.value) == (
        "command: sleep printed no line within 0.2 s; it must flush each one (try: stdbuf -oL sleep)"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "command: no program; write --energy-meter='command:PROGRAM ARGS'"),
        ("meter 'a", 'command: "meter \'a" is not a command line (No closing quotation)'),
        ("/no/such/meter", "command: meter cannot be started (No such file or directory)"),
    ],
)
def test_an_invalid_program_is_refused_with_the_reason(argument: str, message: str) -> None:
    with pytest.raises(MeterError) as caught:
        open_command(Targets(), argument)
    assert str(caught.value) == message


def test_a_program_that_dies_later_gives_a_reason_with_its_last_stderr_line() -> None:
    text = """
import sys, time
print(20, flush=True)
time.sleep(0.7)
print(20, "half a num", sep="\\n", end="")
print("warning", "lost", sep="\\n", file=sys.stderr)
sys.exit(3)
"""
    with meter(python_command(text)) as opened:
        assert reason(opened) == f"command: {Path(sys.executable).name} ended with exit code 3: lost"


def test_a_line_that_is_not_a_number_gives_a_lasting_reason() -> None:
    with meter(python_command(PAUSES.format("20", "ERR 7", "20"))) as opened:
        message = reason(opened)
        assert (
            message == f"command: {Path(sys.executable).name} printed 'ERR 7', which is not a number of watts"
        )
        time.sleep(1.0)
        assert opened.read() == [message]


def test_a_program_that_falls_silent_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MIN_SILENCE_S", 2.0)
    text = "import time\nfor _ in range(20): print(20, flush=True); time.sleep(.01)\ntime.sleep(60)"
    with meter(python_command(text)) as opened:
        expected = rf"command: {re.escape(Path(sys.executable).name)} has printed nothing for ([\d.]+) s\b.*"
        match = re.fullmatch(expected, reason(opened))
        # On a busy machine the reading comes late.
        assert match is not None
        assert float(match[1]) >= 2


def test_closing_ends_the_program_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        f"echo $$ > {pids}; (trap '' TERM; echo $BASHPID >> {pids}; while echo 5; do sleep .05; done) & wait"
    )
    with meter(shlex.join(["bash", "-c", script])):
        leader, child = (int(line) for line in pids.read_text().split())
        assert is_alive(leader)
        assert is_alive(child)
    assert not is_alive(leader)
    end_s = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_program_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PROGRAM_END_TIMEOUT_S", 0.5)
    text = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with meter(python_command(text)) as opened:
        pid = opened._process.pid
    assert not is_alive(pid)


def test_no_file_descriptor_is_left_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with meter(python_command(STEADY)):
        pass
    with pytest.raises(MeterError, match="not a number of watts"):
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
        "import os, signal\nfrom pytest_llenergy.energy.meters.command import open_command\n"
        "from pytest_llenergy.energy.meters.base import Targets\n"
        f"open_command(Targets(), {f'{sys.executable} {meter}'!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", parent], check=False).returncode == -signal.SIGKILL
    pid = int(note.read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
