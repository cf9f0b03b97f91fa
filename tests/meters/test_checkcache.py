# SPDX-License-Identifier: Apache-2.0
"""A board is checked once per driver, boot and version; whatever is wrong with the files is no error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.meters.selfcheck import (
    PROVISIONAL_S,
    CheckCache,
    CheckedBoard,
    CheckResult,
    read_boot_id,
)

BOARD = CheckedBoard(uuid="GPU-a", driver="580.1", boot="b", sources=["NVML_FI_DEV_ENERGY"])
FIT = CheckResult(duration_s=1.0, ticks=10, period_s=0.1)
UNFIT = CheckResult(duration_s=1.0, reason="stood still for 1.0 s")
BUSY = CheckResult(duration_s=2.5, ticks=25, period_s=0.1, ratio=1.2, doubt=0.4)


def the_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_result_is_found_again_by_another_process(tmp_path: Path) -> None:
    CheckCache(tmp_path / "new" / "meters").store(BOARD, FIT)
    assert CheckCache(tmp_path / "new" / "meters").load(BOARD) == FIT


@pytest.mark.parametrize(
    "changed", [{"uuid": "GPU-b"}, {"driver": "581"}, {"boot": "c"}, {"tool": "0"}, {"sources": ["other"]}]
)
def test_a_result_holds_for_what_it_was_found_under(tmp_path: Path, changed: dict[str, object]) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    assert cache.load(msgspec.structs.replace(BOARD, **changed)) is None
    assert cache.load(BOARD) == FIT


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"board": 3}', b"null"])
def test_a_damaged_file_is_a_miss_and_is_mended(tmp_path: Path, damage: bytes) -> None:
    cache = CheckCache(tmp_path)
    cache.store(BOARD, FIT)
    the_file(tmp_path).write_bytes(damage)
    assert cache.load(BOARD) is None
    cache.store(BOARD, FIT)
    assert cache.load(BOARD) == FIT


def test_where_nothing_can_be_written_this_process_still_knows(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no directory")
    cache = CheckCache(occupied / "meters")
    assert cache.load(BOARD) is None
    cache.store(BOARD, FIT)
    assert CheckCache(occupied / "meters").load(BOARD) == FIT
    assert CheckCache(tmp_path / "elsewhere").load(BOARD) is None


def test_a_counter_that_was_rejected_or_hard_to_compare_gets_another_chance(tmp_path: Path) -> None:
    cache = CheckCache(tmp_path)
    for result, later in ((UNFIT, None), (BUSY, None), (FIT, FIT)):
        cache.store(BOARD, result)
        assert cache.load(BOARD) == result
        entry = json.loads(the_file(tmp_path).read_text())
        entry["checked_s"] = time.time() - PROVISIONAL_S - 1
        the_file(tmp_path).write_text(json.dumps(entry))
        assert cache.load(BOARD) == later


def test_the_directory_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLENERGY_CACHE_DIR", str(tmp_path))
    CheckCache().store(BOARD, FIT)
    assert the_file(tmp_path / "meters").suffix == ".json"


def test_the_boot_has_one_name() -> None:
    assert read_boot_id() == read_boot_id() != ""
