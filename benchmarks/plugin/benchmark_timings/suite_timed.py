# SPDX-License-Identifier: Apache-2.0
"""Workloads from nanoseconds to tens of milliseconds. ``pytest benchmarks`` ignores this file's name."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

NUMBERS = list(range(1000))
TEXT = json.dumps([{"id": number, "name": str(number)} for number in range(200)])


def spin(count: int) -> int:
    """Run a loop in the interpreter."""
    total = 0
    for number in range(count):
        total += number & 7
    return total


def test_nanoseconds(benchmark: Any) -> None:
    benchmark(int)


def test_microseconds(benchmark: Any) -> None:
    benchmark(sorted, NUMBERS)


def test_hundred_microseconds(benchmark: Any) -> None:
    benchmark(json.loads, TEXT)


def test_milliseconds(benchmark: Any) -> None:
    benchmark(spin, 100_000)


def test_tens_of_milliseconds(benchmark: Any) -> None:
    benchmark(spin, 1_000_000)


def test_without_the_interpreters_lock(benchmark: Any) -> None:
    benchmark(lambda: hashlib.sha256(bytes(4_000_000)).digest())


def test_asleep(benchmark: Any) -> None:
    benchmark(time.sleep, 0.005)


def test_pedantic_one_call_a_round(benchmark: Any) -> None:
    benchmark.pedantic(sorted, args=(NUMBERS,), rounds=20_000)


def test_pedantic_with_set_up(benchmark: Any) -> None:
    benchmark.pedantic(spin, setup=lambda: ((50_000,), {}), rounds=300)
