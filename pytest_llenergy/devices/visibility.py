# SPDX-License-Identifier: Apache-2.0
"""``CUDA_VISIBLE_DEVICES`` by CUDA's own rules: which of the host's GPUs this process may use.

Identity is the full UUID. ``NVIDIA_VISIBLE_DEVICES`` is never read: it speaks to the container runtime
and names host indices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from pytest_llenergy.errors import DeviceError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_uuids(environment: Mapping[str, str], present: Sequence[str]) -> tuple[str, ...]:
    """The UUIDs that CUDA would enumerate, in CUDA's order.

    ``present`` holds the UUIDs of all boards in PCI order. Follows the CUDA programming guide and torch's
    parser: an element that is negative, out of range, ambiguous or unknown ends the list; the form of the
    first element (ordinal or UUID) rules; a device named twice leaves none.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return tuple(present)
    elements = value.split(",")
    if elements[0].startswith("GPU-"):
        return _by_uuid([*takewhile(lambda element: element.startswith("GPU-"), elements)], present)
    return _by_ordinal([*takewhile(lambda index: index >= 0, map(_ordinal, elements))], present)


def _by_uuid(prefixes: Sequence[str], present: Sequence[str]) -> tuple[str, ...]:
    chosen: list[str] = []
    for prefix in prefixes:
        matches = [uuid for uuid in present if uuid.startswith(prefix)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    # A text repeated after the end of the list counts too.
    return () if _repeats(prefixes) or _repeats(chosen) else tuple(chosen)


def _by_ordinal(indices: Sequence[int], present: Sequence[str]) -> tuple[str, ...]:
    if _repeats(indices):
        return ()
    return tuple(present[index] for index in takewhile(lambda index: index < len(present), indices))


def _ordinal(element: str) -> int:
    # strtoul semantics: leading blanks and trailing text are ignored.
    number = re.match(r"\s*([+-]?\d+)", element)
    return int(number.group(1)) if number else -1


def _repeats(values: Sequence[object]) -> bool:
    return len(set(values)) != len(values)


def why_hidden(environment: Mapping[str, str], present: int) -> str:
    """The reason that a user reads when the environment hides GPUs that the driver shows."""
    return (
        f"the environment sets {VARIABLE}={environment.get(VARIABLE)!r}, which allows no GPU; the driver "
        f"shows {present}; --energy-gpus=all overrides it on purpose"
    )


def choose(selection: str, present: Sequence[str]) -> tuple[str, ...]:
    """The UUIDs that ``--energy-gpus`` names: ``all``, indices in PCI order, or UUIDs.

    Raises ``DeviceError`` naming the element that fits no board.
    """
    if selection == "all":
        return tuple(present)
    chosen: list[str] = []
    for element in (part.strip() for part in selection.split(",")):
        if element.isdecimal() and int(element) < len(present):
            chosen.append(present[int(element)])
            continue
        matches = [uuid for uuid in present if element and uuid.startswith(element)]
        if len(matches) != 1 or element.isdecimal():
            have = ", ".join(present) or "none"
            raise DeviceError(f"--energy-gpus: {element!r} names no single GPU; present: {have}")
        chosen.append(matches[0])
    if _repeats(chosen):
        raise DeviceError(f"--energy-gpus={selection}: a GPU is named twice")
    return tuple(chosen)
