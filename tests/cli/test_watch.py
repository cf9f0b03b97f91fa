# SPDX-License-Identifier: Apache-2.0
"""``llenergy watch``: lines for pipes, one line on a terminal, and the sum at the end."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.running_total import RunningTotal
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.nvml import open_nvml
from pytest_llenergy.energy.sampler import Sampler

from ..nvml_sim import Board, World

METER = "import time\nwhile True: print(10, flush=True); time.sleep(0.02)"
WATCH = (
    *(sys.executable, "-m", "pytest_llenergy.cli", "watch", "--interval=0.5"),
    f"--meter=command:{shlex.join([sys.executable, '-c', METER])}@2%",
)

LINE = re.compile(r"\d+\.\d W, \S+ [mk]?J in \S+ s, measured: external:python\S* \d+\.\d")
SUM = re.compile(r"external:python\S*: \S+ ± \S+ [mk]?J in \S+ s, \S+ ± \S+ W \(measured, .*\)")


@pytest.mark.clock
def test_a_pipe_gets_lines_and_an_interrupt_ends_with_the_sum() -> None:
    process = subprocess.Popen(
        WATCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline().rstrip("\n") for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    for line in lines:
        assert LINE.fullmatch(line), line
    *_, last = out.splitlines()
    assert SUM.fullmatch(last), last


def test_a_terminal_gets_one_line_that_is_replaced() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["COLUMNS"] = "40"
        os.execv(WATCH[0], WATCH)
    written, typed = b"", False
    while True:
        try:
            chunk = os.read(terminal, 1 << 12)
        except OSError:
            break
        if not chunk:
            break
        written += chunk
        # On a busy machine, one chunk may have several lines, or a part of a character.
        if written.count(b"\r\x1b[K") >= 2 and not typed:
            typed = True
            os.write(terminal, b"\x03")
    shown = written.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    os.close(terminal)
    live = [part.partition("\n")[0] for part in shown.split("\r\x1b[K")[1:-1]]
    assert all(" W, " in part and len(part) < 45 for part in live)
    assert "external:python" in shown.rpartition("\x1b[K")[2]


@pytest.mark.clock
def test_the_sum_of_many_intervals_is_the_energy_and_few_ticks_are_kept(
    tmp_path: Path, nvml_attach: Callable[[World], ModuleType]
) -> None:
    world = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=5_000_000)])
    nvml_attach(world)
    with Sampler(tuple(open_nvml(Targets((world.board(0).uuid,))))) as sampler:
        sampler.await_ticks(0, 1.0, 3)
        total = RunningTotal(sampler.series[0])
        start_ns = end_ns = time.monotonic_ns()
        for number in range(12):
            world.set_power(0, 100.0 + 50 * (number % 3))
            time.sleep(0.2)
            begin_ns, end_ns = end_ns, time.monotonic_ns()
            sampler.await_ticks(end_ns, 1.0, 3)
            total.add(begin_ns, end_ns)
            total.series.forget_before(end_ns)
        assert len(total.series.ticks) < total.series.ticks_seen
    found = total.sum()
    assert total.missing_s == 0
    assert found.energy_j == pytest.approx(world.true_energy_j(0, start_ns, end_ns), rel=0.02)
    assert found.energy_u_j is not None
    assert found.energy_u_j < 0.2 * total.energy_j


@pytest.mark.parametrize("value", ["0", "x", "inf", "0.01"])
def test_a_wrong_interval_is_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["watch", f"--interval={value}"])
    assert ended.value.code == 2
    assert f"argument --interval: {value}: needs a number of seconds, 0.1 or more" in capsys.readouterr().err
