# SPDX-License-Identifier: Apache-2.0
"""Which AMD boards a process may use: ``ROCR_VISIBLE_DEVICES``, then ``HIP_`` or ``CUDA_VISIBLE_DEVICES``.

The first acts below HIP: what it leaves is numbered anew, and the other selects among that. A UUID is
``GPU-`` and 16 hexadecimal digits; boards stand in the order of the ROCm runtime (``rocminfo``), which need
not be that of AMD SMI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llenergy.devices.grammar import BOARD_PREFIX, Visible, matching, read_list
from pytest_llenergy.devices.visibility import VARIABLE
from pytest_llenergy.errors import DeviceError

BELOW_HIP = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str], present: Sequence[str]) -> Visible:
    """The UUIDs that HIP would enumerate, among those of all boards.

    ``HIP_VISIBLE_DEVICES`` is preferred to ``CUDA_VISIBLE_DEVICES``; lists are read as CUDA reads them,
    which is how torch reads them here too. Raises ``DeviceError`` as torch raises, where HIP is to select
    more boards than the runtime below leaves.
    """
    below = environment.get(BELOW_HIP)
    variable = HIP if HIP in environment else VARIABLE
    value = environment.get(variable)
    left = _below_hip(below, present) if below is not None else Visible(tuple(present))
    if value is None:
        return left
    if below is not None and variable == HIP and len(value.split(",")) > len(below.split(",")):
        raise DeviceError(
            f"{HIP}={value!r} names more boards than {BELOW_HIP}={below!r}, which leaves it "
            f"{len(left.uuids)}, counted from 0; name no more than those"
        )
    found = read_list(value, left.uuids)
    reasons = (left.reason, f"{variable}: {found.reason}" if found.reason else None)
    return Visible(found.uuids, "; ".join(filter(None, reasons)) or None)


def _below_hip(value: str, present: Sequence[str]) -> Visible:
    """Numbers and UUIDs, in any mixture and either case; the first that fits no board ends the list.

    So does, unlike in CUDA, one that comes a second time (ROCR-Runtime, ``amd_filter_device.cpp``).
    """
    chosen: list[str] = []
    names = [(uuid.upper(), uuid) for uuid in present]
    for element in value.split(",") if value else ():
        text = element.strip().upper()
        if text.startswith(BOARD_PREFIX) and text != BOARD_PREFIX:
            matches = matching(text, names)
        else:
            matches = list(present[int(text) :][:1]) if text.isascii() and text.isdecimal() else []
        if len(matches) != 1:
            return Visible(tuple(chosen), f"{BELOW_HIP}: {element!r} names no single board and ends the list")
        if matches[0] in chosen:
            return Visible(tuple(chosen), f"{BELOW_HIP}: {element!r} comes a second time and ends the list")
        chosen.append(matches[0])
    return Visible(tuple(chosen))
