# SPDX-License-Identifier: Apache-2.0
"""Reports with any content: a comparison or one line of error, never a traceback."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.comparison import Criterion, compare_reports
from pytest_llenergy.model.report import PairedReport, encode_paired_report, encode_report

from ..gating.inner import usage_error
from ..model.reports import RECORD, REPORT
from .runs import record_of, report_of, scaled

PAIR = [record_of(), record_of("t.py::b", scaled(2))]
WHOLE = encode_report(report_of(*PAIR, RECORD))

#: Text that stands for a number, which Python would write in another way.
HUGE = "1e400"

NUMBERS: list[Any] = [0, -1, 0.5, 5e-324, 1e30, 1e300, -1e300, math.nan, math.inf, HUGE, 2**64, 10**400]
VALUES: list[Any] = [*NUMBERS, None, True, "", "\ud800", [], {}, [[]]]


def change_round(**changes: Any) -> bytes:
    tree = json.loads(WHOLE)
    tree["records"][0]["rounds"][0].update(changes)
    return json.dumps(tree).replace(f'"{HUGE}"', HUGE).encode()


NAMED = {
    "huge": change_round(energy_u_j=1e300),
    "out of range": change_round(energy_j=HUGE),
    "huge count": change_round(tokens={"input": 1, "output": 10**400}),
    "no iterations": change_round(iterations=0),
    "negative count": change_round(requests=-1),
    "not a number": change_round(energy_j=math.nan),
    "wrong type": change_round(energy_j="12 J"),
    "invalid UTF-8": WHOLE.replace(b"test_decode", b"test_\xff\xfe", 1),
    "nested": WHOLE.replace(b'"extra_info":{', b'"extra_info":{"deep":' + b"[" * 100_000, 1),
    "nested from the start": b"[" * 100_000,
    "truncated": WHOLE[: len(WHOLE) // 2],
    "no JSON": b"\x00\x01",
}


@pytest.mark.parametrize("data", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("side", ["base.json", "head.json"])
def test_one_line_of_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    side: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base.json", "head.json"):
        Path(name).write_bytes(data if name == side else WHOLE)
    assert main(["compare", "base.json", "head.json"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"llenergy compare: {side}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("data", NAMED.values(), ids=NAMED)
def test_one_line_of_a_usage_error_of_pytest(pytester: pytest.Pytester, data: bytes) -> None:
    Path("base.json").write_bytes(data)
    message = usage_error(pytester, "--energy-compare=base.json", "--energy-fail-on=energy_j:3%")
    assert message.startswith("--energy-compare=base.json: ")


def _spots(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _spots(value, (*path, key))


def _get(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _mutate(data: bytes, rng: random.Random) -> bytes:
    """Cut, overwrite or extend the bytes, or change values of the JSON, most of them numbers."""
    kind, place = rng.random(), rng.randrange(len(data))
    if kind < 0.1:
        return data[:place]
    if kind < 0.2:
        return data[:place] + rng.randbytes(rng.choice([1, 3])) + data[place + 1 :]
    if kind < 0.25:
        return data[:place] + rng.choice([b"[", b'{"a":', b"1", b'"']) * 10_000 + data[place:]
    tree = json.loads(data)
    for _ in range(rng.choice([1, 1, 3])):
        every = list(_spots(tree))
        numbers = [path for path in every if type(_get(tree, path)) in (int, float)]
        path = rng.choice(numbers if rng.random() < 0.7 else every)
        parent = _get(tree, path[:-1])
        if type(parent[path[-1]]) in (int, float):
            parent[path[-1]] = rng.choice(NUMBERS)
        elif rng.random() < 0.2:
            del parent[path[-1]]
        elif isinstance(parent, list) and rng.random() < 0.2:
            parent.append(copy.deepcopy(parent[path[-1]]))
        else:
            parent[path[-1]] = rng.choice(VALUES)
    return json.dumps(tree).replace(f'"{HUGE}"', HUGE).encode()


@pytest.mark.parametrize(
    "cases",
    [pytest.param(range(200), id="200"), pytest.param(range(200, 3000), id="3000", marks=pytest.mark.slow)],
)
def test_random_changes_never_end_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cases: range
) -> None:
    monkeypatch.chdir(tmp_path)
    base, head = report_of(*PAIR), report_of(*PAIR)
    Path("base.json").write_bytes(encode_report(base))
    paired = PairedReport(
        schema_version=REPORT.schema_version,
        tool=REPORT.tool,
        pairs="6+6",
        complete=True,
        sessions=[],
        base=base,
        head=head,
        compared=compare_reports(base, head, ("base", "head"), [Criterion(gated=True)]),
    )
    sources = [WHOLE, WHOLE, encode_paired_report(paired)]
    forms = ["text", "json", "markdown", "junit", "gitlab", "github"]
    codes = set()
    for seed in cases:
        rng = random.Random(seed)
        whole = rng.choice(sources)
        Path("head.json").write_bytes(_mutate(whole, rng))
        names = ["base.json", "head.json"] if whole is WHOLE else ["head.json"]
        rng.shuffle(names)
        code = main(["compare", *names, "--format", rng.choice(forms)])
        err = capsys.readouterr().err
        assert code in range(6), seed
        assert code != 2 or (err.startswith("llenergy compare: ") and err.count("\n") == 1), (seed, err)
        codes.add(code)
    assert codes >= {0, 2, 5}
