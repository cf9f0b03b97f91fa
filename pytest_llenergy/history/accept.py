# SPDX-License-Identifier: Apache-2.0
"""Accepting a step: from then on tests are held against what they took at that commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.history.entry import SCHEMA_VERSION, SUFFIX, Acceptance
from pytest_llenergy.history.place import Place
from pytest_llenergy.history.read import is_named, read_entries

#: The folder of accepted steps, beside those of devices.
FOLDER = "accepted"

#: Of a commit, before it may be meant.
FEWEST_LETTERS = 4


def accept(place: Place, commit: str, reason: str, tests: Sequence[str] = ()) -> Acceptance:
    """Write it down, for all tests unless some are named, by their ids or what follows the ``::`` of these.

    Raises ``ReportError`` for a commit that was never measured, or is none, and for a test that was not.
    """
    if not reason.strip():
        raise ReportError("--reason is empty; say why the change is accepted")
    if len(commit) < FEWEST_LETTERS:
        raise ReportError(f"commit {commit!r} is too short; give {FEWEST_LETTERS} letters or more")
    entries = read_entries(place)
    known = sorted({entry.commit for entry in entries if entry.commit is not None})
    meant = [each for each in known if each.startswith(commit)]
    if len(meant) != 1:
        told = "no session is" if not meant else f"sessions of {len(meant)} commits are"
        raise ReportError(
            f"{place.name}: {told} of commit {commit}; "
            + ("llenergy history add adds one" if not meant else "give more letters")
        )
    there = list(dict.fromkeys(entry.id for entry in entries if entry.commit == meant[0]))
    named = {each: [name for name in there if is_named(name, each)] for each in tests}
    for each, names in named.items():
        if not names:
            raise ReportError(f"{place.name}: no session of commit {meant[0][:10]} has {each}")
    now = datetime.now(timezone.utc)
    stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    accepted = Acceptance(
        schema_version=SCHEMA_VERSION,
        commit=meant[0],
        tests=[name for names in named.values() for name in names],
        reason=reason.strip(),
        time=stamp,
    )
    file = f"{now:%Y%m%dT%H%M%S%f}Z-{meant[0][:12]}{SUFFIX}"
    if not place.create(FOLDER, file, msgspec.json.encode(accepted) + b"\n"):
        raise ReportError(f"{place.name}: {file} is there already; try again")
    return accepted


def accepted_steps(place: Place) -> list[Acceptance]:
    """In the order of time. Raises ``ReportError``."""
    found = []
    for file in place.files(FOLDER):
        try:
            found.append(msgspec.json.decode(place.read(FOLDER, file), type=Acceptance))
        except msgspec.DecodeError as error:
            raise ReportError(f"{place.name}/{FOLDER}/{file}: not an accepted step ({error})") from None
    return sorted(found, key=lambda each: each.time)
