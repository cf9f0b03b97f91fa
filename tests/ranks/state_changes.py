# SPDX-License-Identifier: Apache-2.0
"""What a test may change in a rank, and an independent look at the state that the next test finds there."""

from __future__ import annotations

from typing import Any

#: Changes of torch, each as code that a test runs in its rank.
TORCH = {
    "cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "cudnn.deterministic": "torch.backends.cudnn.deterministic = True",
    "cudnn.enabled": "torch.backends.cudnn.enabled = False",
    "matmul.allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "fp16 reduction": "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "bf16 reduction": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "fp16 accumulation": "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "matmul precision": "torch.set_float32_matmul_precision('medium')",
    "mkldnn.enabled": "torch.backends.mkldnn.enabled = False",
    "mkldnn.deterministic": "torch.backends.mkldnn.deterministic = True",
    "mkldnn precision": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "flash attention": "torch.backends.cuda.enable_flash_sdp(False)",
    "math attention": "torch.backends.cuda.enable_math_sdp(False)",
    "attention of cuDNN": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "reduction of math attention": "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "order of attention kernels": "torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])",
    "mha fast path": "torch.backends.mha.set_fastpath_enabled(False)",
    "opt_einsum": "torch.backends.opt_einsum.strategy = 'greedy'",
    "quantized engine": "torch.backends.quantized.engine = 'onednn'",
    "nnpack": "torch._C._set_nnpack_enabled(False)",
    "flush denormal": "assert torch.set_flush_denormal(True)",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default device": "torch.set_default_device('meta')",
    "threads": "torch.set_num_threads(3)",
    "interop threads": "torch.set_num_interop_threads(5)",
    "determinism": "torch.use_deterministic_algorithms(True)",
    "determinism, warn only": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "filled memory": "torch.utils.deterministic.fill_uninitialized_memory = False",
    "no gradients": "torch.set_grad_enabled(False)",
    "inference mode": "torch.mode = torch.inference_mode(); torch.mode.__enter__()",
    "autocast": "torch.mode = torch.autocast('cpu'); torch.mode.__enter__()",
    "dtype of autocast": "torch.set_autocast_dtype('cpu', torch.float16)",
    "dtype of autocast on CUDA": "torch.set_autocast_dtype('cuda', torch.bfloat16)",
    "cache of autocast": "torch.set_autocast_cache_enabled(False)",
    "anomaly detection": "torch.autograd.set_detect_anomaly(True)",
    "autograd without threads": "torch._C._set_multithreading_enabled(False)",
    "sparse checks": "torch.sparse.check_sparse_tensor_invariants.enable()",
    "a hook of all modules": "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
    "a mode of functions": "from torch.overrides import TorchFunctionMode\n"
    "torch.mode = TorchFunctionMode(); torch.mode.__enter__()",
    "a mode of dispatch": "from torch.utils._python_dispatch import TorchDispatchMode\n"
    "class Mode(TorchDispatchMode):\n"
    " def __torch_dispatch__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {}))\n"
    "torch.mode = Mode(); torch.mode.__enter__()",
    "hooks of saved tensors": "torch.hooks = torch.autograd.graph.saved_tensors_hooks(id, id)\n"
    "torch.hooks.__enter__()",
    "a replaced function": "torch.nn.functional.scaled_dot_product_attention = lambda q, k, v: v",
    "a replaced method": "torch.nn.Module.__call__ = lambda self, *args: self.forward(*args)",
    "an operator": "torch.left = torch.library.Library('aten', 'IMPL')\n"
    "torch.left.impl('mm', lambda a, b: torch.zeros(a.shape[0], b.shape[1]), 'CPU')",
    "a profiler": "torch.left = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])\n"
    "torch.left.start()",
    "fuser of TorchScript": "torch._C._jit_set_texpr_fuser_enabled(False)",
    "profiling mode of TorchScript": "torch._C._jit_set_profiling_mode(False)",
    "specialisations of TorchScript": "torch.jit.set_fusion_strategy([('DYNAMIC', 3)])",
    "no TorchScript": "torch.jit._state.disable()",
    "printed digits": "torch.set_printoptions(precision=2)",
    "swapped parameters": "torch.__future__.set_swap_module_params_on_conversion(True)",
    "checks of checkpoints": "import torch.utils.checkpoint as c; c._checkpoint_debug_enabled = True",
    "stance of the compiler": "torch.compiler.set_stance('force_eager')",
    "backend of the compiler": "torch.compiler.set_default_backend('eager')",
    "torch._dynamo.config": "import torch._dynamo; torch._dynamo.config.suppress_errors = True",
    "torch._inductor.config": "import torch._inductor.config as c; c.triton.unique_kernel_names = False",
    "torch._functorch.config": "import torch._functorch.config as c; c.donated_buffer = not c.donated_buffer",
}

