# SPDX-License-Identifier: Apache-2.0
"""Texts of modules named ``torch`` that stand before the real one on the path, each with one fault."""

from __future__ import annotations

#: Becomes the real torch, which what follows may spoil.
REAL = """
import os, signal, sys
from pathlib import Path
sys.path.remove(str(Path(__file__).parent))
del sys.modules["torch"]
import torch

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGILL)
"""

#: The real torch as if it were a build with CUDA that sees one board; what runs there runs on the CPU.
#: The arithmetic is real, the board is not: nothing is learned here of a real one.
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

def here(tensor, place):
    return tensor

def known(backend, **kwargs):
    assert backend in ("nccl", "gloo")
    return real_init("gloo", **kwargs)

torch.version.cuda = "12.8"
torch.ones = without_board(torch.ones)
torch.Tensor.to = here
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda index: None
uuid = os.environ["CUDA_VISIBLE_DEVICES"].partition("-")[2]
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=uuid)
torch.cuda.nccl.version = lambda: (2, 27, 5)
torch.backends.cudnn.is_available = lambda: True
torch.backends.cudnn.version = lambda: 91002
real_init, dist.init_process_group = dist.init_process_group, known
dist.is_nccl_available = lambda: True
"""
)

#: No torch at all, and quick. What it starts has a session of its own.
HANGS = """
import os, subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
