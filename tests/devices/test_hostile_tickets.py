# SPDX-License-Identifier: Apache-2.0
"""Whatever another user writes into the lock directory, tests get free devices, soon and without an error."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_llenergy.devices import queue
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import LockDirectory
from pytest_llenergy.devices.lockfiles import lock_name
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.queue import describe_entries
from pytest_llenergy.devices.tickets import MAX_TICKET_BYTES, list_entries
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from .lockers import USERS, MakeLocker, needs_root, open_directory, tickets, until

#: Writes files as another user and keeps them locked until killed. Those of size 0 are named like tickets but
#: are no files.
MAKER = """
import fcntl, json, os, resource, socket, sys, time
uid, place = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
if uid != os.getuid():
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
os.chdir(place)
refreshed, kept = [], []
for line in sys.stdin:
    told = json.loads(line)
    if told == "done":
        break
    name, data = bytes.fromhex(told["name"]), bytes.fromhex(told["data"])
    if told["kind"] == "file":
        fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
        os.write(fd, data.replace(b"OWN_PID", str(os.getpid()).encode()))
        os.fchmod(fd, told["mode"])
        if told["size"]:
            os.truncate(fd, told["size"])
        if told["locked"]:
            fcntl.flock(fd, fcntl.LOCK_EX)
            kept.append(fd)
        else:
            os.close(fd)
        if told["mtime"]:
            os.utime(name, (told["mtime"], told["mtime"]))
        elif told["refreshed"]:
            refreshed.append(name)
    elif told["kind"] == "pipe":
        os.mkfifo(name)
    elif told["kind"] == "link":
        os.symlink(data, name)
    elif told["kind"] == "directory":
        os.mkdir(name)
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(name)
        kept.append(listening)
print("written", flush=True)
while True:
    time.sleep(0.2)
    for name in refreshed:
        os.utime(name)
