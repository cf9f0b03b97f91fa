# SPDX-License-Identifier: Apache-2.0
"""The tests of each run of the soak test, copied beside ``inner_conftest`` as ``test_random.py``.

Each function is a kind of test. Whatever it breaks, it passes (or fails as expected) if the plugin reports
the fault as it should, so any other outcome in a run that nobody interrupted is a finding.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.errors import WorkerError

#: How often each kind is collected. ``inner_conftest`` shuffles all of them and keeps as many as are wanted.
REPEATS = int(os.environ["SOAK_REPEATS"])

often = pytest.mark.parametrize("i", range(REPEATS))
boards = pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.gpus(n, fallback="cpu")) for n in (1, 2, 4)]
)
two = pytest.mark.gpus(2, fallback="cpu")


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def is_last() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


@often
def test_in_process(energy: Any, i: int) -> None:
    assert energy(spin, 0.01).rounds


@often
def test_window(energy_meter: Any, i: int) -> None:
    with energy_meter("work") as window:
        spin(0.05)
    assert window.duration_s >= 0.05


@often
def test_benchmark(benchmark: Any, i: int) -> None:
    benchmark.pedantic(spin, (0.005,), rounds=3)


@often
@boards
def test_lease(gpus: Any, i: int, n: int) -> None:
    time.sleep(0.02)


@often
@boards
def test_run(workers: Any, i: int, n: int) -> None:
    assert workers.run(lambda: int(os.environ["RANK"])) == list(range(n))


@often
@boards
def test_energy(energy: Any, workers: Any, i: int, n: int) -> None:
    assert energy(workers.call(spin, 0.01)).rounds


@often
def test_other_environment(workers: Any, monkeypatch: pytest.MonkeyPatch, i: int) -> None:
    monkeypatch.setenv("SOAK_VALUE", str(i))
    assert workers.run(lambda: os.environ["SOAK_VALUE"]) == [str(i)]


@often
@boards
def test_exception(workers: Any, i: int, n: int) -> None:
    def work() -> None:
        if is_last():
            raise ValueError("as it should")

    with pytest.raises(WorkerError, match="ValueError: as it should"):
        workers.run(work)


@often
@boards
def test_killed_rank(workers: Any, i: int, n: int) -> None:
    with pytest.raises(WorkerError, match="SIGKILL"):
        workers.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if is_last() else None)
    assert workers.run(max, 1, 2) == [2] * n


@often
def test_exit_code(workers: Any, i: int) -> None:
    with pytest.raises(WorkerError, match="exit code 7"):
        workers.run(lambda: os._exit(7))


@often
@two
def test_time_limit(workers: Any, i: int) -> None:
    with pytest.raises(WorkerError, match=r"did not answer within 0\.3 s"):
        workers.run(lambda: time.sleep(60) if is_last() else None, timeout=0.3)


@often
@two
def test_skip_in_a_rank(workers: Any, i: int) -> None:
    with pytest.raises(pytest.skip.Exception):
        workers.run(lambda: pytest.skip("not here"))


@often
@two
def test_large(workers: Any, i: int) -> None:
    data = bytes(3_000_000)
    assert workers.run(lambda given: given + given, data) == [data + data] * 2


@often
def test_left_process(workers: Any, i: int) -> None:
    workers.run(lambda: subprocess.Popen(["sleep", "300"], start_new_session=True).pid)


@often
def test_left_thread(workers: Any, i: int) -> None:
    workers.run(lambda: threading.Thread(target=time.sleep, args=(300,), daemon=True).start())


@often
def test_left_files(workers: Any, i: int) -> None:
    workers.run(lambda: len([os.open("/dev/null", os.O_RDONLY) for _ in range(50)]))


@often
def test_changed_state(workers: Any, i: int) -> None:
    def change() -> None:
        os.environ["SOAK_LEFT"] = "yes"
        os.chdir("/")
        os.umask(0o077)
        os.nice(1)

    workers.run(change)


@often
def test_finds_no_state(workers: Any, i: int) -> None:
    def read() -> tuple[str | None, int, int]:
        return os.environ.get("SOAK_LEFT"), os.nice(0), len(list(Path("/proc/self/fd").iterdir())) // 50

    left, niceness, many_files = workers.run(read)[0]
    assert (left, niceness, many_files) == (None, os.nice(0), 0)


def ancestors_of_rank(workers: Any) -> tuple[int, int]:
    """Return the pids of the supervisor and its guard."""
    supervisor = workers.run(os.getppid)[0]
    status = Path(f"/proc/{supervisor}/status").read_text()
    guard = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    return supervisor, int(guard)


@often
@pytest.mark.parametrize("victims", ["supervisor", "guard", "both"])
def test_killed_supervisor(workers: Any, i: int, victims: str) -> None:
    supervisor, guard = ancestors_of_rank(workers)
    killed = {"supervisor": [supervisor], "guard": [guard], "both": [guard, supervisor]}[victims]

    def work() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(WorkerError):
        workers.run(work)
    assert time.monotonic() - start < 50
    assert workers.run(max, 1, 2) == [2]


@often
@pytest.mark.timeout(1, method="signal")
@pytest.mark.xfail(reason="pytest-timeout ends it", strict=True, raises=pytest.fail.Exception)
def test_pytest_timeout(workers: Any, i: int) -> None:
    workers.run(time.sleep, 60)


@often
def test_tiny_backend(energy: Any, backend: Any, i: int) -> None:
    assert energy(backend.generate, ["one", "two"], max_new_tokens=4).rounds
