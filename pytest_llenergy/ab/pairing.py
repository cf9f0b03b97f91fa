# SPDX-License-Identifier: Apache-2.0
"""Which test of one side belongs to which of the other, where options have changed their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.model.record import Primitive, Record

#: Parameters that options choose.
CHOSEN = frozenset({"backend"})


@dataclass(frozen=True)
class Names:
    """The common name of each test of either side, by its own node id, and who found no partner."""

    base: Mapping[str, str]
    head: Mapping[str, str]
    lonely: tuple[str, ...] = ()


def same_names(base: Mapping[str, Record], head: Mapping[str, Record]) -> Names:
    """Of two commits: a test is who its node id says."""
    return Names({name: name for name in base}, {name: name for name in head})


def common_names(base: Mapping[str, Record], head: Mapping[str, Record]) -> Names:
    """By node id; of the rest by function and parameters, without the backend, where that leaves one of each.

    Such a pair is named after what both have in common: ``test_decode[8]``.
    """
    names = ({name: name for name in base if name in head}, {name: name for name in head if name in base})
    rest = [_by_kind(records, known) for records, known in zip((base, head), names, strict=True)]
    taken = set(names[0])
    lonely: list[str] = []
    for kind in dict.fromkeys([*rest[0], *rest[1]]):
        ours, theirs = rest[0].get(kind, []), rest[1].get(kind, [])
        shared = _name(kind)
        if len(ours) == len(theirs) == 1 and shared not in taken:
            taken.add(shared)
            names[0][ours[0]] = names[1][theirs[0]] = shared
            continue
        for side, found in zip(names, (ours, theirs), strict=True):
            side.update({name: name for name in found})
            lonely += found
    return Names(*names, tuple(lonely))


Kind = tuple[str, tuple[tuple[str, Primitive], ...]]


def _by_kind(records: Mapping[str, Record], known: Mapping[str, str]) -> dict[Kind, list[str]]:
    found: dict[Kind, list[str]] = {}
    for name, record in records.items():
        if name not in known:
            params = tuple(sorted((key, each) for key, each in record.params.items() if key not in CHOSEN))
            found.setdefault((name.partition("[")[0], params), []).append(name)
    return found


def _name(kind: Kind) -> str:
    function, params = kind
    return f"{function}[{'-'.join(str(value) for _, value in params)}]" if params else function


def lonely_line(names: Sequence[str]) -> str:
    """One line about tests that could not be paired."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"not paired, since options have changed their names and no single other test fits: {shown}"
