# SPDX-License-Identifier: Apache-2.0
"""Flags of a record, which join those of its rounds."""

from __future__ import annotations

from pytest_llenergy.plugin.recorder import join_flags
from pytest_llenergy.record.record import Flag


def moved(host: str) -> Flag:
    detail = f"{host} has a clock that moved by 50 ms against pytest's"
    return Flag(name="host", severity="invalid", detail=detail)


def test_the_host_that_raised_a_flag_most_often_is_the_one_that_is_shown() -> None:
    found = join_flags([[moved("n1"), moved("n10")], [moved("n10")], [moved("n10")]], 4, {"n1", "n10"})
    assert found.detail.startswith("3 of 4 rounds (n10 in 3, n1 in 1): n10 has a clock that moved by")


def test_boards_of_one_host_count_once_in_a_round() -> None:
    flags = [
        Flag(name="uneven-rounds", severity="warning", detail=f"n1/GPU-{board} ran at 900 MHz")
        for board in (0, 1)
    ]
    assert join_flags([flags, flags], 2, {"n1", "n2"}).detail == "2 of 2 rounds: n1/GPU-0 ran at 900 MHz"


def test_flags_of_pytests_own_host_name_none() -> None:
    flag = Flag(name="contended", severity="warning", detail="gpu: other processes")
    assert join_flags([[flag]], 2, {""}).detail == "1 of 2 rounds: gpu: other processes"
