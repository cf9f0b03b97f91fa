# SPDX-License-Identifier: Apache-2.0
"""Reports with any content: a comparison or one line of error, never a traceback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.report import encode_report

from ..plugin.inner import usage_error
from ..record.reports import RECORD
from .runs import record_of, report_of, scaled

PAIR = [record_of(), record_of("t.py::b", scaled(2))]
WHOLE = encode_report(report_of(*PAIR, RECORD))

#: Text that stands for a number, which Python would write in another way.
HUGE = "1e400"


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
