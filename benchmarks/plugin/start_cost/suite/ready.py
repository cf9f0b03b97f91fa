# SPDX-License-Identifier: Apache-2.0
"""A rank of torchrun: say when all have imported what they need and met."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch.distributed as dist

for name in sys.argv[1:]:
    import_module(name)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
dist.destroy_process_group()
