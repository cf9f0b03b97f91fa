# SPDX-License-Identifier: Apache-2.0
"""The request loop of a rank."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import msgspec

from pytest_llenergy.backends.base import Backend, Job, RankContext, create_backend
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import TASKS
from pytest_llenergy.errors import BackendError, PlanError
from pytest_llenergy.model.record import Flag, Parallel
from pytest_llenergy.model.timeline import FUNCTION_FLOPS_REASON, Flops, Iteration, RankTimeline
from pytest_llenergy.workers import transport
from pytest_llenergy.workers.isolation import Leftovers
from pytest_llenergy.workers.pickling import check_finished, dump_result, load_call
from pytest_llenergy.workers.transport import Channel
from pytest_llenergy.workers.usage import (
    BackendProcesses,
    cpu_time_used_s,
    memory_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)

# What accelerate takes for the world, held against the process group.


def check_accelerate_world() -> None:
    """Raise ``PlanError`` when work has shared itself out over fewer processes than the group has.

    ``PartialState()`` on a CPU takes no notice of a process group, nor of ``WORLD_SIZE``, unless it is told
    ``cpu=True`` (accelerate 1.15, ``state.py``, ``_prepare_backend``). Each rank then does all of the work.
    """
    state, dist = sys.modules.get("accelerate.state"), sys.modules.get("torch.distributed")
    if state is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return
    seen, world_size = state.PartialState._shared_state.get("num_processes"), dist.get_world_size()
    if seen is not None and seen != world_size:
        raise PlanError(
            f"accelerate sees {seen} process{'es' if seen > 1 else ''} in a world of {world_size} ranks, so "
            "each has done the work of all; on CPU ranks write PartialState(cpu=True), before anything else "
            "of accelerate"
        )


# The request loop of a rank, once it is what it was planned to be.

#: What pytest takes for a skip, too.
SKIP_CLASSES = {"unittest.case.SkipTest": "Skipped"}

#: What ``pytest.exit`` raises, and Ctrl-C.
RUN_ENDING_CLASSES = ("_pytest.outcomes.Exit", "builtins.KeyboardInterrupt")

#: How messages of gloo (the file that raised it) and NCCL begin.
TRANSPORT_MESSAGE = re.compile(r"\bgloo/|\bNCCL error\b|\bnccl\w*Error\b")


class CallJob:
    """Any function as the measured work."""

    def __init__(self, blob: bytes) -> None:
        function, self._args, self._kwargs = load_call(blob)
        self._function = resolve_name(function) if isinstance(function, str) else function

    def run(self) -> Any:
        return self._function(*self._args, **self._kwargs)

    def result(self, outcome: Any) -> Any:
        return check_finished(outcome)


class Server:
    """Answers each request with ``("ok", value)`` or ``("error", details)``, one at a time."""

    def __init__(self, channel: Channel, boot: dict[str, Any]) -> None:
        self._channel = channel
        self._boot = boot
        self._backend: Backend | None = None
        self._engine = ""
        self._job: Job | CallJob | None = None
        self._noted: list[tuple[int, int, Any]] = []
        self._processes = BackendProcesses()
        self._pid = os.getpid()
        self._environment = dict(os.environ)
        # Open, so that it need not have a name any more.
        self._directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._as_it_was = Leftovers()
        # What is loaded by now is here to stay; no collection need look through it again.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Serve until the other side asks to stop or goes away."""
        verbs: dict[str, Callable[[Any], Any]] = {
            "load": self._load,
            "prepare": self._prepare,
            "prepare_call": self._prepare_call,
            "ready": self._ready,
            "work": self._work,
            "timeline": self._timeline,
            "result": self._result,
            "flops": self._flops,
            "rest": self._rest,
        }
        while True:
            try:
                verb, payload = self._channel.receive()
            except (EOFError, OSError):
                return
            if verb == "stop":
                self._unload()
                return
            try:
                answer = ("ok", verbs[verb](payload))
            except BaseException as error:
                answer = ("error", _describe(error))
            if os.getpid() != self._pid:
                # Only one process may answer; the other came of a fork that did not end in the function.
                os._exit(1)
            # What the work has done to them is no reason to fail.
            with suppress(Exception):
                sys.stdout.flush()
            with suppress(Exception):
                sys.stderr.flush()
            try:
                self._channel.send(answer)
            except ConnectionError:
                return
            except Exception as error:
                # Such as a large result on a full disk.
                self._channel.send(("error", _describe(error)))

    def _load(self, payload: dict[str, Any]) -> tuple[bytes, bytes]:
        """What was loaded, and the processes that the engine has started for it."""
        context = RankContext(
            rank=self._boot["rank"],
            local_rank=self._boot["local_rank"],
            world_size=self._boot["world_size"],
            devices=tuple(self._boot["devices"]),
            threads=self._boot["threads"],
            cpus=tuple(self._boot["cpus"]),
            parallel=msgspec.convert(self._boot["parallel"], Parallel),
            scratch=os.environ.get(transport.SUPERVISOR_VARIABLE),
        )
        self._unload()
        backend = create_backend(payload["factory"])
        start = time.monotonic()
        info = backend.load(ModelSource(**payload["model"]), payload["options"], context)
        self._backend, self._engine = backend, info.name
        gc.collect()
        gc.freeze()
        # What an engine starts and sets is its own affair.
        self._as_it_was = Leftovers()
        load_s = time.monotonic() - start
        # Only an engine has any.
        workers = list(backend.workers()) if self._boot["launch"] == "engine" else []  # type: ignore[attr-defined]
        self._processes = BackendProcesses(workers, on_gpu=context.devices != ("cpu",))
        return msgspec.json.encode(msgspec.structs.replace(info, load_s=load_s)), msgspec.json.encode(workers)

    def _prepare(self, payload: dict[str, Any]) -> None:
        task = TASKS[payload["task"]]
        prepare = getattr(self._backend, task.method, None)
        if prepare is None:
            raise BackendError(f"{type(self._backend).__name__} has no method {task.method} for {task.name}")
        self._job = prepare(payload["inputs"], msgspec.convert(payload["params"], task.params))

    def _prepare_call(self, blob: bytes) -> None:
        self._job = CallJob(blob)

    def _ready(self, _payload: None) -> None:
        _seed()
        gc.collect()
        ready = getattr(self._job, "ready", None)
        if ready is not None:
            ready()
        self._others = self._processes.pids()
        reset_peak_memory(self._others)
        self._synchronize()

    def _work(self, iterations: int) -> None:
        job = self._job
        assert job is not None
        # Short functions are not slowed down by looking at the clock after each call.
        repeats = iterations if isinstance(job, CallJob) else 1
        self._noted = []
        self._repeats = repeats
        _barrier()
        cpu_before = self._processes.cpu_times_s()
        for _ in range(iterations // repeats):
            start_ns = time.monotonic_ns()
            for _ in range(repeats):
                outcome = job.run()
            self._synchronize()
            self._noted.append((start_ns, time.monotonic_ns(), outcome))
        self._cpu_time_s = cpu_time_used_s(cpu_before, self._processes.cpu_times_s())
        if isinstance(job, CallJob):
            check_accelerate_world()

    def _timeline(self, _payload: None) -> tuple[bytes, int | None]:
        """The last round, and the peak memory of this rank in it."""
        peak = peak_memory_bytes(self._others) if self._processes.tells_memory else None
        flags: dict[Flag, None] = {}
        timeline = RankTimeline(
            rank=self._boot["rank"],
            iterations=tuple(self._iteration(*noted, flags) for noted in self._noted),
            cpu_time_s=self._cpu_time_s,
            processes=self._processes.attached,
            flags=tuple(flags),
        )
        del self._noted[:-1]
        return msgspec.json.encode(timeline), peak

    def _iteration(self, start_ns: int, end_ns: int, outcome: Any, flags: dict[Flag, None]) -> Iteration:
        assert self._job is not None
        if isinstance(self._job, CallJob):
            return Iteration(start_ns=start_ns, end_ns=end_ns, repeats=self._repeats)
        made = self._job.result(outcome)
        flags.update(dict.fromkeys(getattr(made, "flags", ())))
        spans = getattr(made, "spans", None)
        return Iteration(
            start_ns=start_ns,
            end_ns=end_ns,
            repeats=self._repeats,
            requests=tuple(made.requests),
            spans=None if spans is None else tuple(spans),
        )

    def _result(self, _payload: None) -> bytes:
        assert self._job is not None
        return dump_result(self._job.result(self._noted[-1][2]))

    def _flops(self, _payload: None) -> bytes:
        """Of one run of the job, in a pass of its own after the rounds."""
        if isinstance(self._job, CallJob):
            told = Flops.unknown(FUNCTION_FLOPS_REASON)
        elif (count := getattr(self._backend, "flops", None)) is None:
            told = Flops.unknown(f"{self._engine} does not tell its operations")
        else:
            assert self._job is not None
            told = count(self._job, self._job.result(self._noted[-1][2]))
        return msgspec.json.encode(told)

    def _rest(self, _payload: None) -> tuple[int | None, bool]:
        """After a test: as it was before it, but for what cannot be undone.

        Returns the memory that is in use all the same (bytes), and whether anything is not as it was.
        """
        self._job = None
        self._noted = []
        os.environ.clear()
        os.environ.update(self._environment)
        os.fchdir(self._directory)
        os.umask(self._umask)
        gc.collect()
        left = self._as_it_was.found()
        if left:
            with suppress(Exception):
                sys.stdout.write(f"not given to another test, since this one has left: {', '.join(left)}\n")
        return memory_bytes(), bool(left)

    def _unload(self) -> None:
        if self._backend is None:
            return
        self._backend.close()
        self._backend = self._job = None
        self._processes = BackendProcesses()
        self._noted = []
        # Else the next model's objects would be beside those of the last.
        gc.unfreeze()
        gc.collect()

    def _synchronize(self) -> None:
        if self._backend is not None:
            self._backend.synchronize()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _seed() -> None:
    """Each round and each call draws the same numbers, be it the first of its rank or not."""
    random.seed(0)
    # The first access imports it.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _barrier() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.barrier()


def _describe(error: BaseException) -> dict[str, Any]:
    """What the parent needs to raise it again: the outcomes of pytest keep their meaning."""
    kind, now_ns = type(error), time.monotonic_ns()
    text = _text(error)
    return {
        "time_ns": now_ns,
        "pid": os.getpid(),
        "outcome": _outcome(kind),
        "reason": text,
        "exit_code": _exit_code(error),
        "ours": kind.__name__ if kind.__module__ == "pytest_llenergy.errors" else None,
        "message": f"{kind.__name__}: {text}",
        "traceback": _users_traceback(error),
        "collective": _is_of_collective(error, text),
    }


def _outcome(kind: type[BaseException]) -> str | None:
    """The name of what is no error to pytest, but an outcome of the test or the end of the run."""
    # pytest's own call themselves builtins; their common base gives them away.
    if any(base.__name__ == "OutcomeException" for base in kind.__mro__):
        return kind.__name__
    name = f"{kind.__module__}.{kind.__name__}"
    return kind.__name__ if name in RUN_ENDING_CLASSES else SKIP_CLASSES.get(name)


def _exit_code(error: BaseException) -> int | None:
    """The one that ``pytest.exit`` was given."""
    code = getattr(error, "returncode", None)
    return int(code) if isinstance(code, int) else None


def _text(error: BaseException) -> str:
    try:
        return _plain(str(error))
    except BaseException as another:
        # Also SystemExit: what ends here is the making of a text, no test.
        return f"(its text cannot be had: {type(another).__name__})"


def _plain(text: str) -> str:
    """No class of the test's own, which pytest may not know, and nothing that cannot be printed."""
    return str.encode(text, errors="backslashreplace").decode()


def _users_traceback(error: BaseException) -> str:
    """The traceback from where the work begins: the frames of this loop say nothing."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    try:
        return _plain("".join(traceback.format_exception(type(error), error, found)))
    except BaseException as another:
        # It asks loaders for source, and more of the error and its causes for their texts.
        calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(found)]
        told = [f'File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in calls]
        return _plain("".join([*told, f"(the rest cannot be had: {type(another).__name__})"]))


def _is_of_collective(error: BaseException, text: str) -> bool:
    """Whether torch's communication raised it, rather than the test in words like these."""
    if not isinstance(error, RuntimeError):
        # As torch.distributed.DistError is, and what C++ raises.
        return False
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    where = innermost.tb_frame.f_globals.get("__name__") if innermost is not None else None
    # A wait for a work handle raises in the test's own frame, a backward pass in that of autograd.
    return str(where).startswith("torch.distributed") or bool(TRANSPORT_MESSAGE.search(text))
