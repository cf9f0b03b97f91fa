# SPDX-License-Identifier: Apache-2.0
"""``CUDA_VISIBLE_DEVICES``, against known answers, and ``--energy-gpus``."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llenergy.devices.inventory import Instance, Inventory
from pytest_llenergy.devices.visibility import (
    DEVICE_ORDER,
    VISIBLE_DEVICES,
    parse_selection,
    parse_visible_devices,
)
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board

A, B, C, D = UUIDS = (
    "GPU-a1b2c300-51d0-4c1f-9e70-0000005e11f0",
    "GPU-a1b2c301-51d0-4c1f-9e70-0000005e11f1",
    "GPU-b7000000-51d0-4c1f-9e70-0000005e11f2",
    "GPU-c8000000-51d0-4c1f-9e70-0000005e11f3",
)

FIRST, SECOND = "MIG-7b2d4a1e-0000-5000-8000-000000000001", "MIG-7c2d4a1e-0000-5000-8000-000000000002"

ROWS: list[tuple[str | None, tuple[str, ...], str | None]] = [
    (None, UUIDS, None),
    ("", (), None),
    (" ", (), None),
    ("-1", (), None),
    ("NoDevFiles", (), "'NoDevFiles' does not match exactly one GPU"),
    ("all", (), "'all' does not match exactly one GPU"),
    ("b7000000", (), "'b7000000' does not match exactly one GPU"),
    ("0", (A,), None),
    ("3,1", (D, B), None),
    (" 2 , 0 ", (C, A), None),
    ("0,2,-1,1", (A, C), None),
    ("0,9,1", (A,), "'9' does not match exactly one GPU"),
    ("4", (), "'4' does not match exactly one GPU"),
    ("0,", (A,), None),
    (A, (A,), None),
    (f"{D},{A}", (D, A), None),
    ("GPU-b", (C,), None),
    ("GPU-a1b2c30", (), "'GPU-a1b2c30' does not match exactly one GPU"),
    ("GPU-b,GPU-f00d,GPU-c", (C,), "'GPU-f00d' does not match exactly one GPU"),
    ("0,0", (), "'0' repeats a device, so CUDA shows none"),
    (f"{A},{A}", (), f"'{A}' repeats a device, so CUDA shows none"),
    ("GPU-b,1", (C,), "'1' does not match exactly one GPU"),
    ("1,GPU-b", (B,), "'GPU-b' does not match exactly one GPU"),
    ("GPU-b,MIG-7b", (C,), "'MIG-7b' does not match exactly one GPU"),
    (" GPU-b", (), "' GPU-b' does not match exactly one GPU"),
    ("GPU-b, GPU-c", (C,), "' GPU-c' does not match exactly one GPU"),
    (FIRST, (FIRST,), None),
    ("MIG-7b", (FIRST,), None),
    (f"{SECOND},{FIRST}", (SECOND, FIRST), None),
    ("MIG-gone", (), "'MIG-gone' does not match exactly one GPU"),
]

INSTANCES = (Instance(FIRST, A), Instance(SECOND, A))


def host(*names: str, instances: tuple[Instance, ...] = ()) -> Inventory:
    boards = [
        Board(uuid, name, f"{place}:00.0")
        for place, (uuid, name) in enumerate(zip(UUIDS, names, strict=True))
    ]
    return Inventory(tuple(boards), instances, "580.95.05")


ALIKE = host("L4", "L4", "L4", "L4")
MIXED = host("L4", "H100", "H100", "L4")
DIVIDED = host("H100", "H100", "H100", "H100", instances=INSTANCES)


def environment(value: str | None, order: str | None = None) -> dict[str, str]:
    given = {VISIBLE_DEVICES: value, DEVICE_ORDER: order}
    return {name: text for name, text in given.items() if text is not None}


@pytest.mark.parametrize(("value", "expected", "reason"), ROWS)
def test_device_lists_are_parsed_as_cuda_does(
    value: str | None, expected: tuple[str, ...], reason: str | None
) -> None:
    found = parse_visible_devices(environment(value), DIVIDED)
    assert (found.uuids, found.reason) == (expected, reason)


@pytest.mark.parametrize(("value", "expected", "_reason"), [row for row in ROWS if "MIG" not in str(row)])
def test_torch_parses_device_lists_alike(
    value: str | None, expected: tuple[str, ...], _reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only faked part is what the driver would answer."""
    cuda: Any = pytest.importorskip("torch.cuda")
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    monkeypatch.setattr(cuda, "_raw_device_uuid_nvml", lambda: list(UUIDS))
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    if value is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, value)
    count, parsed = cuda._device_count_nvml(), cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, list(UUIDS))
    assert tuple(UUIDS[index] for index in parsed[:count]) == expected


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST", "pci_bus_id"])
@pytest.mark.parametrize("value", ["0", "1,2", "2,9"])
def test_numbers_are_refused_among_different_models(value: str, order: str | None) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_visible_devices(environment(value, order), MIXED)
    assert str(caught.value) == (
        f"CUDA_VISIBLE_DEVICES={value!r} counts the fastest GPU first, an order that NVML does not know "
        "for different "
        f"models: L4 {A}, H100 {B}, H100 {C}, L4 {D}; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or list UUIDs"
    )


@pytest.mark.parametrize(
    ("value", "order", "expected"),
    [
        ("1", "PCI_BUS_ID", (B,)),
        ("GPU-b", None, (C,)),
        ("3,2,1,0", None, (D, C, B, A)),
        ("", None, ()),
        ("9", None, ()),
        (None, None, UUIDS),
    ],
)
def test_lists_that_do_not_depend_on_cudas_order_are_parsed(
    value: str | None, order: str | None, expected: tuple[str, ...]
) -> None:
    assert parse_visible_devices(environment(value, order), MIXED).uuids == expected


@pytest.mark.parametrize(
    ("inventory", "selection", "expected"),
    [
        (ALIKE, "all", UUIDS),
        (ALIKE, "2,0", (C, A)),
        (ALIKE, f"{B}, 0", (B, A)),
        (ALIKE, "GPU-b", (C,)),
        (DIVIDED, "MIG-7b,1", (FIRST, B)),
        (DIVIDED, f"{SECOND},{FIRST}", (SECOND, FIRST)),
    ],
)
def test_the_option_names_boards_and_instances(
    inventory: Inventory, selection: str, expected: tuple[str, ...]
) -> None:
    assert parse_selection(selection, inventory) == expected


@pytest.mark.parametrize("element", ["4", "-1", "", "GPU-a", "MIG-7b", "first", "²", "Gpu-b"])
def test_an_element_of_the_option_without_a_matching_board_is_named(element: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_selection(f"0,{element}", ALIKE)
    assert str(caught.value) == f"{element!r} does not match exactly one GPU; present: {', '.join(UUIDS)}"


@pytest.mark.parametrize(
    ("selection", "element", "uuid"),
    [("1,GPU-a1b2c301", "GPU-a1b2c301", B), (f"MIG-7b,{FIRST}", FIRST, FIRST)],
)
def test_a_device_that_the_option_repeats_is_named(selection: str, element: str, uuid: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_selection(selection, DIVIDED)
    assert str(caught.value) == f"{element!r} is {uuid}, which is already in the list"
