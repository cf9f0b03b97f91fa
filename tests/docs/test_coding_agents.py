# SPDX-License-Identifier: Apache-2.0
"""The script of the page for coding agents finds the joules of any test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from pytest_llenergy.record.report import encode_report

from ..compare.runs import record_of, report_of
from .pages import ROOT, blocks


def test_the_script_prints_the_energy_of_every_record(tmp_path: Path) -> None:
    (script,) = [each.code for each in blocks(ROOT / "docs/coding-agents.md") if "import json" in each.code]
    tokens, plain, failed = (
        record_of("t.py::tokens"),
        record_of(
            "t.py::plain", rounds=[msgspec.structs.replace(each, tokens=None) for each in record_of().rounds]
        ),
        record_of("t.py::failed", status="failed", reason="boom", rounds=[], metrics={}),
    )
    (tmp_path / "energy.json").write_bytes(encode_report(report_of(tokens, plain, failed)))
    command = [sys.executable, "-X", "utf8", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert ran.stderr == ""
    lines = ran.stdout.splitlines()
    assert lines[0].endswith(" J/token")
    assert lines[1].endswith(" J")
    assert lines[2] == "t.py::failed failed boom"