"""

Write = Callable[..., None]


class Maker:
    """Another user, who has written some files and keeps them locked."""

    def __init__(self, locks: Path) -> None:
        uid = USERS[1] if os.geteuid() == 0 else os.geteuid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAKER, str(uid), str(locks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._count = 0

    def write(
        self,
        data: bytes = b"",
        state: str = "waiting",
        *,
        name: bytes = b"",
        kind: str = "file",
        mode: int = 0o644,
        size: int = 0,
        locked: bool = True,
        refreshed: bool = True,
        mtime: float = 0.0,
    ) -> None:
        """Write a ticket that is older than every honest one."""
        self._count += 1
        name = name or f"llenergy-{state}-{self._count:020d}-{os.urandom(8).hex()}".encode()
        told = {"kind": kind, "mode": mode, "size": size, "locked": locked}
        told |= {"refreshed": refreshed, "mtime": mtime, "name": name.hex(), "data": data.hex()}
        self._say(told)

    def finish(self) -> None:
        """Wait until all of it is written."""
        self._say("done")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], 60)[0]
        assert self._process.stdout.readline() == b"written\n"

    def end(self) -> None:
        with self._process as process:
            process.kill()

    def _say(self, told: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")


@pytest.fixture
def maker(locks: Path) -> Iterator[Maker]:
    with ExitStack() as stack:
        made = Maker(locks)
        stack.callback(made.end)
        yield made


def ticket(**changes: Any) -> bytes:
    """A plausible ticket of the process that writes it, for all of the devices that these tests use."""
    request = {"always": [["a", False]], "n": 1, "choices": [[["b", False]], [["c", False]]]}
    namespace = Path("/proc/self/ns/pid").readlink().name
    content = {"pid": "OWN_PID", "namespace": namespace, "test": "t", "since_s": 1e9, "request": request}
    return json.dumps({**content, "holds": [], **changes}).replace('"OWN_PID"', "OWN_PID").encode()


def deep(opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * 100_000 + closing * 100_000


GOOD = ticket()
DEVICES = [[[f"GPU-{index}", False]] for index in range(100_000)]

#: Contents that no process of this package writes.
CONTENTS = {
    "empty": b"",
    "cut": GOOD[: len(GOOD) // 2],
    "text": b"hello",
    "array": b"[]",
    "null bytes": b"\0" * 10_000,
    "not UTF-8": b"\xff" * 300_000,
    "surrogate": GOOD.replace(b'"t"', b'"\\ud800"'),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "deep": deep(),
    "deep objects": deep(b'{"a":', b"}"),
    "deep unknown field": GOOD[:-1] + b', "x": ' + deep() + b"}",
    "deep unknown element": GOOD.replace(b'"a", false', b'"a", false, ' + deep()),
    "deep inside the limit": GOOD[:-1] + b', "x": ' + b"[" * 10_000,
    "deep test": GOOD.replace(b'"t"', deep()),
    "negative pid": ticket(pid=-1),
    "pid 0": ticket(pid=0),
    "pid with 31 digits": ticket(pid=10**30),
    "pid with 5000 digits": GOOD.replace(b"OWN_PID", b"1" * 5000),
    "pid 1e300": ticket(pid=1e300),
    "pid true": ticket(pid=True),
    "NaN": GOOD.replace(b"1000000000.0", b"NaN"),
    "infinite": GOOD.replace(b"1000000000.0", b"1e999"),
    "negative n": ticket(request={"n": -1}),
    "n too large": ticket(request={"n": 3, "choices": [[["a", False]]]}),
    "n with 31 digits": ticket(request={"n": 10**30, "choices": [[["a", False]]]}),
    "empty choice": ticket(request={"n": 1, "choices": [[]]}),
    "100,000 choices": ticket(request={"n": 1, "choices": DEVICES}),
    "300 choices": ticket(request={"n": 1, "choices": DEVICES[:300]}),
    "wide choice": ticket(request={"n": 1, "choices": [[["a", False]] * 300]}),
    "long device": ticket(request={"always": [["a" * 10_000, False]]}),
    "many held": ticket(holds=[["a", False]] * 10_000),
}

#: Contents that look plausible: such a ticket is a place in the queue while it is fresh.
PLAUSIBLE = {
    "good": GOOD,
    "long ago": ticket(since_s=-1e300),
    "far future": ticket(since_s=1e300),
    "holds everything": ticket(holds=[["a", False], ["b", False], ["c", False]]),
    "control characters": ticket(test="\x1b[2J\u202e\u2066\r\n\x00\x9b" + "x" * 5000),
    "control characters in devices": ticket(holds=[["a\x1b[2J\u202e\n", False], ["a", False]]),
    "other container": ticket(namespace="pid:[1]\x1b[2J"),
    "same device often": ticket(request={"always": [["a", False], ["a", True]] * 50}),
}


def take(*devices: str, wait_s: float = 0.0) -> None:
    acquire(LockRequest(tuple(map(DeviceLock, devices))), wait_s).release()


def refusal(*devices: str) -> str:
    """Why devices cannot be had at once; empty if they can."""
    try:
        take(*devices)
    except DeviceError as error:
        return str(error)
    return ""


def refreshed_late_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no ticket for suspended because a busy machine holds up who refreshes it."""
    monkeypatch.setattr("pytest_llenergy.devices.tickets.SUSPENDED_AFTER_S", 600.0)


def describe(locks: Path) -> list[str]:
    """What doctor says of the queue."""
    directory = LockDirectory(locks, os.open(locks, os.O_RDONLY))
    try:
        return describe_entries(list_entries(directory, ("waiting", "firm", "holding")))
    finally:
        directory.close()


@pytest.mark.parametrize("state", ["waiting", "firm", "holding"])
def test_what_is_no_ticket_blocks_nobody_and_appears_nowhere(locks: Path, maker: Maker, state: str) -> None:
    for content in CONTENTS.values():
        maker.write(content, state)
    maker.write(GOOD, state, size=2**42)
    maker.write(GOOD, state, mode=0o666)
    maker.write(GOOD, state, locked=False)
    maker.finish()
    take("a", "b", "c")
    assert describe(locks) == []


def test_a_file_of_mode_zero_is_no_obstacle(make: MakeLocker, maker: Maker) -> None:
    maker.write(GOOD, "firm", mode=0)
    maker.write(GOOD, "firm", locked=False, mode=0)
    maker.finish()
    assert make(USERS[0] if os.geteuid() == 0 else None).take("a", wait_s=30.0) == ["a"]


def test_what_is_no_file_blocks_nobody(locks: Path, maker: Maker) -> None:
    for kind in ("pipe", "link", "directory", "socket"):
        for state in ("new", "waiting", "firm", "holding"):
            maker.write(b"/etc/passwd", state, kind=kind)
    for name in (
        b"llenergy-firm-\xff\xfe",
        b"llenergy-\n",
        b"llenergy-firm-" + b"9" * 20 + b"-" + b"0" * 16 + b"\n",
    ):
        maker.write(GOOD, name=name)
    maker.write(GOOD, name="llenergy-firm-{}-{}".format("\u0661" * 20, "0" * 16).encode())
    maker.finish()
    take("a")
    assert describe(locks) == []


