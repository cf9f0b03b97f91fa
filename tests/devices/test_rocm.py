# SPDX-License-Identifier: Apache-2.0
"""``ROCR_``, ``HIP_`` and ``CUDA_VISIBLE_DEVICES`` of AMD boards: known answers, and torch's parser."""

from __future__ import annotations

from types import ModuleType

import pytest

from pytest_llenergy.devices.amd import BELOW_HIP, HIP, visible
from pytest_llenergy.devices.visibility import VARIABLE
from pytest_llenergy.errors import DeviceError

A, B, C, D = UUIDS = (
    "GPU-4b2c1a9f8d3e6f70",
    "GPU-4b2c1a9f8d3e6f71",
    "GPU-8a00000000000002",
    "GPU-9c00000000000003",
)

#: ROCR, HIP, CUDA, and the boards that HIP shows.
ROWS: list[tuple[str | None, str | None, str | None, tuple[str, ...]]] = [
    (None, None, None, UUIDS),
    (None, "2,0", None, (C, A)),
    (None, None, "2,0", (C, A)),
    (None, "1", "2,0", (B,)),
    (None, "", "2,0", ()),
    (None, "-1", None, ()),
    (None, "0,9,1", None, (A,)),
    (None, "0,0", None, ()),
    (None, C, None, (C,)),
    (None, "GPU-8a,GPU-9c", None, (C, D)),
    (None, "GPU-4b", None, ()),
    ("1,2,3", None, None, (B, C, D)),
    ("3", None, None, (D,)),
    (f"{D},0", None, None, (D, A)),
    ("2,3", "0", None, (C,)),
    ("2,3", "1,0", None, (D, C)),
    ("2,3", "2", None, ()),
    ("2,3", "GPU-9c", None, (D,)),
    ("3,1", "1", "0", (B,)),
]

#: torch counts the elements of the variable below HIP and looks at no CUDA variable beside it.
BEYOND_TORCH: list[tuple[str | None, str | None, str | None, tuple[str, ...]]] = [
    ("", None, None, ()),
    ("-1", None, None, ()),
    ("4", None, None, ()),
    ("0,4,1", None, None, (A,)),
    ("0,1,0,2", None, None, (A, B)),
    ("0,,1", None, None, (A,)),
    (" 2 , gpu-9C", None, None, (C, D)),
    ("GPU-", None, None, ()),
    ("GPU-4b", None, None, ()),
    ("1gpu", None, None, ()),
    ("", "0", None, ()),
    ("2,3", None, "1", (D,)),
    ("2,3", "GPU-4b2c1a9f8d3e6f70", None, ()),
]


def environment(rocr: str | None, hip: str | None, cuda: str | None) -> dict[str, str]:
    given = {BELOW_HIP: rocr, HIP: hip, VARIABLE: cuda}
    return {name: text for name, text in given.items() if text is not None}


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch's own module as its build for ROCm; the only faked part is what AMD SMI would answer."""
    torch = pytest.importorskip("torch")
    for name in (BELOW_HIP, HIP, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        torch.cuda, "_raw_device_uuid_amdsmi", lambda: [uuid.removeprefix("GPU-") for uuid in UUIDS]
    )
    monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: len(UUIDS))
    module: ModuleType = torch.cuda
    return module


@pytest.mark.parametrize(("rocr", "hip", "cuda", "expected"), [*ROWS, *BEYOND_TORCH])
def test_each_row(rocr: str | None, hip: str | None, cuda: str | None, expected: tuple[str, ...]) -> None:
    assert visible(environment(rocr, hip, cuda), UUIDS).uuids == expected


def test_a_prefix_alone_names_no_board_below_hip() -> None:
    assert visible({BELOW_HIP: "GPU-"}, [A]).uuids == ()
    assert visible({BELOW_HIP: "GPU-4"}, [A]).uuids == (A,)


@pytest.mark.parametrize(("rocr", "hip", "cuda", "expected"), ROWS)
def test_torch_agrees(
    torch_cuda: ModuleType,
    rocr: str | None,
    hip: str | None,
    cuda: str | None,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = visible(environment(rocr, None, None), UUIDS).uuids
    monkeypatch.setattr(torch_cuda, "_raw_device_count_amdsmi", lambda: len(left))
    for name, text in environment(rocr, hip, cuda).items():
        monkeypatch.setenv(name, text)
    count = torch_cuda._device_count_amdsmi()
    parsed = torch_cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        bare = [uuid.removeprefix("GPU-") for uuid in left]
        parsed = torch_cuda._transform_uuid_to_ordinals(parsed, bare)
    assert tuple(left[index] for index in parsed[:count]) == expected


@pytest.mark.parametrize(("rocr", "hip"), [("3", "0,1"), ("", "0,1"), ("2,3", f"{C},{D},{A}")])
def test_hip_cannot_select_more_than_is_left_to_it(
    torch_cuda: ModuleType, rocr: str, hip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = len(visible({BELOW_HIP: rocr}, UUIDS).uuids)
    with pytest.raises(DeviceError) as caught:
        visible(environment(rocr, hip, None), UUIDS)
    assert str(caught.value) == (
        f"HIP_VISIBLE_DEVICES={hip!r} names more boards than ROCR_VISIBLE_DEVICES={rocr!r}, which leaves it "
        f"{left}, counted from 0; name no more than those"
    )
    monkeypatch.setenv(BELOW_HIP, rocr)
    monkeypatch.setenv(HIP, hip)
    with pytest.raises(RuntimeError, match="more devices than ROCR_VISIBLE_DEVICES"):
        torch_cuda._parse_visible_devices()


@pytest.mark.parametrize(
    ("rocr", "hip", "reason"),
    [
        ("0,4", None, "ROCR_VISIBLE_DEVICES: '4' names no single board and ends the list"),
        ("0,GPU-4", None, "ROCR_VISIBLE_DEVICES: 'GPU-4' names no single board and ends the list"),
        ("1,1", None, "ROCR_VISIBLE_DEVICES: '1' comes a second time and ends the list"),
        ("2,3", "2", "HIP_VISIBLE_DEVICES: '2' is out of range: the driver shows 2, counted from 0"),
        ("2,3", "1", None),
    ],
)
def test_the_element_that_cuts_the_list_is_named(rocr: str, hip: str | None, reason: str | None) -> None:
    assert visible(environment(rocr, hip, None), UUIDS).reason == reason
