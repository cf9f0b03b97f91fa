# SPDX-License-Identifier: Apache-2.0
"""Let a CPU build of torch show the GPUs in ``CUDA_VISIBLE_DEVICES``, and talk gloo instead of NCCL.

Python imports this module when it starts with this directory on its path, as it does in ranks.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any


def visible() -> list[str]:
    return [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]


def patch(torch: Any) -> None:
    """Replace what the plugin asks of CUDA."""
    cuda, distributed, zeros = torch.cuda, torch.distributed, torch.zeros
    join = distributed.init_process_group
    cuda.device_count = lambda: len(visible())
    cuda.set_device = lambda device: None
    cuda.get_device_properties = lambda index: SimpleNamespace(uuid=visible()[index].removeprefix("GPU-"))
    torch.zeros = lambda *size, device=None, **options: zeros(
        *size, device="cpu" if device == "cuda" else device, **options
    )
    distributed.init_process_group = lambda backend=None, **options: join("gloo", **options)


class Finder(MetaPathFinder):
    """Finds torch as usual, and patches it after its import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
