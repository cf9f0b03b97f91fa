# SPDX-License-Identifier: Apache-2.0
"""``CUDA_VISIBLE_DEVICES``: every row against its known answer and against torch's own parser."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.visibility import VARIABLE, choose, visible_uuids, why_hidden
from pytest_llenergy.errors import DeviceError

A, B, C, D = PRESENT = (
    "GPU-a1b2c300-51d0-4c1f-9e70-0000005e11f0",
    "GPU-a1b2c301-51d0-4c1f-9e70-0000005e11f1",
    "GPU-b7000000-51d0-4c1f-9e70-0000005e11f2",
    "GPU-c8000000-51d0-4c1f-9e70-0000005e11f3",
)

ROWS: list[tuple[str | None, tuple[str, ...]]] = [
    (None, PRESENT),
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
]

#: What torch leaves to CUDA itself, or stumbles over.
OURS = [
    ("MIG-7b2d4a1e-0000-0000-0000-000000000000", ()),
    (f"MIG-{A}/1/0", ()),
    (f"MIG-1,{A}", ()),
    (f"{A},MIG-1", (A,)),
    ("+", ()),
    ("-", ()),
]


def environment(value: str | None) -> dict[str, str]:
    return {} if value is None else {VARIABLE: value}


@pytest.mark.parametrize(("value", "expected"), [*ROWS, *OURS])
def test_each_row(value: str | None, expected: tuple[str, ...]) -> None:
    assert visible_uuids(environment(value), PRESENT) == expected


@pytest.mark.parametrize(("value", "expected"), ROWS)
def test_torch_agrees(value: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch.cuda")
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    # The only faked part is what the driver would answer.
    monkeypatch.setattr(cuda, "_raw_device_uuid_nvml", lambda: list(PRESENT))
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", lambda: len(PRESENT))
    count = cuda._device_count_nvml()
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, list(PRESENT))
    assert tuple(PRESENT[index] for index in parsed[:count]) == expected


def test_the_container_runtimes_variable_is_not_read() -> None:
    assert visible_uuids({"NVIDIA_VISIBLE_DEVICES": "1"}, PRESENT) == PRESENT


def test_why_names_the_variable_its_value_and_what_the_driver_shows() -> None:
    assert why_hidden({VARIABLE: ""}, 4) == (
        "the environment sets CUDA_VISIBLE_DEVICES='', which allows no GPU; the driver shows 4; "
        "--energy-gpus=all overrides it on purpose"
    )


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("all", PRESENT), ("2", (C,)), ("3,0", (D, A)), (f"{B}, 0", (B, A)), ("GPU-b", (C,))],
)
def test_a_selection_by_hand(selection: str, expected: tuple[str, ...]) -> None:
    assert choose(selection, PRESENT) == expected


@pytest.mark.parametrize("element", ["4", "-1", "", "GPU-a", "GPU-f00d", "first", "²"])
def test_a_selection_that_fits_no_board_is_named(element: str) -> None:
    with pytest.raises(DeviceError) as caught:
        choose(f"0,{element}", PRESENT)
    assert str(caught.value) == (
        f"--energy-gpus: {element!r} names no single GPU; present: {', '.join(PRESENT)}"
    )


def test_a_selection_without_boards_and_one_with_a_repeat() -> None:
    with pytest.raises(DeviceError, match=r"^--energy-gpus: '0' names no single GPU; present: none$"):
        choose("0", ())
    with pytest.raises(DeviceError, match=r"^--energy-gpus=0,GPU-a1b2c300: a GPU is named twice$"):
        choose("0,GPU-a1b2c300", PRESENT)
