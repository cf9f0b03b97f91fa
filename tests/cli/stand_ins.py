# SPDX-License-Identifier: Apache-2.0
"""Sources of modules that shadow ``torch`` on the path, each with one fault."""

from __future__ import annotations

#: Turns into the real torch, which the code appended to it may break.
REAL = """
import os, signal, sys
from pathlib import Path
sys.path.remove(str(Path(__file__).parent))
del sys.modules["torch"]
import torch

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGILL)
"""

#: The real torch posing as a CUDA build that sees one board; its work runs on the CPU.
#: The arithmetic is real, the board is not, so this proves nothing about real boards.
CUDA = (
    REAL
    + """
from types import SimpleNamespace
dist = torch.distributed

def without_board(function):
    def call(*args, **kwargs):
        kwargs.pop("device", None)
        return function(*(each for each in args if each != "cuda"), **kwargs)
    return call

def to_cpu(tensor, place):
    return tensor

def init_with_gloo(backend, **kwargs):
    assert backend in ("nccl", "gloo")
    return real_init("gloo", **kwargs)

torch.version.cuda = "12.8"
torch.ones = without_board(torch.ones)
torch.Tensor.to = to_cpu
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda index: None
uuid = os.environ["CUDA_VISIBLE_DEVICES"].partition("-")[2]
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=uuid)
torch.cuda.nccl.version = lambda: (2, 27, 5)
torch.backends.cudnn.is_available = lambda: True
torch.backends.cudnn.version = lambda: 91002
real_init, dist.init_process_group = dist.init_process_group, init_with_gloo
dist.is_nccl_available = lambda: True
"""
)

#: Not torch: starts a child process in a new session and hangs.
HANGS = """
import os, subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
