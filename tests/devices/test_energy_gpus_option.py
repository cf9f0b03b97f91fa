# SPDX-License-Identifier: Apache-2.0
"""``--energy-gpus``: what can be named, and the element that cannot."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.inventory import Instance, Inventory
from pytest_llenergy.devices.visibility import parse_selection
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board

A, B, C = UUIDS = ("GPU-a1b2c300-51d0", "GPU-a1b2c301-51d0", "GPU-b7000000-51d0")
FIRST, SECOND = "MIG-7b2d4a1e-0001", "MIG-7c2d4a1e-0002"

BOARDS = tuple(Board(uuid, "NVIDIA H100", f"{place}:00.0") for place, uuid in enumerate(UUIDS))
WHOLE = Inventory(BOARDS)
DIVIDED = Inventory(
    BOARDS, (Instance(FIRST, C, 1, 0, profile="1g.10gb"), Instance(SECOND, C, 2, 0)), driver="535.1"
)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("all", UUIDS),
        ("2", (C,)),
        ("2,0", (C, A)),
        (f"{B}, 0", (B, A)),
        ("GPU-b", (C,)),
    ],
)
def test_boards_are_named_by_number_uuid_or_all(selection: str, expected: tuple[str, ...]) -> None:
    assert parse_selection(selection, WHOLE) == expected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (FIRST, (FIRST,)),
        ("MIG-7c", (SECOND,)),
        (f"MIG-{C}/2/0", (SECOND,)),
        (f"{SECOND},{FIRST}", (SECOND, FIRST)),
        ("MIG-7b,1", (FIRST, B)),
    ],
)
def test_instances_are_named_by_uuid_or_board_and_number(selection: str, expected: tuple[str, ...]) -> None:
    assert parse_selection(selection, DIVIDED) == expected


@pytest.mark.parametrize("element", ["3", "-1", "", "GPU-a", "GPU-f00d", "MIG-7b", "first", "²", "Gpu-b"])
def test_an_element_without_a_matching_board_is_named(element: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_selection(f"0,{element}", WHOLE)
    assert str(caught.value) == f"{element!r} does not match exactly one GPU; present: {A}, {B}, {C}"


@pytest.mark.parametrize(
    ("selection", "element", "uuid"),
    [("0,GPU-a1b2c300", "GPU-a1b2c300", A), (f"MIG-7b,MIG-{C}/1/0", f"MIG-{C}/1/0", FIRST)],
)
def test_a_repeated_device_is_named(selection: str, element: str, uuid: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_selection(selection, DIVIDED)
    assert str(caught.value) == (f"{element!r} is {uuid}, which is already in the list")
