# SPDX-License-Identifier: Apache-2.0
"""Reports as a run writes them, made up: known energy of each round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

#: A spread of about 0.2 % between rounds.
SPREAD = (1, 1.002, 0.997, 1.001, 0.998, 1.002, 0.999, 1.001, 0.998, 1.0, 1.003, 0.999)

METER = {
    "name": "nvml",
    "domain": "gpu:GPU-a",
    "kind": "measured",
    "source": "counter",
    "scope": "board",
    "update_period_s": 0.1,
    "resolution_j": 0.001,
    "accuracy": "within 10 %",
}
BOARD = {"uuid": "GPU-a", "name": "NVIDIA H100", "pci_bus_id": "0000:17:00.0", "memory_bytes": 85899345920}
HOST = {
    "name": "bench-7",
    "system": "Linux 6.8",
    "machine": "x86_64",
    "cpu_model": "AMD EPYC 9354",
    "logical_cpus": 64,
    "memory_bytes": 274877906944,
    "load_average": 0.1,
}
BACKEND = {"name": "transformers", "version": "5.0", "model": "m", "dtype": "float32", "task": "generate"}


def record(joules: Sequence[float], tokens: int = 100, **changes: Any) -> dict[str, Any]:
    """Return a measured record whose rounds took this energy, two seconds and so many output tokens each."""
    rounds = [
        {
            "start_s": 100.0 + 3 * place,
            "duration_s": 2.0,
            "energy_j": each,
            "energy_u_j": 1e-4 * each,
            "energy_u_absolute_j": 0.1 * each,
            "tokens": {"input": 30, "output": tokens},
            "requests": 2,
            "by_domain": {
                "gpu:GPU-a": {"energy_j": each, "energy_u_j": 1e-4 * each, "kind": "measured"},
            },
        }
        for place, each in enumerate(joules)
    ]
    middle = median(joules)
    units = {
        "energy_j": (middle, "J"),
        "energy_per_output_token_j": (middle / tokens, "J/token"),
        "mean_power_w": (middle / 2, "W"),
        "duration_s": (2.0, "s"),
        "output_tokens_per_s": (tokens / 2, "token/s"),
    }
    metrics = {
        name: {
            "value": value,
            "unit": unit,
            "uncertainty": 1e-3 * value,
            "uncertainty_absolute": 0.1 * value,
            "n": len(rounds),
        }
        for name, (value, unit) in units.items()
    }
    return {
        "attempt": 1,
        "status": "measured",
        "backend": BACKEND,
        "devices": ["GPU-a"],
        "boards": [BOARD],
        "meters": [METER],
        "source_digest": "abc",
        "rounds": rounds,
        "metrics": metrics,
        **changes,
    }


def at(joules: float, rounds: int = 12, **changes: Any) -> dict[str, Any]:
    """Return a record whose rounds take about so many joules."""
    return record([joules * each for each in SPREAD[:rounds]], **changes)


def write_report(path: Path, records: Mapping[str, dict[str, Any]], **run: Any) -> Path:
    """Write a report of these tests."""
    report = {
        "schema_version": 1,
        "tool": {"name": "pytest-llenergy", "version": "0.1.0"},
        "run": {
            "id": path.stem,
            "started_at": "2026-01-02T03:04:05Z",
            "finished_at": "2026-01-02T03:14:05Z",
            "complete": True,
            "argv": [],
            "exit_status": 0,
            **run,
        },
        "source": {"commit": "0" * 39 + path.stem[0], "branch": "main", "dirty": False},
        "environment": {
            "key": "k",
            "host": HOST,
            "gpus": [BOARD],
            "driver": "580.1",
            "python": "3.11.7",
            "packages": {"torch": "2.9"},
        },
        "records": [{"id": f"bench/test_m.py::{name}", **each} for name, each in records.items()],
    }
    path.write_text(json.dumps(report))
    return path
