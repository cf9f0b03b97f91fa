# SPDX-License-Identifier: Apache-2.0
"""The request loop of a rank: load a backend, run jobs round by round, forget them after each test."""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from traceback import TracebackException
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.backends.base import Backend, RankContext, create_backend
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import SERVE, TASKS, Generation
from pytest_llenergy.backends.traffic.texts import write_texts
from pytest_llenergy.errors import BackendError, PlanError
from pytest_llenergy.ranks import calls, transport, usage
from pytest_llenergy.ranks.pickling import dump_result, load_call
from pytest_llenergy.record.record import Flag, Parallel
from pytest_llenergy.record.timeline import Iteration, RankTimeline

#: Exceptions that are outcomes, besides those of pytest, which have a base class: pytest's name for each.
OUTCOMES = {
    "unittest.case.SkipTest": "Skipped",
    "_pytest.outcomes.Exit": "Exit",
    "builtins.KeyboardInterrupt": "KeyboardInterrupt",
}


class CallJob:
    """Any function as the measured work; ``call`` is pickled."""

    def __init__(self, call: bytes) -> None:
        function, (input_tokens, output_tokens, *self._args), self._kwargs = load_call(call)
        counter = calls.TokenCounter(function, calls.TokensPerCall(input_tokens, output_tokens))
        self._function = counter.counting(resolve_name(function) if isinstance(function, str) else function)
        self.count_tokens = counter.count

    def run(self) -> Any:
        return self._function(*self._args, **self._kwargs)

    def result(self, outcome: Any) -> Any:
        return calls.check_finished(outcome)


#: The job of a rank that holds its host's part of a model, while another host's generates with all of it.
FOLLOW = SimpleNamespace(run=lambda: None, result=lambda _: Generation(texts=[], token_ids=[], requests=[]))


