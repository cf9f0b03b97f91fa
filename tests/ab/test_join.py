# SPDX-License-Identifier: Apache-2.0
"""Joining the sessions of one side into one report."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
import pytest

from pytest_llenergy.ab.join import SideSessions, list_excluded_rounds
from pytest_llenergy.record.record import Flag, Record
from pytest_llenergy.record.report import Report, SideName
from pytest_llenergy.record.round_metric import is_valid

from ..compare.runs import LEVEL, SPOILED, TEST, record_of, report_of, round_of
from ..record.reports import HOST, REPORT

#: A flag of a whole record.
LOST = Flag(name="settings", severity="invalid", detail="the boards had other settings")


def sessions_of(*reports: Report, name: SideName = "base") -> SideSessions:
    side = SideSessions()
    for number, report in enumerate(reports, 1):
        side.add(number, report)
    return side


def join(side: SideSessions) -> Record:
    (record,) = side.join().records
    return record


def one(joules: float | None, **changes: Any) -> Report:
    return report_of(record_of(joules=[joules], **changes))


def test_record_has_the_rounds_of_all_sessions() -> None:
    record = join(sessions_of(*[one(each) for each in LEVEL]))
    assert [each.energy_j for each in record.rounds] == list(LEVEL)
    assert (record.status, record.metrics["energy_j"].n) == ("measured", 6)
    assert record.metrics["energy_j"].value == pytest.approx(median(LEVEL) / 2)


def test_session_without_joules_loses_only_its_round() -> None:
    lost = one(None, status="invalid", reason="the counter stood still")
    side = sessions_of(one(10.0), lost, one(10.0))
    assert not side.undecidable
    assert (join(side).status, join(side).metrics["energy_j"].n) == ("measured", 2)


def test_session_whose_boards_lost_their_settings_does_not_count() -> None:
    """Its rounds have no flag, but may have run at another power limit."""
    lost = one(20.0, status="invalid", reason=LOST.detail, flags=[LOST])
    side = sessions_of(one(10.0), lost)
    assert side.undecidable == {TEST}
    record = join(side)
    assert (record.status, record.reason) == ("invalid", f"session 2: {LOST.detail}")
    assert (record.metrics, record.custom, len(record.rounds)) == ({}, {}, 2)
    # Flags of single rounds exclude only these rounds.
    busy = one(None, status="invalid", rounds=[round_of(20.0, flags=[SPOILED])], flags=[SPOILED])
    side = sessions_of(one(10.0), busy, one(10.0))
    assert not side.undecidable
    assert (join(side).status, join(side).metrics["energy_j"].n) == ("measured", 2)


def test_failure_in_any_session_is_a_failure() -> None:
    side = sessions_of(one(10.0), report_of(Record(id=TEST, attempt=1, status="failed", reason="boom")))
    assert side.undecidable == {TEST}
    record = join(side)
    # It was measured in another session, and so worked.
    assert (record.status, record.reason, len(record.rounds)) == ("invalid", "session 2: boom", 1)
    assert join(sessions_of(*side.reports[1:])).status == "failed"


def test_sessions_keep_all_causes_of_a_flag() -> None:
    lost = Flag(name="host", severity="invalid", detail="n2 was lost")
    unlike = Flag(name="host", severity="note", detail="n1 has another driver than n2")
    record = join(sessions_of(one(10.0, flags=[unlike, lost]), one(10.1, flags=[unlike])))
    found = {(flag.severity, flag.detail) for flag in record.flags}
    assert found == {("note", unlike.detail), ("invalid", lost.detail)}


def test_rounds_on_different_boards_are_excluded() -> None:
    record = join(sessions_of(one(10.0), one(20.0, devices=["GPU-b"]), one(10.0)))
    assert [is_valid(each) for each in record.rounds] == [True, False, True]
    assert list_excluded_rounds(record) == ["session 2: ran on GPU-b, session 1 on GPU-a"]
    assert record.metrics["energy_j"].value == pytest.approx(5.0)


def test_rounds_of_a_different_meter_or_machine_are_excluded() -> None:
    meter = msgspec.structs.replace(record_of().meters[0], source="power")
    assert REPORT.environment is not None
    elsewhere = msgspec.structs.replace(
        REPORT.environment, host=msgspec.structs.replace(HOST, logical_cpus=2, load_average=9.0)
    )
    moved = msgspec.structs.replace(one(10.0), environment=elsewhere)
    message = list_excluded_rounds(join(sessions_of(one(10.0), one(20.0, meters=[meter]), moved)))
    assert message[0] == "session 2: differs from session 1 (meter.source: counter -> power)"
    assert message[1] == "session 3: differs from session 1 (cpu.count: 64 -> 2)"
