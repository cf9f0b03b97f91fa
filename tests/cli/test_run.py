# SPDX-License-Identifier: Apache-2.0
"""``llenergy run``: the command runs as without it, and its own energy is counted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.run import Child
from pytest_llenergy.energy.meters.estimate import AVERAGE_W
from pytest_llenergy.record.record import WindowRecord

from ..nvml_sim import Board, World

LLENERGY = (sys.executable, "-m", "pytest_llenergy.cli")

#: Use this many seconds of one CPU.
SPIN = "import time\nwhile time.process_time() < {}: pass\n"

#: A line for the estimate: joules and seconds.
LINE = re.compile(
    r"^energy: cpu:processes: (?P<joules>\S+) ± \S+ (?P<prefix>m?)J in (?P<seconds>\S+) s, "
    r"\S+ ± \S+ W \(estimated, process-only\)$",
    re.MULTILINE,
)


def llenergy(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*LLENERGY, "run", "--meter=estimate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.clock
def test_the_command_with_all_its_children_counts_and_its_output_is_untouched(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys\n{SPIN.format(0.5)}"
        f"subprocess.run([sys.executable, '-c', {SPIN.format(0.7)!r}], check=True)\nprint('done')"
    )
    ran = llenergy("--format=json", "-o", str(tmp_path / "e.json"), "--", sys.executable, "-c", code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
    found = json.loads((tmp_path / "e.json").read_text())
    window = msgspec.json.decode(json.dumps(found["window"]), type=WindowRecord)
    assert window.energy_j is not None
    # Two interpreters also start.
    assert 1.2 <= window.energy_j / AVERAGE_W < 1.6
    assert (found["command"][0], found["exit_status"]) == (sys.executable, 0)
    assert [each["domain"] for each in found["meters"]] == ["cpu:processes"]


@pytest.mark.clock
def test_a_daemon_of_the_command_counts(tmp_path: Path) -> None:
    done = tmp_path / "done"
    daemon = f"{SPIN.format(0.5)}open({str(done)!r}, 'w').close()"
    script = f'(setsid {sys.executable} -c "$1" &); until [ -e {done} ]; do sleep 0.05; done'
    ran = llenergy("--format=json", "sh", "-c", script, "sh", daemon)
    joules = json.loads(ran.stdout)["window"]["energy_j"]
    assert 0.5 <= joules / AVERAGE_W < 0.9


@pytest.mark.clock
def test_the_line_goes_to_standard_error_with_labels() -> None:
    ran = llenergy(sys.executable, "-c", f"{SPIN.format(0.5)}print('done')")
    assert ran.stdout == "done\n"
    line = LINE.search(ran.stderr)
    assert line is not None, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert float(line["seconds"]) >= 0.5


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["sh", "-c", "exit 7"], 7, None),
        (["sh", "-c", "kill -KILL $$"], 137, None),
        (["no-such-command"], 127, "llenergy run: no-such-command: No such file or directory\n"),
        (["/"], 126, "llenergy run: /: Permission denied\n"),
    ],
    ids=["code", "signal", "missing", "not executable"],
)
def test_the_exit_code_is_that_of_the_command(command: list[str], status: int, message: str | None) -> None:
    ran = llenergy("--", *command)
    assert ran.returncode == status
    assert ran.stdout == ""
    assert ran.stderr == message if message else "energy: cpu:processes: " in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_the_line_is_still_printed(number: int, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        f"import pathlib, time\ntry:\n    pathlib.Path({str(started)!r}).touch()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n    raise SystemExit(5)\n"
    )
    # Without a terminal: only this process gets the signal.
    command = [*LLENERGY, "run", "--meter=estimate", "--", sys.executable, "-c", code]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline_s = time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == (5 if number == signal.SIGINT else 143), err
    assert out == ("interrupted\n" if number == signal.SIGINT else "")
    assert err.startswith("energy: cpu:processes: ")


def test_a_signal_that_another_thread_gets_reaches_the_command() -> None:
    """As one may that comes while the process is stopped: it does not interrupt the wait for the command."""

    def end_this_process() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=end_this_process)
    with Child() as child:
        thread.start()
        assert child.run(["sleep", "60"]) == 143
    thread.join()


def test_ctrl_c_of_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    import pty

    code = (
        "import signal, sys, time\ncount = 0\ndef add(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, add)\nprint('ready', flush=True)\n"
        "end = time.monotonic() + 60\nwhile not count and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint('interrupts:', count)\n"
    )
    command = [*LLENERGY, "run", "--meter=estimate", "--", sys.executable, "-c", code]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.execv(command[0], command)
    shown, typed = b"", False
    while True:
        try:
            chunk = os.read(terminal, 1 << 12)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
        if b"ready" in shown and not typed:
            typed = True
            os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert b"interrupts: 1\r\n" in shown
    assert b"energy: cpu:processes: " in shown


def test_boards_are_measured_with_the_process(
    tmp_path: Path,
    nvml_attach: Callable[[World], ModuleType],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    world = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=20_000_000)])
    nvml_attach(world)
    assert main(["run", "--meter=nvml", "--", "sleep", "1"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    joules, *_ = err.splitlines()
    found = re.fullmatch(
        rf"energy: gpu:{world.board(0).uuid}: (\S+) ± \S+ J in (\S+) s, (\S+) ± \S+ W \(measured, .*\)",
        joules,
    )
    assert found is not None, joules
    assert float(found[3]) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("named", [[], ["--gpus=0"]])
def test_a_board_that_cannot_be_read_is_named_with_an_estimate(
    tmp_path: Path,
    nvml_attach: Callable[[World], ModuleType],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    named: list[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    board = Board(energy_supported=False, power_usage_supported=False, unsupported_fields=(185, 186))
    world = World(tmp_path / "world", [board])
    nvml_attach(world)
    assert main(["run", *named, "--", "true"]) == 0
    lines = capfd.readouterr().err.splitlines()
    (line,) = [line for line in lines if "meter" in line]
    assert line.startswith(f"energy: meter: nvml: {world.board(0).uuid} ")


def test_a_wrong_use_is_one_line_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    touch = ["--", "touch", str(tmp_path / "ran")]
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "llenergy run: names no command; write it last: llenergy run -- CMD\n"
    assert main(["run", "--meter=wattson", *touch]) == 2
    assert capsys.readouterr().err.startswith("llenergy run: unknown meter 'wattson'; known: ")
    assert main(["run", "-o", str(tmp_path / "no" / "e.json"), *touch]) == 2
    assert "create it first" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