class RankServer:
    """Answers each request with ``("ok", value)`` or ``("error", report)``, one at a time.

    A function that pytest has called may send messages before the answer, by ``current.send_message``.
    """

    current: ClassVar[RankServer]

    def __init__(self, connection: Connection, boot: dict[str, Any]) -> None:
        RankServer.current = self
        self._connection = connection
        self._boot = boot
        self._backend: Backend | None = None
        self._backend_name = ""
        #: Whether this rank only holds a part of the model of another rank.
        self._follows = boot["rank"] % boot["nodes"] > 0
        self._job: Any = None
        self._iterations: list[tuple[int, int, Any]] = []
        self._processes = usage.BackendProcesses()
        # In a fork that a function makes: only one process may answer, and its end must be noticed.
        os.register_at_fork(after_in_child=connection.close)
        self._environment = dict(os.environ)
        # Kept open: a test may rename the one, and put something else in place of the other.
        self._directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._log = os.dup(1)
        # Garbage collections need not examine the modules that are loaded by now.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Serve until pytest sends ``stop`` or closes the connection; other verbs are methods."""
        while True:
            try:
                verb, payload = self._connection.recv()
            except (EOFError, OSError):
                return
            if verb == "stop":
                self._unload()
                return
            # An error shows what was printed since the last request.
            os.ftruncate(self._log, 0)
            try:
                answer = ("ok", getattr(self, f"_{verb}")(payload))
            except BaseException as error:
                answer = ("error", _describe(error))
            # The work may have closed or replaced them.
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            try:
                self._connection.send(answer)
            except OSError:
                # pytest is gone, or this is a fork that a function has let return.
                os._exit(1)

    def send_message(self, value: object) -> None:
        """Let ``RankGroup.on_message`` handle a value. Works also where a test has replaced files."""
        self._connection.send_bytes(pickle.dumps(("message", value)))

    def _load(self, payload: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return the encoded ``BackendInfo``, and the encoded processes that the backend has started."""
        boot = self._boot
        # Not from this process, whose variables a backend may have changed.
        variables = boot["environment"]
        planned = ("rank", "local_rank", "world_size", "devices", "threads", "cpus", "nodes")
        context = RankContext(
            **{name: boot[name] for name in planned},
            parallel=msgspec.convert(boot["parallel"], Parallel),
            scratch=os.environ.get(transport.SUPERVISOR_VARIABLE),
            node_rank=boot["rank"] % boot["nodes"],
            master=(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) if boot["nodes"] > 1 else None,
        )
        self._unload()
        self._restore()
        backend = create_backend(payload["factory"])
        start = real_time.monotonic()
        info = backend.load(ModelSource(**payload["model"]), payload["options"], context)
        self._backend, self._backend_name = backend, info.name
        gc.collect()
        gc.freeze()
        # Only such backends have the method.
        workers = list(backend.workers()) if boot["launch"] == "backend" else []  # type: ignore[attr-defined]
        load_s = real_time.monotonic() - start
        self._processes = usage.BackendProcesses(workers, on_gpu=context.devices != ("cpu",))
        return msgspec.json.encode(msgspec.structs.replace(info, load_s=load_s)), msgspec.json.encode(workers)

    def _prepare(self, payload: dict[str, Any]) -> None:
        if self._follows:
            self._job = FOLLOW
            return
        task = TASKS[payload["task"]]
        prepare = getattr(self._backend, task.method, None)
        if prepare is None:
            raise BackendError(f"{type(self._backend).__name__} has no method {task.method} for {task.name}")
        inputs = payload["inputs"]
        if task is not SERVE:
            # A load is more than its texts.
            count = getattr(self._backend, "count_tokens", None)
            inputs = write_texts(inputs, self._backend_name, count)
        self._job = prepare(inputs, msgspec.convert(payload["params"], task.params))

    def _prepare_call(self, call: bytes) -> None:
        self._job = CallJob(call)

    def _prepare_round(self, _payload: None) -> None:
        _seed()
        gc.collect()
        prepare_job = getattr(self._job, "before_round", None)
        if prepare_job is not None:
            prepare_job()
        self._other_pids = self._processes.pids()
        usage.reset_peak_memory(self._other_pids)
        self._synchronize()

    def _work(self, iterations: int) -> None:
        job = self._job
        # For functions, which may be short, the clock is not read after each call.
        repeats = iterations if isinstance(job, CallJob) else 1
        self._iterations, self._repeats = [], repeats
        if (dist := _process_group()) is not None:
            dist.barrier()
        self._cpu_before = self._processes.cpu_times_s()
        for _ in range(iterations // repeats):
            start_ns = real_time.monotonic_ns()
            for _ in range(repeats):
                outcome = job.run()
            self._synchronize()
            self._iterations.append((start_ns, real_time.monotonic_ns(), outcome))
        self._cpu_after = self._processes.cpu_times_s()
        if isinstance(job, CallJob):
            _check_accelerate_world()

    def _timeline(self, _payload: None) -> tuple[bytes, int | None]:
        """Return the encoded timeline of the last round, and the peak memory of this rank in it (bytes)."""
        peak = usage.peak_memory_bytes(self._other_pids) if self._processes.has_peak_memory else None
        if self._follows:
            # Its processes went on until the last rank had answered.
            self._cpu_after = self._processes.cpu_times_s()
        flags: dict[Flag, None] = {}
        timeline = RankTimeline(
            rank=self._boot["rank"],
            iterations=tuple(self._make_iteration(*each, flags) for each in self._iterations),
            cpu_time_s=usage.cpu_time_used_s(self._cpu_before, self._cpu_after),
            servers=self._processes.servers,
            flags=tuple(flags),
        )
        del self._iterations[:-1]
        return msgspec.json.encode(timeline), peak

    def _make_iteration(self, start_ns: int, end_ns: int, outcome: Any, flags: dict[Flag, None]) -> Iteration:
        if isinstance(self._job, CallJob):
            tokens = self._job.count_tokens(self._repeats)
            return Iteration(start_ns=start_ns, end_ns=end_ns, repeats=self._repeats, tokens=tokens)
        generated = self._job.result(outcome)
        flags.update(dict.fromkeys(getattr(generated, "flags", ())))
        spans = getattr(generated, "spans", None)
        return Iteration(
            start_ns=start_ns,
            end_ns=end_ns,
            repeats=self._repeats,
            requests=tuple(generated.requests),
            spans=None if spans is None else tuple(spans),
            failures=tuple(getattr(generated, "failures", ())),
        )

    def _result(self, _payload: None) -> bytes:
        return dump_result(self._job.result(self._iterations[-1][2]))

    def _clean_up(self, _payload: None) -> None:
        """Forget the work of a test. What its functions have changed elsewhere is their file's own."""
        self._job = None
        self._iterations = []
        if self._backend is None:
            self._restore()
        gc.collect()

    def _restore(self) -> None:
        """Restore environment and directory as they were before any test or backend."""
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        os.fchdir(self._directory)

    def _unload(self) -> None:
        if self._backend is None:
            return
        self._backend.close()
        self._backend = self._job = None
        self._processes = usage.BackendProcesses()
        self._iterations = []
        # Otherwise the objects of this model would never be collected.
        gc.unfreeze()
        gc.collect()

    def _synchronize(self) -> None:
        if self._backend is not None:
            self._backend.synchronize()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _seed() -> None:
    """Seed random generators, so that each round and call draws the same numbers, in new and warm ranks."""
    random.seed(0)
    # Accessing ``numpy.random`` imports it.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _process_group() -> Any:
    """Return ``torch.distributed`` if this process has joined a process group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _check_accelerate_world() -> None:
    """Raise ``PlanError`` if accelerate has split work over fewer processes than the process group has.

    On a CPU ``PartialState()`` ignores the process group unless it has the argument ``cpu=True`` (accelerate
    1.15, ``state.py``, ``_prepare_backend``). Each rank then does all of the work.
    """
    state, dist = sys.modules.get("accelerate.state"), _process_group()
    if state is not None and dist is not None:
        count, world_size = state.PartialState._shared_state.get("num_processes"), dist.get_world_size()
        if count not in (None, world_size):
            raise PlanError(
                f"accelerate sees {count} process{'es' if count > 1 else ''} in a world of {world_size} "
                "ranks, so each has done all of the work; on CPU ranks, call PartialState(cpu=True) before "
                "anything else of accelerate"
            )


def _describe(error: BaseException) -> dict[str, Any]:
    """Return the report of an error, of which ``failure.raise_first_cause`` makes an exception."""
    now_ns = real_time.monotonic_ns()
    kind, found = type(error), error.__traceback__
    # Without the frames in which this package calls the user's functions.
    ours = (__file__, calls.__file__)
    while found is not None and found.tb_next is not None and found.tb_frame.f_code.co_filename in ours:
        found = found.tb_next
    # It survives an error whose own text cannot be made.
    report = TracebackException(kind, error, found)
    # A module may have its own kind of an error of this package.
    known = next((each for each in kind.__mro__ if each.__module__ == "pytest_llenergy.errors"), None)
    code = getattr(error, "returncode", None)
    return {
        "time_ns": now_ns,
        "outcome": _outcome(kind),
        "reason": _plain(str(report)),
        # Of ``pytest.exit``.
        "exit_code": code if isinstance(code, int) else None,
        "error_class": known.__name__ if known is not None else None,
        "message": f"{kind.__name__}: {_plain(str(report))}",
        "traceback": _plain("".join(report.format())),
        "runtime_error": isinstance(error, RuntimeError),
    }


def _outcome(kind: type[BaseException]) -> str | None:
    """Return the class name of an outcome of pytest or of the end of the run; ``None`` for an error."""
    # The module of pytest's outcomes is ``builtins``; their base class is recognisable.
    if any(base.__name__ == "OutcomeException" for base in kind.__mro__):
        return kind.__name__
    return OUTCOMES.get(f"{kind.__module__}.{kind.__name__}")


def _plain(text: str) -> str:
    """Return a text as a plain str that can be printed."""
    return str.encode(text, errors="backslashreplace").decode()
