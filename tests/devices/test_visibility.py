# SPDX-License-Identifier: Apache-2.0
"""``CUDA_VISIBLE_DEVICES``, against known answers and torch's own parser, and ``--energy-gpus``."""

from __future__ import annotations

from types import ModuleType

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

ROWS: list[tuple[str | None, tuple[str, ...]]] = [
    (None, UUIDS),
    ("", ()),
    (" ", ()),
    ("-1", ()),
    ("NoDevFiles", ()),
    ("all", ()),
    ("none", ()),
    ("void", ()),
    ("a1b2c300", ()),
    ("b7000000", ()),
    ("0", (A,)),
    ("3,1", (D, B)),
    (" 2 , 0 ", (C, A)),
    ("+1", (B,)),
    ("0,2,-1,1", (A, C)),
    ("0,-1,0", (A,)),
    ("0,9,1", (A,)),
    ("4", ()),
    ("0,0", ()),
    ("0,1,0", ()),
    ("0,9,9", ()),
    ("0,9,0", ()),
    ("0,,1", (A,)),
    ("0,", (A,)),
    (",0", ()),
    ("1gpu2,2x", (B, C)),
    ("0x1", (A,)),
    (A, (A,)),
    (f"{D},{A}", (D, A)),
    (f"{A},{A}", ()),
    ("GPU-b", (C,)),
    ("GPU-b,GPU-b7", ()),
    ("GPU-c,GPU-b", (D, C)),
    ("GPU-a1b2c30", ()),
    ("GPU-b,GPU-a,GPU-c", (C,)),
    ("GPU-", ()),
    ("GPU-f00d", ()),
    ("GPU-b,GPU-f00d,GPU-c", (C,)),
    ("GPU-b,GPU-f00d,GPU-b", ()),
    ("GPU-b,1", (C,)),
    ("1,GPU-b", (B,)),
    (" GPU-b", ()),
    ("GPU-b, GPU-c", (C,)),
    ("gpu-b7000000", ()),
    ("GPU-B7", ()),
    (f"GPU-b,{A} ", (C,)),
    ("GPU-b,MIG-a", (C,)),
    ("1,MIG-a", (B,)),
    ("0,99999999999999999999", (A,)),
]

#: An element that is only a sign is no number, one of thousands of digits is; torch stumbles over both.
SIGNS: list[tuple[str, tuple[str, ...]]] = [
    ("+", ()),
    ("-", ()),
    ("0,+,1", (A,)),
    (f"0,{'9' * 5000},1", (A,)),
    (f"0,{'9' * 5000},0", ()),
]

FIRST, SECOND = "MIG-7b2d4a1e-0000-5000-8000-000000000001", "MIG-7c2d4a1e-0000-5000-8000-000000000002"
SAME_PART, ELSEWHERE = "MIG-7c9d4a1e-0000-5000-8000-000000000003", "MIG-8d2d4a1e-0000-5000-8000-000000000004"

#: Board A has two GPU instances, the second with two compute instances; board C has one.
INSTANCES = (
    Instance(FIRST, A, gpu_instance=1, compute_instance=0),
    Instance(SECOND, A, gpu_instance=2, compute_instance=0),
    Instance(SAME_PART, A, gpu_instance=2, compute_instance=1),
    Instance(ELSEWHERE, C, gpu_instance=11, compute_instance=0),
)

#: What is named, what one process sees since driver 570, and before.
MIG_ROWS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (FIRST, (FIRST,), (FIRST,)),
    ("MIG-7b", (FIRST,), (FIRST,)),
    (f"{FIRST},", (FIRST,), (FIRST,)),
    (f"MIG-{A}/1/0", (FIRST,), (FIRST,)),
    (f"MIG-{A}/2/1", (SAME_PART,), (SAME_PART,)),
    (f"MIG-{C}/11/0", (ELSEWHERE,), (ELSEWHERE,)),
    (f"MIG-{C}/1", (), ()),
    (f"MIG-{C}", (), ()),
    (f"MIG-{D}/1/0", (), ()),
    (f"{SECOND},{FIRST}", (SECOND, FIRST), (SECOND,)),
    (f"{SECOND},{SAME_PART},{ELSEWHERE}", (SECOND, ELSEWHERE), (SECOND,)),
    ("MIG-7c", (), ()),
    ("MIG-gone", (), ()),
    (f"MIG-gone,{FIRST}", (), ()),
    (f"{FIRST},MIG-gone,{ELSEWHERE}", (FIRST,), (FIRST,)),
    (f"{FIRST},{B}", (FIRST,), (FIRST,)),
    (f"{FIRST},1", (FIRST,), (FIRST,)),
    (f"{FIRST}, {ELSEWHERE}", (FIRST,), (FIRST,)),
    (f" {FIRST}", (), ()),
    (FIRST.lower(), (), ()),
    (f"{FIRST},{FIRST}", (), ()),
    (f"{FIRST},MIG-{A}/1/0", (), ()),
]


