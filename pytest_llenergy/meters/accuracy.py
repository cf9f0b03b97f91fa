# SPDX-License-Identifier: Apache-2.0
"""Accuracy of meters that the user names: as the user states it, or not known."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_llenergy.meters.protocol import Limits, within
from pytest_llenergy.model.record import Flag

STATED = re.compile(r"^(?P<rest>.*)@(?P<percent>\d+(\.\d+)?)%$", re.DOTALL)


@dataclass(frozen=True)
class Accuracy:
    """For a ``Domain``: words, limits and flags."""

    words: str
    limits: Limits
    flags: tuple[Flag, ...] = ()


def unknown(source: str) -> Accuracy:
    """Nobody said how accurate a source is: the limits hold none of its error, and a flag says so."""
    detail = f"{source} does not say how accurate it is: limits and uncertainties leave its error out"
    return Accuracy(
        "not known", within(0.0), (Flag(name="accuracy-unknown", severity="note", detail=detail),)
    )


def split_accuracy(argument: str, source: str) -> tuple[str, Accuracy]:
    """``NAME@2%`` is ``NAME``, right to 2 % of its reading. Without it the accuracy is not known."""
    match = STATED.match(argument)
    if match is None:
        return argument, unknown(source)
    percent = float(match["percent"])
    words = f"within {percent:g}% of the reading, as stated by the user"
    return match["rest"], Accuracy(words, within(percent / 100))
