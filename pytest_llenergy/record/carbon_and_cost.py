# SPDX-License-Identifier: Apache-2.0
"""Grams of CO2e and money, from joules and the rates of ``--energy-carbon`` and ``--energy-price``.

Both are an energy times a constant, with the same relative uncertainties. They say nothing that the energy
does not say, so no comparison or gate uses them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pytest_llenergy.record.record import Metric, Record

#: Joules in a kilowatt-hour.
KWH_J = 3.6e6

#: Unit of carbon metrics: the mass of carbon dioxide with the same effect on the climate.
GRAMS = "gCO2e"

#: Tokens to which prices and emissions of models usually refer.
MANY_TOKENS, PER_MANY_TOKENS = 1e6, "/Mtoken"

#: Each metric, with the energy from which it follows, and how often it counts that energy.
CARBON = {
    "carbon_g": ("energy_j", 1.0),
    "carbon_per_million_output_tokens_g": ("energy_per_output_token_j", MANY_TOKENS),
}
COST = {
    "cost": ("energy_j", 1.0),
    "cost_per_million_output_tokens": ("energy_per_output_token_j", MANY_TOKENS),
}

#: All metrics of this module.
DERIVED = {**CARBON, **COST}

#: A price: a number without a sign, and perhaps the currency before or after it.
CURRENCY = r"[^\s\d.,+/-]*"
PRICE = re.compile(
    rf"(?P<before>{CURRENCY})\s*(?P<amount>\d+\.?\d*|\.\d+)\s*(?P<after>{CURRENCY})(?:\s*/\s*kWh)?"
)


@dataclass(frozen=True)
class Price:
    """Price of a kilowatt-hour. ``currency`` is empty if it was not given."""

    amount: float
    currency: str = ""


@dataclass(frozen=True)
class Rates:
    """What a kilowatt-hour emits (grams of CO2e) and costs; ``None`` leaves the metrics out."""

    carbon: float | None = None
    price: Price | None = None

    def derive(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return metrics together with those that follow from their energies.

        A metric per token is left out if the work makes no output tokens. An energy without a value passes on
        its reason.
        """
        derived = dict(metrics)
        if self.carbon is not None:
            source = f"{self.carbon:g} {GRAMS}/kWh (--energy-carbon)"
            derived |= _scaled(CARBON, metrics, self.carbon / KWH_J, GRAMS, source)
        if self.price is not None:
            price = f"{self.price.amount:g} {self.price.currency}".rstrip()
            source = f"{price}/kWh (--energy-price)"
            derived |= _scaled(COST, metrics, self.price.amount / KWH_J, self.price.currency, source)
        return derived

    def add_to(self, record: Record) -> Record:
        """Return a record with the metrics that follow from its energies."""
        return msgspec.structs.replace(record, metrics=self.derive(record.metrics))


def _scaled(
    names: Mapping[str, tuple[str, float]],
    metrics: Mapping[str, Metric],
    per_joule: float,
    unit: str,
    source: str,
) -> dict[str, Metric]:
    found = {}
    for name, (energy, count) in names.items():
        metric = metrics.get(energy)
        if metric is not None and (count == 1.0 or metric.value is not None):
            per = "" if count == 1.0 else PER_MANY_TOKENS
            found[name] = scale_metric(metric, per_joule * count, f"{unit}{per}", source)
    return found


def scale_metric(metric: Metric, factor: float, unit: str, source: str | None) -> Metric:
    """Return a metric times an exact factor, with the same relative uncertainties."""
    numbers = {
        name: None if value is None else value * factor
        for name in ("value", "uncertainty", "spread", "uncertainty_absolute")
        for value in (getattr(metric, name),)
    }
    return msgspec.structs.replace(metric, unit=unit, source=source, **numbers)


def rescale(before: Mapping[str, Metric], after: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of this module for other energies, at the rates of ``before``."""
    found = {}
    for name, (energy, _) in DERIVED.items():
        old, energy_before = before.get(name), before.get(energy)
        if old is None or old.value is None or energy_before is None or not energy_before.value:
            continue
        found[name] = scale_metric(after[energy], old.value / energy_before.value, old.unit, old.source)
    return found


def parse_carbon(text: str) -> float:
    """Parse ``--energy-carbon``. Raises ``ValueError`` for anything but a number from 0."""
    try:
        grams = float(text)
    except ValueError:
        grams = -1.0
    if not 0 <= grams < math.inf:
        raise ValueError("needs the grams of CO2e of a kilowatt-hour, 0 or more, such as 400")
    return grams


def parse_price(text: str) -> Price:
    """Parse ``--energy-price``: ``0.30``, ``0.30 EUR``, ``$0.12`` or ``0.30 EUR/kWh``.

    Raises:
        ValueError: It is no such price.
    """
    match = PRICE.fullmatch(text.strip())
    amount = math.inf if match is None else float(match["amount"])
    if match is None or (match["before"] and match["after"]) or not text.isprintable() or amount == math.inf:
        raise ValueError("needs the price of a kilowatt-hour, such as 0.30 or '0.30 EUR'")
    return Price(amount, match["before"] or match["after"])
