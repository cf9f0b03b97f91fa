# SPDX-License-Identifier: Apache-2.0
"""Numbers with units for people: joules and grams in SI steps, values with their uncertainty.

Records, reports and every other JSON have plain joules, grams and seconds.
"""

from __future__ import annotations

import math

#: Units that are shown in steps, also before ``/token`` and the like.
STEPPED_UNITS = ("J", "g", "gCO2e")

#: Powers of ten of the steps. Those below µJ are needed for joules per operation.
STEPS = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k"}

#: A value that needs more decimal places is written with a power of ten.
MAX_DECIMAL_PLACES = 5


#: A window or phase whose standard uncertainty is above this share of its energy has no result.
RESOLVABLE = 1 / 3

#: The unit of numbers without one, which is not shown.
UNITLESS = "1"


def format_number(value: float, digits: int = 3) -> str:
    """Format a value with so many digits, or as an integer of more: ``0.0123``, ``1234``."""
    return f"{value:.0f}" if 10**digits - 0.5 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def format_with_uncertainty(value: float, u: float | None) -> str:
    """Format a value and its standard uncertainty, to the second significant digit of the latter.

    To the first where the value would have more than four digits.
    """
    if u is None or not 0 < u < math.inf:
        return format_number(value)
    places = max(0, 1 - math.floor(math.log10(u)))
    if places and value and places + math.floor(math.log10(abs(value))) >= 4:
        places -= 1
    if places > MAX_DECIMAL_PLACES:
        power = math.floor(math.log10(max(abs(value), u)))
        places = max(0, places + power)
        return f"({value / 10**power:.{places}f} ± {u / 10**power:.{places}f})e{power}"
    return f"{value:.{places}f} ± {u:.{places}f}"


def format_quantity(value: float, u: float | None, unit: str) -> str:
    """Format a value with its uncertainty and unit: ``12.5 ± 0.3 mJ/token``, ``0.28 s``."""
    return format_scaled(value, u, unit, scale_of(unit, value, u or 0.0))


def format_scaled(value: float, u: float | None, unit: str, scale: tuple[int, str]) -> str:
    """Format a value as ``format_quantity`` does, in a step that ``scale_of`` gave for it or for others."""
    power, prefix = scale
    scaled_u = None if u is None else u / 10**power
    return f"{format_with_uncertainty(value / 10**power, scaled_u)} {prefix}{shown_unit(unit)}".rstrip()


def format_energy(joules: float) -> str:
    """Format joules without an uncertainty, such as ``4.1 J`` or ``230 mJ``."""
    return format_quantity(joules, None, "J")


def format_pair(base: float | None, head: float | None, unit: str) -> tuple[str, str]:
    """Format two values in one step, with four digits and the unit after the second; ``-`` if missing."""
    power, prefix = scale_of(unit, *(value for value in (base, head) if value is not None))
    texts = ["-" if value is None else format_number(value / 10**power, 4) for value in (base, head)]
    return texts[0], texts[1] if head is None else f"{texts[1]} {prefix}{shown_unit(unit)}".rstrip()


def shown_unit(unit: str) -> str:
    """Return the unit as shown after a number: nothing for numbers without one."""
    return "" if unit == UNITLESS else unit


def scale_of(unit: str, *values: float) -> tuple[int, str]:
    """Return the power of ten and the prefix in which to show values; other units keep theirs."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if unit.partition("/")[0] not in STEPPED_UNITS or not largest:
        return 0, ""
    # Rounded first: 999.96 mJ with three digits is 1 J.
    power = math.floor(math.log10(float(f"{largest:.3g}")) / 3 + 1e-9) * 3
    power = min(max(power, min(STEPS)), max(STEPS))
    return power, STEPS[power]
