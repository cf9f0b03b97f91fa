# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: model, usable CPUs, load."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from pytest_llenergy.record.environment import Host


def describe_host() -> Host:
    """Describe this machine."""
    import psutil

    return Host(
        name=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu_model=_cpu_model(),
        logical_cpus=len(usable_cpus()),
        memory_bytes=psutil.virtual_memory().total,
        load_average=load_average(),
    )


def usable_cpus() -> tuple[int, ...]:
    """Return the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def load_average() -> float | None:
    """Return the average load of the last minute; None if the system does not report it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or "unknown"