#: Changes of the process and of the interpreter.
PROCESS = {
    "SCHED_BATCH": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "SCHED_IDLE": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
    "niceness": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "one core": "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
    "no huge pages": "prctl(41, 1, 0, 0, 0)",
    "timer slack": "prctl(29, 1_000_000, 0, 0, 0)",
    "death signal": "prctl(1, 10, 0, 0, 0)",
    "not dumpable": "prctl(4, 0, 0, 0, 0)",
    "no subreaper": "prctl(36, 0, 0, 0, 0)",
    "IO priority": "import psutil; psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)",
    "memory policy": "assert libc.syscall({'x86_64': 238, 'aarch64': 237}[os.uname().machine], 1,"
    " ctypes.byref(ctypes.c_ulong(1)), 64) == 0",
    "locked memory": "assert libc.mlockall(1) == 0",
    "out-of-memory score": "pathlib.Path('/proc/self/oom_score_adj').write_text('500')",
    "few files": "lower(resource.RLIMIT_NOFILE, 50)",
    "few files for good": "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))",
    "little memory": "lower(resource.RLIMIT_DATA, 8 << 30)",
    "small stacks": "lower(resource.RLIMIT_STACK, 1 << 20)",
    "800 open files": "sys.left = [os.open('/dev/null', 0) for _ in range(800)]",
    "50 temporary files": "sys.left = [tempfile.TemporaryFile() for _ in range(50)]",
    "every file descriptor": "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); sys.left = []\n"
    "try:\n while True: sys.left.append(os.open('/dev/null', 0))\nexcept OSError: pass",
    "a variable": "os.environ['LEFT'] = '1'",
    "a removed variable": "del os.environ['PATH']",
    "a variable of C": "os.putenv('LEFT_IN_C', '1')",
    "a removed variable of C": "os.unsetenv('PATH')",
    "a variable of a library": "libc.setenv(b'LEFT_BY_C', b'1', 1)",
    "directory": "os.chdir('/')",
    "umask": "os.umask(0o777)",
    "a signal blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
    "a signal ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "a timer": "signal.setitimer(signal.ITIMER_REAL, 300)",
    "a thread": "threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "a process": "subprocess.Popen(['sleep', '300'])",
    "locale": "locale.setlocale(locale.LC_ALL, 'C')",
    "rounding": "assert libm.fesetround(0x800 if os.uname().machine == 'x86_64' else 0x400000) == 0",
    "no garbage collection": "gc.disable()",
    "a callback of the garbage collector": "gc.callbacks.append(lambda *_: None)",
    "a trace": "sys.settrace(lambda *_: None)",
    "a trace of threads": "threading.settrace(lambda *_: None)",
    "a profile": "sys.setprofile(lambda *_: None)",
    "traced memory": "tracemalloc.start()",
    "switch interval": "sys.setswitchinterval(0.1)",
    "recursion": "sys.setrecursionlimit(500)",
    "time-out of sockets": "socket.setdefaulttimeout(0.01)",
    "stack of threads": "threading.stack_size(1 << 20)",
    "a replaced clock": "clock = time.perf_counter; time.perf_counter = lambda: clock() * 2",
    "warnings as errors": "warnings.simplefilter('error')",
    "level of logging": "logging.getLogger().setLevel(logging.DEBUG)",
    "a handler of logging": "logging.getLogger().addHandler(logging.NullHandler())",
    "no logging": "logging.disable(logging.CRITICAL)",
    "precision of decimals": "decimal.setcontext(decimal.Context(prec=5))",
    "errors of numpy": "numpy.seterr(all='raise')",
    "search path": "sys.path.insert(0, '/left')",
    "threads of OpenBLAS": "openblas('set')(1 + openblas('get')())",
    "start method": "multiprocessing.set_start_method('spawn')",
    "time zone": "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
    "a plain environment": "os.environ = {'LEFT': '1'}",
    "an import hook": "sys.meta_path.insert(0, type('Hook', (), {'find_spec': lambda *_: None})())",
    "a path hook": "sys.path_hooks.insert(0, type('Hook', (), {'__init__': lambda *_: 1 / 0}))",
    "no stacks": "faulthandler.unregister(signal.SIGUSR2)",
    "handlers of faults": "faulthandler.enable()",
    "a signal ignored in C": "libc.signal(int(signal.SIGHUP), ctypes.c_void_p(1))",
    "a timer of POSIX": "assert libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0",
    # A jump to itself, as machine code.
    "a busy native thread": "sys.left = mmap.mmap(-1, 4096, prot=7)\n"
    "sys.left[:4] = b'\\xeb\\xfe\\0\\0' if os.uname().machine == 'x86_64' else b'\\0\\0\\0\\x14'\n"
    "code = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(sys.left)))\n"
    "assert libc.pthread_create(ctypes.byref(ctypes.c_void_p()), None, code, None) == 0",
    "a closed stream": "sys.stdout.close()",
}

