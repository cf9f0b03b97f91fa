# SPDX-License-Identifier: Apache-2.0
"""The directory in which the blocks of a page run: a user's project, with everything fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.report import PairedReport, Report, encode_paired_report, encode_report
from pytest_llenergy.report.store import Journal

from ..compare.runs import record_of, scaled
from ..compare.sessions import session
from ..conftest import TEN_WATTS
from .pages import ROOT, block

#: The test behind ``pytest benchmarks``.
BENCHMARK = """
import pytest
@pytest.mark.parametrize("batch_size", [1])
def test_decode(energy, backend, prompts, batch_size):
    energy(backend.generate, prompts[:batch_size], max_new_tokens=16)
"""

#: The page with the example of a backend.
EXTENDING = ROOT / "docs" / "extending.md"

#: Loads the module ``stand_in``, which gives the meter and the backend.
STAND_IN = "-p stand_in -p no:cacheprovider "

#: Options that come before those of a page, which override them.
QUICK = STAND_IN + (
    "--energy-backend=tiny --energy-model=random:llama-tiny "
    "--energy-rounds=2 --energy-warmup=0 --energy-budget=0.1 --energy-isolation=run"
)

#: Programs that options of the pages name. The server has a prefix cache, and its last argument is the port.
PROGRAMS = {
    "llama-server": f"""for port; do :; done
exec {sys.executable} {ROOT}/tests/backends/servers/scripted.py "$port" cached=prefix first=0.005
""",
    "my-meter": "",
    "vllm": "",
}

#: Reports, and the day of each.
DAYS = {"base.json": 0, "energy.json": 1, "main.json": 1, "head.json": 2}

#: The commit and the journal that pages mention.
COMMIT = "3f2a91c04d5e3f2a91c04d5e3f2a91c04d5e3f2a"
JOURNAL = "energy.20260102T030405-a1b2c3.journal.jsonl"


def set_up(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the project in pytester's directory, for runs in this process and in others."""
    path = pytester.path
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--strict-config"\n',
        "stand_in.py": TEN_WATTS + block(EXTENDING, "conftest.py").code,
        # Pages ask every backend for one precision; this one computes without any.
        "tiny_backend.py": block(EXTENDING, "tiny_backend.py").code.replace(
            '("size_mb",)', '("size_mb", "dtype")'
        ),
        "benchmarks/test_decode.py": BENCHMARK,
        **{f"programs/{name}": f"#!/bin/sh\n{script}" for name, script in PROGRAMS.items()},
    }
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    for name in PROGRAMS:
        (path / "programs" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(path / "programs"), prepend=os.pathsep)
    reports = {name: _report(day) for name, day in DAYS.items()}
    for name, report in reports.items():
        (path / name).write_bytes(encode_report(report))
    (path / ".llenergy" / "ab").mkdir(parents=True)
    (path / ".llenergy" / "main.json").write_bytes(encode_report(reports["main.json"]))
    (path / ".llenergy" / "ab" / "ab.json").write_bytes(
        encode_paired_report(_paired(reports["base.json"], reports["head.json"]))
    )
    journal = Journal(path / JOURNAL)
    journal.add(msgspec.structs.replace(reports["energy.json"], records=[]))
    for record in reports["energy.json"].records:
        journal.add(record)
    journal.close(remove=False)
    pytester.syspathinsert(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(ROOT)]))
    monkeypatch.setenv("PYTEST_ADDOPTS", STAND_IN)
    return path


def _report(day: int) -> Report:
    """Return a run of two tests; later days take a little more energy."""
    factor = 1 + day / 50
    tests = ("test_decode[8]", "test_decode[1]")
    records = [record_of(f"benchmarks/test_decode.py::{name}", scaled(factor)) for name in tests]
    made = session(day, *records)
    source = (
        msgspec.structs.replace(made.source, commit=COMMIT) if day == DAYS["energy.json"] else made.source
    )
    return msgspec.structs.replace(made, source=source)


def _paired(base: Report, head: Report) -> PairedReport:
    return PairedReport(
        schema_version=base.schema_version,
        tool=base.tool,
        pairs="6+6",
        complete=True,
        sessions=[],
        base=base,
        head=head,
        compared=compare_reports(base, head, ("base", "head"), [Criterion()]),
    )
