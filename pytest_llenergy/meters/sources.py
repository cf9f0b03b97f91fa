# SPDX-License-Identifier: Apache-2.0
"""What an NVIDIA board can be asked for: found by asking, as neither architecture nor product name tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_llenergy.devices.nvml import BoardHandle, Quantity, Session
from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.sensors import SLOWEST_REFRESH_S, averaging_s

#: Counters, the best first. Grace Hopper has none for the GPU by itself: there the whole module counts.
COUNTERS = (
    Quantity("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", field=(83, 0)),
    Quantity("NVML_FI_DEV_ENERGY", field=(191, 0)),
    Quantity("nvmlDeviceGetTotalEnergyConsumption"),
    Quantity("NVML_FI_DEV_ENERGY", "module", field=(191, 1)),
)

POWER_USAGE = Quantity("nvmlDeviceGetPowerUsage")

#: Power readings, the best first: what is drawn now, then what may be an average.
POWERS = (
    Quantity("NVML_FI_DEV_POWER_INSTANT", field=(186, 0)),
    Quantity("NVML_FI_DEV_POWER_INSTANT", "module", field=(186, 1)),
    POWER_USAGE,
)


class Sources(NamedTuple):
    """The counter of a board, the power to hold it against, and the power to fall back on.

    ``averaging_s`` is the span in seconds over which ``nvmlDeviceGetPowerUsage`` averages on this board.
    ``limit_w`` is its enforced power limit, ``None`` where the driver does not tell.
    """

    board: BoardHandle
    counter: Quantity | None
    cross_check: Quantity | None
    power: Quantity | None
    averaging_s: float
    limit_w: float | None

    @property
    def watched(self) -> Quantity | None:
        """The power that the self-check polls, beside the counter if there is one."""
        return self.cross_check if self.counter is not None else self.power

    @property
    def polled(self) -> list[Quantity]:
        """What the self-check reads."""
        return [quantity for quantity in (self.counter, self.watched) if quantity is not None]

    def smear_s(self, power: Quantity | None) -> float:
        """Seconds that a change of power takes to be over in a power reading."""
        return self.averaging_s if power == POWER_USAGE else 0.0

    @property
    def power_age_s(self) -> float:
        """How late, in seconds, the watched power may tell what was drawn."""
        return max(SLOWEST_REFRESH_S, self.smear_s(self.watched))


def find_sources(session: Session, board: BoardHandle) -> Sources:
    """Ask a board for everything it may have. Raises ``MeterError`` with every answer if it has nothing."""
    answers: dict[str, str] = {}
    counters = _answering(session, board, COUNTERS, answers)
    powers = _answering(session, board, POWERS, answers)
    if not counters and not powers:
        said = "; ".join(f"{label}: {answer}" for label, answer in answers.items())
        raise MeterError(f"nvml: {board.uuid} ({board.name}) tells neither energy nor power ({said})")
    counter = counters[0] if counters else None
    limit = _optional(session, board, "nvmlDeviceGetEnforcedPowerLimit")
    architecture = _optional(session, board, "nvmlDeviceGetArchitecture")
    return Sources(
        board=board,
        counter=counter,
        cross_check=next((power for power in powers if counter and power.scope == counter.scope), None),
        power=powers[0] if powers else None,
        averaging_s=averaging_s(board.name, architecture),
        limit_w=None if limit is None else limit / 1000,
    )


def _answering(
    session: Session, board: BoardHandle, quantities: Sequence[Quantity], answers: dict[str, str]
) -> list[Quantity]:
    """Those that have a value. Each is asked by itself: one refusal must not pass for that of others."""
    found = []
    for quantity in quantities:
        (value,) = session.read(board.handle, (quantity,))
        if isinstance(value, str):
            answers[quantity.label] = value
        else:
            found.append(quantity)
    return found


def _optional(session: Session, board: BoardHandle, function: str) -> int | None:
    try:
        return int(getattr(session.module, function)(board.handle))
    except session.module.NVMLError:
        return None
