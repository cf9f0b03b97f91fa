# SPDX-License-Identifier: Apache-2.0
"""State of a rank's process and interpreter that outlives a test: some is restored, the rest only compared.

Only what can be restored for certain, and from any state, is restored. Settings for which Python has no
function are read from the kernel.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import platform
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any

#: Files of /proc/self that change only if somebody changes a setting. The autogroup has a niceness, too.
PROC_FILES = ("autogroup", "cgroup", "coredump_filter", "oom_score_adj", "personality")

#: Lines of /proc/self/status with settings; the others are counters.
STATUS_LINES = re.compile(
    r"^(?:Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp\w*|Spec\w+|Mems_allowed|THP_enabled|VmLck):.*$",
    re.M,
)

IGNORED_SIGNALS = re.compile(r"^SigIgn:.*$", re.M)

#: Settings that prctl(2) returns, by the number of the operation that reads them.
PRCTL = {
    "dumpable": 3,
    "timer slack": 30,
    "transparent huge pages": 42,
    "IO flusher": 58,
    "merged memory": 68,
}

#: The same for those that it writes into an int.
PRCTL_BY_POINTER = {"death signal": 2, "subreaper": 37}

#: Numbers of sched_getattr(2), ioprio_get(2) and get_mempolicy(2), which C libraries do not wrap.
SYSTEM_CALLS = {"x86_64": (315, 252, 239), "aarch64": (275, 31, 236)}

#: ``struct sched_attr`` of the kernel, with the clamps of the processor's speed at its end.
SCHED_ATTR = struct.Struct("IIQiIQQQII")

#: With one of these, OpenMP binds each of its threads to cores when it starts them.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")

#: Signal handlers that a library sets once and keeps, by their module.
KEPT_HANDLERS = (
    # DataLoader's handler of SIGCHLD checks for dead workers, once the first had any.
    "torch.utils.data._utils.signal_handling",
)

#: Ends of paths that libraries add to the search path when they are imported.
KEPT_PATHS = ("/setuptools/_vendor",)

#: Variables that libraries set for themselves in the C library alone, by the start of their names.
KEPT_VARIABLES = (b"__KMP_REGISTERED_LIB", b"CUDA_MODULE_LOADING")

#: Directories of installed packages. The finders of modules that these add when they are imported, such as
#: those of six and transformers, do no harm.
INSTALLED = re.compile(r"/(?:site|dist)-packages/")

#: Functions of libraries for linear algebra and of OpenMP that return their number of threads.
THREAD_GETTERS = (
    *("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads"),
    *("openblas_get_num_threads64_", "openblas_get_num_threads"),
    *("MKL_Get_Max_Threads", "bli_thread_get_num_threads", "omp_get_max_threads"),
)

#: Files of such libraries.
THREAD_LIBRARIES = re.compile(r"/\S*/lib(?:\w*openblas|mkl_rt|blis|gomp|iomp|omp)[\w.-]*\.so[\w.]*$", re.M)

#: As integers, which ``signal`` converts faster.
SIGNALS = tuple(map(int, signal.valid_signals()))

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

#: Modules whose functions all code uses, the measuring one included.
PATCHABLE: tuple[ModuleType, ...] = (builtins, gc, os, time)

C_LIBRARY = ctypes.CDLL(None, use_errno=True)

#: Not a constant, so that the compiler does not compute with it.
SMALLEST_NORMAL = sys.float_info.min


class RestorableState:
    """Saves the state of this process that can be restored for certain."""

    def __init__(self) -> None:
        self._environ, self._environment = os.environ, dict(os.environ)
        self._c_environment = _c_environment()
        # Kept open, so that it can be restored even if it is renamed.
        self._directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._recursion = sys.getrecursionlimit()
        self._start_method = multiprocessing.get_start_method(allow_none=True)
        self._has_fault_handler = faulthandler.is_enabled()
        self._limits = {limit: resource.getrlimit(limit) for limit in LIMITS}
        self._locale = locale.setlocale(locale.LC_ALL)
        root = logging.getLogger()
        self._logging = root.level, list(root.handlers), root.manager.disable
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()

    def restore(self) -> None:
        """Restore the saved state. What cannot be restored differs in ``settings``."""
        self._restore_environment()
        os.fchdir(self._directory)
        os.umask(self._umask)
        multiprocessing.set_start_method(self._start_method, force=True)
        self._restore_fault_handler()
        # torch.compile raises it.
        sys.setrecursionlimit(self._recursion)
        for limit, (soft, hard) in self._limits.items():
            now = resource.getrlimit(limit)
            if now != (soft, hard):
                # Fails where the test has lowered the hard limit.
                with suppress(OSError, ValueError):
                    resource.setrlimit(limit, (soft, now[1]))
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        root = logging.getLogger()
        level, handlers, disabled = self._logging
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.disable(disabled)
        self._warnings.__exit__(None, None, None)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()

    def _restore_fault_handler(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        # ``rank`` has registered it.
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        if faulthandler.is_enabled() != self._has_fault_handler:
            if self._has_fault_handler:
                faulthandler.enable(file=2)
            else:
                faulthandler.disable()

    def _restore_environment(self) -> None:
        os.environ = self._environ  # noqa: B003 - a test may have replaced it
        if dict(os.environ) != self._environment:
            for name in os.environ.keys() - self._environment.keys():
                del os.environ[name]
            os.environ.update(self._environment)
        # ``os.putenv`` and libraries bypass ``os.environ``.
        now = _c_environment()
        for raw in now.keys() - self._c_environment.keys():
            if not raw.startswith(KEPT_VARIABLES):
                os.unsetenv(raw)
        for raw, value in self._c_environment.items():
            if now.get(raw) != value:
                os.putenv(raw, value)
        # The C library reads TZ only then.
        time.tzset()


def settings() -> dict[str, object]:
    """Return the settings of this process, of its main thread and of the interpreter, by name."""
    status = _read("status")
    return {
        "search path": [path for path in sys.path if not path.endswith(KEPT_PATHS)],
        "import hooks": [finder for finder in sys.meta_path if not _is_installed(finder)] + sys.path_hooks,
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), tuple(gc.callbacks)),
        "tracing": (sys.gettrace(), sys.getprofile(), _is_tracing_memory(), _monitoring_tools()),
        "tracing of threads": (threading.gettrace(), threading.getprofile()),
        "interpreter": (sys.getswitchinterval(), sys.dont_write_bytecode),
        "defaults": (threading.stack_size(), socket.getdefaulttimeout()),
        "floating point": _float_arithmetic(),
        "timers": [*(any(signal.getitimer(timer)) for timer in TIMERS), _read("timers")],
        # C libraries ignore signals without Python.
        "signal handlers": [*map(_handler, SIGNALS), IGNORED_SIGNALS.findall(status)],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "standard streams": [
            *map(_stream_state, (sys.stdin, sys.stdout, sys.stderr)),
            *map(_file_identity, range(3)),
        ],
        **{name: _read(name) for name in PROC_FILES},
        "process status": STATUS_LINES.findall(status),
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "locale": locale.setlocale(locale.LC_ALL),
        **_kernel_settings(),
    }


def scheduling() -> dict[int, tuple[object, ...]]:
    """Return policy, niceness, priority, clamps and cores of each thread of this process, by thread id."""
    threads: dict[int, tuple[object, ...]] = {}
    is_bound = any(name in os.environ for name in BINDING_VARIABLES)
    for tid in map(int, os.listdir("/proc/self/task")) if sys.platform == "linux" else ():  # noqa: PTH208
        # The thread may have ended meanwhile.
        with suppress(OSError):
            cores = None if is_bound and tid != os.getpid() else frozenset(os.sched_getaffinity(tid))
            threads[tid] = (*_sched_attributes(tid), cores)
    return threads


def find_scheduling_changes(
    before: Mapping[int, tuple[object, ...]], now: Mapping[int, tuple[object, ...]]
) -> list[str]:
    """Return descriptions of threads that are scheduled differently, new ones than the main thread was."""
    main = os.getpid()
    changed = [tid for tid, found in now.items() if found != before.get(tid, before.get(main))]
    names = ["main thread" if tid == main else f"thread {tid}" for tid in changed]
    return [f"scheduling or cores of the {', '.join(names)}"] if names else []


def count_descriptors() -> int:
    """Return the number of open file descriptors; 0 if the system does not list them."""
    with suppress(FileNotFoundError):
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return 0


def functions(owners: Iterable[Any]) -> list[tuple[Any, list[str], list[object]]]:
    """Return modules and classes, each with the names of its callables and the callables."""
    found = []
    for owner in owners:
        callables = {name: value for name, value in vars(owner).items() if callable(value)}
        found.append((owner, [*callables], [*callables.values()]))
    return found


def find_replaced(
    before: Iterable[tuple[Any, list[str], list[object]]],
) -> Iterator[tuple[str, str, object]]:
    """Yield owner, name and present value of each of ``functions`` that is another one now."""
    for owner, names, callables in before:
        now = [*map(vars(owner).get, names)]
        # Thousands are compared at once, since hardly ever one differs.
        if now != callables:
            for name, function, found in zip(names, callables, now, strict=True):
                if found is not function:
                    yield owner.__name__, name, found


def loaded_modules() -> tuple[int, str]:
    """Return what differs if a module was imported since, quickly."""
    return len(sys.modules), next(reversed(sys.modules))


def library_threads() -> dict[str, int]:
    """Return the numbers of threads of the loaded libraries for linear algebra and OpenMP, by path."""
    # Reading the map of the memory takes long. New libraries come with new modules.
    return {path: getter() for path, getter in _thread_getters(loaded_modules()).items()}


@lru_cache(maxsize=1)
def _thread_getters(_loaded: object) -> dict[str, Callable[[], int]]:
    found: dict[str, Callable[[], int]] = {}
    for path in sorted(set(THREAD_LIBRARIES.findall(_read("maps")))):
        # It may have been deleted since, or have another interface.
        with suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            names = [name for name in THREAD_GETTERS if hasattr(library, name)]
            if names:
                found[path] = getattr(library, names[0])
    return found


def _c_environment() -> dict[bytes, bytes]:
    """Return the environment as libraries and new processes see it."""
    try:
        entries = ctypes.POINTER(ctypes.c_char_p).in_dll(C_LIBRARY, "environ")
    except ValueError:
        # The C library of macOS has another name for it.
        return dict(os.environb)
    found: dict[bytes, bytes] = {}
    for entry in _strings(entries):
        name, _, value = entry.partition(b"=")
        found[name] = value
    return found


def _strings(entries: Any) -> Iterator[bytes]:
    """Iterate over an array of C strings that ends with a null pointer, which may be missing itself."""
    index = 0
    while entries and (entry := entries[index]) is not None:
        yield entry
        index += 1


def _kernel_settings() -> dict[str, object]:
    if sys.platform != "linux":
        return {}
    found: dict[str, object] = {name: C_LIBRARY.prctl(number, 0, 0, 0, 0) for name, number in PRCTL.items()}
    for name, number in PRCTL_BY_POINTER.items():
        value = ctypes.c_int()
        C_LIBRARY.prctl(number, ctypes.byref(value), 0, 0, 0)
        found[name] = value.value
    if platform.machine() in SYSTEM_CALLS:
        _, ioprio_get, get_mempolicy = SYSTEM_CALLS[platform.machine()]
        found["IO priority"] = C_LIBRARY.syscall(ioprio_get, 1, 0)
        mode, nodes = ctypes.c_int(), ctypes.create_string_buffer(512)
        C_LIBRARY.syscall(get_mempolicy, ctypes.byref(mode), nodes, 4096, None, 0)
        found["memory policy"] = mode.value, nodes.raw
    return found


def _sched_attributes(tid: int) -> tuple[object, ...]:
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is not None:
        data = ctypes.create_string_buffer(SCHED_ATTR.size)
        if C_LIBRARY.syscall(numbers[0], tid, data, SCHED_ATTR.size, 0) == 0:
            _, policy, flags, nice, priority, *_, lowest, highest = SCHED_ATTR.unpack(data.raw)
            return policy, flags, nice, priority, lowest, highest
    return os.sched_getscheduler(tid), os.sched_getparam(tid).sched_priority, os.getpriority(0, tid)


def _float_arithmetic() -> tuple[str, ...]:
    """Compute what depends on the rounding mode and on whether denormal numbers become 0.

    Returned as text, since comparing numbers would depend on it, too.
    """
    one = SMALLEST_NORMAL / SMALLEST_NORMAL
    return (SMALLEST_NORMAL / 2).hex(), (one + 1e-20).hex(), (one - 1e-20).hex()


def _read(name: str) -> str:
    # Buffers and paths would cost more than the read.
    with suppress(OSError), open(f"/proc/self/{name}", "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall().decode(errors="replace")
    return ""


def _is_tracing_memory() -> bool:
    tracemalloc = sys.modules.get("tracemalloc")
    return tracemalloc is not None and bool(tracemalloc.is_tracing())


def _monitoring_tools() -> list[str | None]:
    monitoring = getattr(sys, "monitoring", None)
    return [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]


def _handler(number: int) -> object:
    handler = signal.getsignal(number)
    return signal.SIG_DFL if getattr(handler, "__module__", None) in KEPT_HANDLERS else handler


def _is_installed(finder: object) -> bool:
    """Return whether an installed package defines a finder, which is a class or an object of one."""
    kind = finder if isinstance(finder, type) else type(finder)
    # A class that ``type`` has made may have no module.
    module = sys.modules.get(str(getattr(kind, "__module__", None)))
    return bool(INSTALLED.search(str(getattr(module, "__file__", None))))


def _stream_state(stream: Any) -> tuple[object, object]:
    return stream, getattr(stream, "closed", True)


def _file_identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