def host(*names: str, instances: tuple[Instance, ...] = (), driver: str = "580.95.05") -> Inventory:
    boards = [
        Board(uuid, name, f"{place}:00.0")
        for place, (uuid, name) in enumerate(zip(UUIDS, names, strict=True))
    ]
    return Inventory(tuple(boards), instances, driver)


ALIKE = host("L4", "L4", "L4", "L4")
MIXED = host("L4", "H100", "H100", "L4")
DIVIDED = host("H100", "H100", "H100", "H100", instances=INSTANCES)


def environment(value: str | None, order: str | None = None) -> dict[str, str]:
    given = {VISIBLE_DEVICES: value, DEVICE_ORDER: order}
    return {name: text for name, text in given.items() if text is not None}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch's own module; the only faked part is what the driver would answer."""
    module: ModuleType = pytest.importorskip("torch.cuda")
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    monkeypatch.setattr(module, "_raw_device_uuid_nvml", lambda: list(UUIDS))
    monkeypatch.setattr(module, "_raw_device_count_nvml", lambda: len(UUIDS))
    return module


@pytest.mark.parametrize(("value", "expected"), [*ROWS, *SIGNS])
def test_device_lists_are_parsed_as_cuda_does(value: str | None, expected: tuple[str, ...]) -> None:
    assert parse_visible_devices(environment(value), ALIKE).uuids == expected


@pytest.mark.parametrize(("value", "expected"), ROWS)
def test_torch_parses_device_lists_alike(
    cuda: ModuleType, value: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, value)
    count = cuda._device_count_nvml()
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, list(UUIDS))
    assert tuple(UUIDS[index] for index in parsed[:count]) == expected


@pytest.mark.parametrize(("value", "since_570", "before"), MIG_ROWS)
def test_instances_are_those_that_cuda_shows(
    value: str, since_570: tuple[str, ...], before: tuple[str, ...]
) -> None:
    assert parse_visible_devices(environment(value), DIVIDED).uuids == since_570
    old = Inventory(DIVIDED.boards, INSTANCES, driver="535.129.03")
    assert parse_visible_devices(environment(value), old).uuids == before


@pytest.mark.parametrize(("value", "since_570", "before"), MIG_ROWS)
def test_torch_keeps_every_instance_that_cuda_shows(
    cuda: ModuleType,
    value: str,
    since_570: tuple[str, ...],
    before: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cuts the list by its text alone; which instances there are it does not know."""
    monkeypatch.setenv(VISIBLE_DEVICES, value)
    parsed = cuda._parse_visible_devices()
    assert cuda._device_count_nvml() == (-1 if parsed else 0)
    resolved = [uuid for text in parsed for uuid in parse_visible_devices(environment(text), DIVIDED).uuids]
    assert set(since_570) <= set(resolved)
    if not parsed:
        assert since_570 == before == ()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", None),
        ("0,2,-1,1", None),
        ("4", "'4' does not match exactly one GPU"),
        ("0,9,1", "'9' does not match exactly one GPU"),
        ("all", "'all' does not match exactly one GPU"),
        ("GPU-b,1", "'1' does not match exactly one GPU"),
        ("GPU-b,GPU-a,GPU-c", "'GPU-a' does not match exactly one GPU"),
        ("0,1,0x", "'0x' repeats a device, so CUDA shows none"),
        ("GPU-b,GPU-b7", "'GPU-b7' repeats a device, so CUDA shows none"),
        ("MIG-gone", "'MIG-gone' does not match exactly one GPU"),
        (f"{FIRST},", None),
    ],
)
def test_the_element_that_ends_the_list_is_named(value: str, reason: str | None) -> None:
    assert parse_visible_devices(environment(value), DIVIDED).reason == reason


def test_instances_that_one_process_cannot_see_together_are_named() -> None:
    old = Inventory(DIVIDED.boards, INSTANCES, driver="535.129.03")
    assert parse_visible_devices(environment(f"{FIRST},{SECOND}"), old).reason == (
        f"CUDA with driver 535.129.03 shows one process {FIRST} of the 2 MIG instances; "
        f"--energy-gpus={FIRST},{SECOND} gives each rank one"
    )
    assert parse_visible_devices(environment(f"{FIRST},{SECOND}"), DIVIDED).reason is None


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
        (DIVIDED, f"MIG-{A}/2/0", (SECOND,)),
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
    [("1,GPU-a1b2c301", "GPU-a1b2c301", B), (f"MIG-7b,MIG-{A}/1/0", f"MIG-{A}/1/0", FIRST)],
)
def test_a_device_that_the_option_repeats_is_named(selection: str, element: str, uuid: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_selection(selection, DIVIDED)
    assert str(caught.value) == f"{element!r} is {uuid}, which is already in the list"