IMPORTS = """
import ctypes, decimal, faulthandler, gc, locale, logging, mmap, multiprocessing
import numpy, os, pathlib, resource, signal, socket, subprocess, sys, tempfile
import threading, time, tracemalloc, warnings
libc, libm = ctypes.CDLL(None), ctypes.CDLL("libm.so.6")
def prctl(*args): assert libc.prctl(*args) == 0, args
def openblas(verb):
    (path,) = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    return getattr(ctypes.CDLL(path), f"scipy_openblas_{verb}_num_threads64_")
def lower(limit, soft): resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
"""


def change(names: list[str]) -> str:
    """Return code that makes these changes, in their order."""
    lines = [IMPORTS, *(["import torch, torch.utils.deterministic"] if {*names} & {*TORCH} else [])]
    return "\n".join([*lines, *({**TORCH, **PROCESS}[name] for name in names)])


def look() -> dict[str, Any]:
    """Return what the next test would find, read in other ways than the package does."""
    import ctypes
    import decimal
    import gc
    import locale
    import logging
    import math
    import multiprocessing
    import os
    import pathlib
    import resource
    import signal
    import socket
    import subprocess
    import sys
    import threading
    import time
    import tracemalloc
    import warnings

    import numpy
    import psutil
    import torch

    found: dict[str, Any] = {}
    process = psutil.Process()
    # Before anything that opens files.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    found["enough descriptors"] = limit[0] - process.num_fds() > min(limit[0], 1000) // 2
    found["few descriptors"] = process.num_fds() < 50
    found["limits"] = {
        name: process.rlimit(getattr(psutil, name)) for name in dir(psutil) if "RLIMIT_" in name
    }
    found["scheduler"] = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, process.nice()
    found["cores"] = process.cpu_affinity()
    found["IO priority"] = process.ionice()
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    wanted = (
        "Umask",
        "SigBlk",
        "SigIgn",
        "VmLck",
        "THP",
        "Mems_allowed_list",
        "Uid",
        "NoNew",
        "Seccomp:",
        "SigCgt",
    )
    found["status"] = [line for line in status if line.startswith(wanted)]
    found["out-of-memory score"] = pathlib.Path("/proc/self/oom_score_adj").read_text()
    found["timer slack"] = pathlib.Path("/proc/self/timerslack_ns").read_text()
    maps = pathlib.Path("/proc/self/numa_maps")
    found["memory policy"] = maps.read_text().split()[1] if maps.exists() else None
    # Those that are not dumpable belong to root; a subreaper is a fact that only its orphans show.
    found["dumpable"] = os.access("/proc/self/mem", os.R_OK), _prctl(3)
    found["prctl"] = _prctl_written(2), _prctl_written(37)
    # Each rank has its own port and scratch directory.
    own = ("MASTER_PORT", "LLENERGY_")
    found["environment"] = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    lines = subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout.splitlines()
    found["environment of C"] = sorted(line for line in lines if not line.startswith(own))
    found["type of the environment"] = type(os.environ).__name__
    found["time zone"] = time.tzname, time.timezone
    found["start method"] = multiprocessing.get_start_method(allow_none=True)
    found["hooks"] = sorted(type(finder).__name__ for finder in sys.meta_path), len(sys.path_hooks)
    found["timers of POSIX"] = pathlib.Path("/proc/self/timers").read_text()
    begin = time.process_time()
    time.sleep(0.05)
    found["busy"] = time.process_time() - begin > 0.02
    (openblas,) = {
        line.split()[-1]
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if "openblas" in line
    }
    found["OpenBLAS"] = ctypes.CDLL(openblas).scipy_openblas_get_num_threads64_()
    found["directory"] = os.getcwd()  # noqa: PTH109
    found["locale"] = locale.setlocale(locale.LC_ALL), locale.localeconv()["decimal_point"]
    ones = numpy.ones(3)
    found["floats"] = (
        ((ones * sys.float_info.min) / 2)[0],
        (ones + 1e-20)[0],
        (ones - 1e-20)[0],
        math.exp(1.1),
    )
    found["floats of torch"] = (torch.full((3,), 1e-38, device="cpu", dtype=torch.float32) / 10).tolist()
    found["signals"] = [str(signal.getsignal(number)) for number in (1, 2, 10, 14, 15, 17)]
    found["timers"] = [signal.getitimer(number)[0] > 0 for number in range(3)]
    found["threads"] = [thread.name for thread in threading.enumerate()]
    found["processes"] = [child.name() for child in process.children(recursive=True)]
    found["collector"] = gc.isenabled(), gc.get_threshold(), len(gc.callbacks)
    found["tracing"] = sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing(), threading.gettrace()
    found["interpreter"] = sys.getswitchinterval(), sys.getrecursionlimit(), sys.path[0]
    found["sockets and stacks"] = socket.getdefaulttimeout(), threading.stack_size()
    found["clock"] = time.perf_counter.__class__.__name__
    found["warnings"] = [each[0] for each in warnings.filters if each[1] is None and each[2] is Warning]
    root = logging.getLogger()
    found["logging"] = root.level, len(root.handlers), root.manager.disable
    found["decimal"] = decimal.getcontext().prec
    found["numpy"] = numpy.geterr()
    found["output"] = sys.stdout.closed
    profiled = torch._C._jit_set_profiling_mode(True)
    torch._C._jit_set_profiling_mode(profiled)
    strategy = torch.jit.set_fusion_strategy([("STATIC", 1)])
    torch.jit.set_fusion_strategy(strategy)
    found["TorchScript"] = profiled, strategy, torch.jit._state._enabled.enabled
    backends, c = torch.backends, torch._C
    found["torch"] = {
        name: str(value)
        for name, value in {
            "cudnn": [backends.cudnn.allow_tf32, backends.cudnn.benchmark, backends.cudnn.deterministic],
            "cudnn enabled": backends.cudnn.enabled,
            "matmul": [
                backends.cuda.matmul.allow_tf32,
                backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
                backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
                backends.cuda.matmul.allow_fp16_accumulation,
            ],
            "precision": torch.get_float32_matmul_precision(),
            "mkldnn": [backends.mkldnn.enabled, backends.mkldnn.deterministic],
            "mkldnn precision": backends.mkldnn.matmul.fp32_precision,
            "attention": [
                backends.cuda.flash_sdp_enabled(),
                backends.cuda.math_sdp_enabled(),
                backends.cuda.mem_efficient_sdp_enabled(),
                backends.cuda.cudnn_sdp_enabled(),
                backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
                c._get_sdp_priority_order(),
            ],
            "mha": backends.mha.get_fastpath_enabled(),
            "opt_einsum": [backends.opt_einsum.enabled, backends.opt_einsum.strategy],
            "quantized": backends.quantized.engine,
            "nnpack": c._get_nnpack_enabled(),
            "defaults": [torch.get_default_dtype(), torch.get_default_device(), torch.empty(1).device],
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "determinism": torch.get_deterministic_debug_mode(),
            "filled memory": torch.utils.deterministic.fill_uninitialized_memory,
            "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
            "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")],
            "autocast dtypes": [torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")],
            "autocast cache": torch.is_autocast_cache_enabled(),
            "autograd": [torch.is_anomaly_enabled(), c._is_multithreading_enabled()],
            "sparse": torch.sparse.check_sparse_tensor_invariants.is_enabled(),
            "hooks": len(torch.nn.modules.module._global_forward_hooks),
            "modes": [c._len_torch_function_stack(), c._len_torch_dispatch_stack()],
            "saved": c._autograd._top_saved_tensors_default_hooks(False),
            "functions": [
                torch.nn.functional.scaled_dot_product_attention.__class__.__name__,
                torch.nn.Module.__call__.__name__,
            ],
            "operators": torch.mm(torch.ones(2, 2), torch.ones(2, 2)),
            "profiler": torch.autograd._profiler_enabled(),
            "TorchScript": [
                c._jit_texpr_fuser_enabled(),
            ],
            "printed": torch.ones(1) / 3,
            "parameters": torch.__future__.get_swap_module_params_on_conversion(),
            "checkpoints": torch.utils.checkpoint._checkpoint_debug_enabled,
            "compiler": [
                _stance(),
                getattr(sys.modules.get("torch._dynamo.backends.registry"), "_default_backend", "inductor"),
                getattr(sys.modules.get("torch._dynamo.config"), "suppress_errors", False),
                getattr(
                    getattr(sys.modules.get("torch._inductor.config"), "triton", None),
                    "unique_kernel_names",
                    True,
                ),
                _donated_buffer(),
            ],
        }.items()
    }
    return found


def _prctl(number: int) -> int:
    import ctypes

    return int(ctypes.CDLL(None).prctl(number, 0, 0, 0, 0))


def _prctl_written(number: int) -> int:
    import ctypes

    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(number, ctypes.byref(value), 0, 0, 0)
    return value.value


def _stance() -> object:
    import sys

    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "default")


def _donated_buffer() -> object:
    import sys

    # The default depends on the version.
    config = sys.modules.get("torch._functorch.config")
    return config is not None and config.donated_buffer != config._config["donated_buffer"].default
