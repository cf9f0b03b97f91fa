# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation: executed operations per second over the peak of the devices.

Peaks are those that NVIDIA states for dense matrices: data sheets print twice as much where they count zeros
of structured sparsity. ``float32`` is the peak without tensor cores, which torch uses by default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from pytest_llenergy.record.environment import Board
from pytest_llenergy.record.record import Metric

#: Unit of the option: a number with a prefix, such as ``989T``.
PREFIXES = {"": 1.0, "G": 1e9, "T": 1e12, "P": 1e15}

#: What to do about an unknown peak.
GIVE = "--energy-peak-flops gives it"

HALF = ("bfloat16", "float16")

#: Peak of a board in TFLOP/s as 16-bit floats and ``float32``, by the beginning of its name in NVML without
#: ``NVIDIA``. The longest that fits counts. Sources: NVIDIA's data sheets of the H200 (2024), H100 (2023),
#: A100 (2021), L40S (2023), L40 (2022), L4 (2023), A40, A30 and A10 (2021), V100 (2020) and T4 (2019).
BOARD_TFLOPS: Mapping[str, tuple[float, float]] = {
    "H200 NVL": (835.5, 60.0),
    "H200": (989.5, 67.0),
    "H100 NVL": (835.5, 60.0),
    "H100 PCIe": (756.5, 51.0),
    "H100 80GB HBM3": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
}

#: The same for boards without bfloat16.
BOARD_TFLOPS_WITHOUT_BFLOAT16: Mapping[str, tuple[float, float]] = {
    "Tesla V100-SXM2": (125.0, 15.7),
    "Tesla V100-PCIE": (112.0, 14.0),
    "Tesla T4": (65.0, 8.1),
}


def parse_peak(text: str) -> float:
    """Parse ``--energy-peak-flops``: ``989T``, ``989 TFLOP/s`` or ``9.89e14`` FLOP/s of one device.

    Raises:
        ValueError: It is no such number.
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([GTP]?)(?:FLOP/?S)?\s*", text.strip(), re.IGNORECASE)
    try:
        value = float(match[1]) * PREFIXES[match[2].upper()] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("needs the peak of one device in FLOP/s, such as 989T")
    return value


def peak_flops(boards: Sequence[Board], dtype: str | None) -> tuple[float | None, str]:
    """Return the peak of boards together (FLOP/s) and its source; None with the reason if it is unknown.

    Args:
        boards: The leased boards.
        dtype: Data type of the computation, by its name in torch.
    """
    if not boards:
        return None, f"the peak of this CPU is unknown; {GIVE}"
    total = 0.0
    for board in boards:
        name = board.name.removeprefix("NVIDIA ")
        peak = _board_peak(name, dtype)
        if board.uuid.startswith("MIG-") or peak is None:
            what = "a MIG instance" if board.uuid.startswith("MIG-") else board.name
            return None, f"the peak of {what} with {dtype or 'an unknown dtype'} is unknown; {GIVE}"
        total += peak
    return total, f"{total / 1e12:g} TFLOP/s, {dtype}, dense (data sheet)"


def _board_peak(name: str, dtype: str | None) -> float | None:
    for table, half in ((BOARD_TFLOPS, HALF), (BOARD_TFLOPS_WITHOUT_BFLOAT16, ("float16",))):
        known = max(
            (each for each in table if re.match(rf"{re.escape(each)}\b", name)), key=len, default=None
        )
        if known is not None:
            of_half, of_single = table[known]
            return 1e12 * of_half if dtype in half else 1e12 * of_single if dtype == "float32" else None
    return None


def utilization(
    flops: Metric, duration: Metric, devices: int, given: float | None, known: tuple[float | None, str]
) -> Metric:
    """Return the executed operations per second over the peak, with the relative uncertainty of the duration.

    Args:
        flops: Operations of an iteration.
        duration: Duration of an iteration (seconds).
        devices: Number of devices.
        given: Peak of one device that the user gave (FLOP/s).
        known: What ``peak_flops`` returns.
    """
    peak, source = (given * devices, f"{given:g} FLOP/s a device (--energy-peak-flops)") if given else known
    if not flops.value or not duration.value or peak is None:
        reason = flops.reason or duration.reason or source
        return Metric(value=None, unit="1", reason=reason)
    value = flops.value / duration.value / peak
    scale = value / duration.value
    numbers = {
        name: None if number is None else number * scale
        for name in ("uncertainty", "spread", "uncertainty_absolute")
        for number in (getattr(duration, name),)
    }
    return msgspec.structs.replace(duration, value=value, unit="1", source=source, **numbers)