def test_a_second_name_of_a_ticket_is_no_second_place(make: MakeLocker, locks: Path) -> None:
    """On a host that lets users link files of others (fs.protected_hardlinks=0)."""
    holder, waiting = make(), make()
    holder.take("a")
    waiting.ask("a", "b")
    until(lambda: bool(tickets(locks, "waiting")))
    (ticket_file,) = locks.glob("llenergy-waiting-*")
    (locks / f"llenergy-firm-{1:020d}-{0:016x}").hardlink_to(ticket_file)
    assert make().take("b", wait_s=0.0) == ["b"]


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_a_request_that_takes_nothing_delays_others_for_seconds_once_a_minute(
    locks: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(queue, "UNUSED_AFTER_S", 0.3)
    refreshed_late_counts(monkeypatch)
    for state in ("waiting", "firm", "holding"):
        maker.write(PLAUSIBLE[name], state)
    maker.finish()
    assert all(line.isprintable() and len(line) < 1000 for line in describe(locks))
    if name != "holds everything":
        with pytest.raises(DeviceError, match=r"^gpus: waited 0 s for a: .*queued before: process") as caught:
            take("a")
        assert str(caught.value).isprintable()
    take("a", wait_s=60.0)
    # This process remembers.
    take("a")


def test_a_request_that_waits_for_a_held_device_keeps_its_place(
    make: MakeLocker, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "UNUSED_AFTER_S", 0.2)
    refreshed_late_counts(monkeypatch)
    holder, waiting = make(), make()
    holder.take("a")
    waiting.ask("a", "b")
    until(lambda: bool(tickets(locks, "waiting")))
    (path,) = locks.glob("llenergy-waiting-*")
    path.rename(path.with_name(path.name.replace("waiting", "firm")))
    with pytest.raises(DeviceError, match=f"b: queued before: process {waiting.pid} of "):
        take("b", wait_s=1.0)


@pytest.mark.parametrize("mtime", [1.0, time.time() + 1e9], ids=["past", "future"])
def test_a_request_that_is_not_refreshed_blocks_nobody(maker: Maker, mtime: float) -> None:
    maker.write(GOOD, "firm", mtime=mtime)
    maker.finish()
    take("a")


def test_a_request_of_a_process_that_does_not_exist_blocks_nobody(maker: Maker) -> None:
    maker.write(ticket(pid=2**22 - 1), "firm")
    maker.finish()
    take("a")


def test_a_lock_on_a_new_ticket_holds_nobody_up(
    locks: Path, make: MakeLocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that locks it at once, before its maker does."""
    real, kept = os.fchmod, []

    def fchmod(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        for path in locks.glob("llenergy-new-*"):
            kept.append(
                subprocess.Popen(["flock", "-s", str(path), "-c", "echo locked; exec sleep 60"], stdout=-1)
            )
            assert kept[-1].stdout is not None
            assert kept[-1].stdout.readline()

    monkeypatch.setattr(os, "fchmod", fchmod)
    try:
        (locks / lock_name("a")).touch(0o644)
        take("a")
    finally:
        for process in kept:
            with process:
                process.kill()
    assert kept


def test_a_name_that_another_user_takes_first_stops_nobody(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket is renamed when its state changes. The kernel replaces no directory, nor files of others."""
    real = os.fchmod

    def fchmod(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        for path in locks.glob("llenergy-new-*"):
            for state in ("waiting", "holding"):
                path.with_name(path.name.replace("new", state)).mkdir(exist_ok=True)

    monkeypatch.setattr(os, "fchmod", fchmod)
    held = acquire(LockRequest((DeviceLock("a"),)), 0.0)
    (line,) = describe(locks)
    assert line.startswith(f"a held by process {os.getpid()} of ")
    held.release()
    assert describe(locks) == []


@pytest.mark.parametrize("number", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("content", ["good", "300 choices"])
@pytest.mark.parametrize("locked", [True, False], ids=["locked", "dead"])
def test_thousands_of_tickets_cost_milliseconds(
    make: MakeLocker, locks: Path, maker: Maker, number: int, content: str, locked: bool
) -> None:
    # As large as a ticket may be.
    choices = [[[f"GPU-{index:056d}", False], [f"GPU-{index:056d}", True]] for index in range(200)]
    data = {"good": GOOD, "300 choices": ticket(request={"n": 1, "choices": choices})}[content]
    assert len(data) <= MAX_TICKET_BYTES
    for _ in range(number):
        maker.write(data, "holding", refreshed=False, locked=locked)
    maker.finish()
    waiting = make(USERS[0] if os.geteuid() == 0 else None)
    waiting.take("a", wait_s=60.0)
    other = make()
    other.ask("a", wait_s=60.0)
    until(lambda: bool(tickets(locks, "waiting")))
    before_s, start_s = cpu_s(other.pid), time.monotonic()
    time.sleep(2.0)
    assert (cpu_s(other.pid) - before_s) / (time.monotonic() - start_s) < 0.75
    waiting.release()
    assert other.answer() == {"held": ["a"]}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
LOCKS = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=4) | VALUES
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "always": LOCKS,
        "n": st.integers(-1, 4) | VALUES,
        "choices": st.lists(LOCKS, max_size=4) | VALUES,
    },
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "pid": st.integers() | VALUES,
        "namespace": st.text() | VALUES,
        "test": st.text() | VALUES,
        "since_s": st.floats() | VALUES,
        "request": REQUESTS | VALUES,
        "holds": LOCKS,
        "left": st.booleans() | VALUES,
        "unknown": VALUES,
    },
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    data = ticket(**draw(CHANGES)).replace(b"OWN_PID", str(os.getpid()).encode())
    for place, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=2)
    ):
        data = data[:place] + bytes([byte]) + data[place + 1 :]
    return data[: draw(st.integers(0, len(data)) | st.just(len(data)))]


