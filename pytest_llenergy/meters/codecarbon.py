# SPDX-License-Identifier: Apache-2.0
"""CodeCarbon's CPU model, for comparison (extra ``codecarbon``).

    P = TDP · (0.1 + 0.9 · load³)

with the load of the whole host since the previous sample (CodeCarbon 3.3,
``codecarbon.external.hardware.CPU``, mode ``cpu_load``). The cube of a mean is not the mean of cubes, so
the result depends on how often it is sampled: once a second, as in CodeCarbon. The TDP is that of the most
similar name in CodeCarbon's table, or 4 W per thread.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.meters.base import Domain, MeterSpec, Targets, unknown_accuracy

SAMPLE_S = 1.0
JOULES_PER_KWH = 3.6e6
#: Share of TDP at no load.
IDLE_SHARE = 0.1


class CodeCarbonMeter:
    """All processors of the host as one domain."""

    name = "codecarbon"
    poll_period_s = SAMPLE_S

    def __init__(self) -> None:
        """Set up the model.

        Raises:
            MeterError: If CodeCarbon is missing or has no TDP for this CPU.
        """
        try:
            import codecarbon
            from codecarbon.core.cpu import TDP
            from codecarbon.external.hardware import CPU
        except ImportError:
            raise MeterError(
                "codecarbon: codecarbon is missing; pip install 'pytest-llenergy[codecarbon]'"
            ) from None
        tdp = TDP()
        if not tdp.tdp:
            raise MeterError(f"codecarbon: it knows no TDP for {tdp.model}")
        self._tdp_w = float(tdp.tdp)
        self._cpu: Any = CPU.from_utils(tempfile.gettempdir(), "cpu_load", tdp.model, tdp.tdp)
        self._cpu.start()
        self._sampled_s = time.monotonic()
        self._energy_j = 0.0
        accuracy = unknown_accuracy("CodeCarbon")
        self.domains: tuple[Domain] = (
            Domain(
                name="cpu:codecarbon",
                kind="estimated",
                source=f"CodeCarbon {codecarbon.__version__} CPU load model",
                scope="host processors",
                resolution_j=0.0,
                accuracy=f"none published; {IDLE_SHARE:.0%} to 100% of {self._tdp_w:g} W TDP ({tdp.model})",
                limits=self._limits,
                covers_others=True,
                update_period_s=SAMPLE_S,
                flags=accuracy.flags,
            ),
        )

    def _limits(self, _energy_j: float, duration_s: float) -> tuple[float, float]:
        """Return the lowest and the highest energy that the model can give."""
        return IDLE_SHARE * self._tdp_w * duration_s, self._tdp_w * duration_s

    def read(self) -> list[float | str]:
        now_s = time.monotonic()
        elapsed_s = now_s - self._sampled_s
        if elapsed_s >= SAMPLE_S:
            _, energy = self._cpu.measure_power_and_energy(last_duration=elapsed_s)
            self._energy_j += float(energy.kWh) * JOULES_PER_KWH
            self._sampled_s = now_s
        return [self._energy_j]

    def close(self) -> None:
        """Nothing is held open."""


def open_codecarbon(targets: Targets) -> list[CodeCarbonMeter]:
    """Open the model.

    Raises:
        MeterDoesNotApply: If the test uses GPUs, which the model does not cover.
    """
    if not targets.cpu:
        raise MeterDoesNotApply("codecarbon: models the CPU only, and the test uses GPUs")
    return [CodeCarbonMeter()]


SPEC = MeterSpec(name="codecarbon", kind="estimated", open=open_codecarbon, by_default=False)
