# SPDX-License-Identifier: Apache-2.0
"""Functions that run in a rank: load a backend repeatedly, and load invalid models and options."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import BackendWorker, RankContext, create_backend
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.ranks.usage import BackendProcesses, memory_bytes

#: Models smaller than this (bytes) are loaded more often, since a process keeps about as much memory anyway.
SMALL_BYTES = 64 << 20
CYCLES, CYCLES_OF_SMALL = 2, 9

#: Processes of a backend must end this soon after ``close`` has returned: the next test needs their devices.
CLOSE_TIMEOUT_S, POLL_S = 5.0, 0.02

#: Processes that a library starts once and keeps idle, by a part of their command line.
KEPT_PROCESSES = (
    *("multiprocessing.resource_tracker", "loky.backend.resource_tracker", "multiprocessing.forkserver"),
    *("torch/_inductor/compile_worker", "torch_shm_manager"),
)


@dataclass(frozen=True)
class LoadCycles:
    """Memory of the rank (bytes) with the model and after ``close``, by cycle, and what runs at the end."""

    loaded: tuple[int, ...]
    closed: tuple[int, ...]
    running: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """The exception that loading raised; ``declared`` if it is a ``ModelError`` or a ``BackendError``."""

    kind: str
    message: str
    declared: bool


def load_repeatedly(
    factory: str,
    model: Mapping[str, Any],
    options: Mapping[str, Any],
    devices: Sequence[str],
    threads: int,
    prompt: str,
) -> LoadCycles | None:
    """Load, generate and close several times; ``None`` if the system does not report memory.

    Args:
        factory: ``"module:Class"`` of the backend.
        model: Fields of the ``ModelSource``.
        options: Load options.
        devices: Devices of the rank.
        threads: Threads of the rank.
        prompt: Prompt to generate from.
    """
    context = RankContext(devices=tuple(devices), threads=threads)
    params = GenerationParams.parse({"max_new_tokens": 2, "ignore_eos": True})
    before = _processes()
    loaded: list[int] = []
    closed: list[int] = []
    workers: set[int] = set()
    wanted = CYCLES
    while len(closed) < wanted:
        backend = create_backend(factory)
        backend.load(ModelSource(**model), options, context)
        job = backend.prepare([prompt], params)
        job.result(job.run())
        backend.synchronize()
        # Recorded before ``close``, after which they may have other parents.
        named: Sequence[BackendWorker] = getattr(backend, "workers", tuple)()
        workers |= {worker.pid for worker in named} - {os.getpid()}
        with_model = _memory_bytes(BackendProcesses(named).pids())
        backend.close()
        del backend, job
        without = _memory_bytes()
        if with_model is None or without is None:
            return None
        loaded.append(with_model)
        closed.append(without)
        if with_model - without < SMALL_BYTES:
            wanted = CYCLES_OF_SMALL
    return LoadCycles(tuple(loaded), tuple(closed), tuple(_running(set(before), workers)))


def try_loading(
    factory: str,
    model: Mapping[str, Any],
    options: Mapping[str, Any],
    devices: Sequence[str],
    threads: int,
    tries: Sequence[Mapping[str, Any]],
) -> list[Refusal | None]:
    """Load once with each of ``tries`` replacing some arguments. Returns the error of each, or ``None``.

    Args:
        factory: ``"module:Class"`` of the backend.
        model: Fields of the ``ModelSource``.
        options: Load options.
        devices: Devices of the rank.
        threads: Threads of the rank.
        tries: Arguments to replace, for each attempt.
    """
    return [
        _attempt(factory, devices, threads, {"model": model, "options": options, **each}) for each in tries
    ]


def _attempt(factory: str, devices: Sequence[str], threads: int, given: Mapping[str, Any]) -> Refusal | None:
    context = RankContext(devices=tuple(devices), threads=threads)
    backend = create_backend(factory)
    try:
        backend.load(ModelSource(**given["model"]), given["options"], context)
    except Exception as error:
        # The class decides whether the backend passes.
        return Refusal(type(error).__name__, str(error), isinstance(error, (ModelError, BackendError)))
    backend.close()
    return None


def _memory_bytes(others: Collection[int] = ()) -> int | None:
    """Return the memory of this process and ``others``; ``None`` if the system does not report it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Freed memory that glibc's allocator keeps is not a leak (malloc_trim(3)).
        ctypes.CDLL(None).malloc_trim(0)
    here = memory_bytes()
    # A process that has ended has no memory.
    return None if here is None else here + sum(memory_bytes(pid) or 0 for pid in others)


def _processes() -> dict[int, str]:
    """Return the command lines of this process's descendants, without those that libraries keep."""
    import psutil

    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        # It may have ended meanwhile.
        with suppress(psutil.Error):
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(kept in command for kept in KEPT_PROCESSES):
                found[child.pid] = f"process {child.pid} ({command})"
    return found


def _running(before: Collection[int], workers: Collection[int]) -> list[str]:
    import psutil

    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while True:
        running = [each for ident, each in _processes().items() if ident not in before]
        running += [f"process {pid}, which workers() named" for pid in workers if psutil.pid_exists(pid)]
        if not running or time.monotonic() >= deadline:
            return running
        time.sleep(POLL_S)