FILES = st.tuples(st.sampled_from(["waiting", "firm", "holding", "new"]), st.booleans(), contents())


@pytest.mark.parametrize("examples", [50, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_ticket_leaves_a_lease_or_one_line_about_the_queue(examples: int) -> None:
    with pytest.MonkeyPatch.context() as patch, open_directory() as locks:
        patch.setenv("LLENERGY_LOCK_DIR", str(locks))

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=examples < 100,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(FILES, min_size=1, max_size=4))
        def check(files: Sequence[tuple[str, bool, bytes]]) -> None:
            with ExitStack() as stack:
                for number, (state, locked, data) in enumerate(files, 1):
                    path = locks / f"llenergy-{state}-{number:020d}-{os.urandom(8).hex()}"
                    path.write_bytes(data)
                    path.chmod(0o644)
                    if locked:
                        descriptor = os.open(path, os.O_RDONLY)
                        stack.callback(os.close, descriptor)
                        fcntl.flock(descriptor, fcntl.LOCK_EX)
                lines = [*describe(locks), refusal("a", "b")]
                for path in locks.iterdir():
                    path.unlink()
            assert all(line.isprintable() and len(line) < 10_000 for line in lines)

        check()


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200"), Board(name="NVIDIA H200")]))


@needs_root
@pytest.mark.parametrize("extra", [[], ["-n2"]], ids=["one process", "-n2"])
def test_a_run_and_doctor_pass_in_a_directory_full_of_rubbish(
    pytester: pytest.Pytester, locks: Path, maker: Maker, world: World, extra: list[str]
) -> None:
    every = ["cpu", world.board(0).uuid, world.board(1).uuid]
    wants_all = {"always": [[device, False] for device in every]}
    for state in ("new", "waiting", "firm", "holding"):
        for content in CONTENTS.values():
            maker.write(content.replace(b'"a"', json.dumps(every[1]).encode()), state)
        maker.write(ticket(request=wants_all), state, mtime=time.time() + 1e9)
        maker.write(ticket(request=wants_all, test="\x1b[2J\u202e\n"), state)
        maker.write(GOOD, state, size=2**42)
        for kind in ("pipe", "link", "directory", "socket"):
            maker.write(b"/etc/passwd", state, kind=kind)
    for device, kind in zip(every, ("pipe", "link", "socket"), strict=True):
        maker.write(b"/etc/passwd", name=lock_name(device).encode(), kind=kind)
    maker.finish()
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gpus(1)
        @pytest.mark.parametrize("number", range(2))
        def test_one(gpus, number):
            assert len(gpus.uuids) == 1
        @pytest.mark.gpus(2)
        def test_two(gpus):
            assert len(gpus.uuids) == 2
        """
    )
    doctor = [sys.executable, "-m", "pytest_llenergy.cli", "doctor", "--no-steps"]
    done = subprocess.run(doctor, capture_output=True, timeout=120, check=False)
    assert (done.stderr, b"Traceback" in done.stdout) == (b"", False)
    assert b"\x1b" not in done.stdout
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", *extra)
    result.assert_outcomes(passed=3)
    assert result.ret == 0
