# SPDX-License-Identifier: Apache-2.0
"""A project with every kind of stored file, the commands that read each, and ways to spoil one."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.history.add import add_run
from pytest_llenergy.compare.history.store import Store
from pytest_llenergy.record.record import Terms
from pytest_llenergy.record.report import PairedReport, Session, encode_paired_report, encode_report
from pytest_llenergy.record.served import ServedRequests, TokenGaps
from pytest_llenergy.report.store import Journal

from ..compare.runs import record_of, report_of, scaled
from ..record.reports import RECORD, REPORT, ROUND

#: The same inputs in each run. One that fails is named as drawn: to simplify it takes long.
FUZZ = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

#: Where each kind of file lies in the project.
PLACES = {
    "report": "head.json",
    "journal": "head.0190.journal.jsonl",
    "paired": "ab.json",
    "saved": ".llenergy/kept.json",
    "saved pair": ".llenergy/ab.json",
    "job": "jobs/linux/energy.json",
    "entries": "history/{device}/20260102T030405Z-run.jsonl",
    "accepted": "history/accepted/20260103T000000Z-abc.jsonl",
}

REPORT_FORMATS = ("text", "markdown", "html")
COMPARE_FORMATS = ("text", "markdown", "json", "github", "gitlab", "junit", "html")
EXPORT_FORMATS = ("pytest-benchmark", "github-action-benchmark", "bencher", "openmetrics", "csv")
HISTORY_FORMATS = ("text", "markdown", "html", "json")


def _each(words: str, formats: Sequence[str]) -> list[str]:
    return [f"{words} --format={form}" for form in formats]


#: Every command that reads a kind of file.
COMMANDS: dict[str, list[str]] = {
    "report": [
        *_each("report head.json", REPORT_FORMATS),
        "report head.json -vv --columns=backend,model,device,meter,energy_j",
        "report head.json --format=html --history=history",
        *_each("compare base.json head.json", COMPARE_FORMATS),
        "compare head.json base.json --across --metric=mean_power_w --history=history",
        *_each("export head.json", EXPORT_FORMATS),
        "merge head.json -o merged.json",
        "merge rest.json head.json -o merged.json",
        "history add head.json --allow-dirty --at=added",
    ],
    "journal": [
        *_each("report head.0190.journal.jsonl", REPORT_FORMATS),
        "compare other.json head.0190.journal.jsonl",
        "export head.0190.journal.jsonl --format=csv",
        "merge head.0190.journal.jsonl -o merged.json",
        "history add head.0190.journal.jsonl --allow-dirty --at=added",
    ],
    "paired": [
        *_each("compare ab.json", COMPARE_FORMATS),
        *_each("export ab.json", EXPORT_FORMATS),
        "export ab.json --format=csv --side=base",
        "comment ab.json --dry-run",
    ],
    "saved": ["list", "list --format=json", "report kept", "compare base.json kept"],
    "saved pair": ["list", "compare ab"],
    "job": ["comment jobs --dry-run"],
    "entries": [
        *_each("history show --at=history", HISTORY_FORMATS),
        "history accept abc1 --reason=new --at=history",
        "report base.json --format=html --history=history",
        "compare base.json other.json --history=history",
    ],
    "accepted": [
        *_each("history show --at=history", HISTORY_FORMATS),
        "report base.json --format=html --history=history",
        "compare base.json other.json --history=history",
    ],
}

#: Commands that go on without a file that they cannot read, and name it.
TOLERANT = ("list", "comment jobs", "compare base.json other.json")


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def run_command(line: str, encoding: str = "utf-8") -> Outcome:
    """Run a command in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = int(ended.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        # Data is UTF-8 in every encoding.
        texts.append(buffer.getvalue().decode())
    return Outcome(code, *texts)


def full_record(name: str, factor: float = 1.0) -> Any:
    """Return a record of six rounds in which every field has a value."""
    terms = Terms(edges_j=0.1, outside_j=0.1, resolution_j=0.1, coverage_j=0.0)
    served = ServedRequests(
        sent_s=[0.0, 0.1],
        time_to_first_token_s=[0.1, 0.2],
        end_to_end_latency_s=[0.5, 0.6],
        output_tokens=[8, 8],
        time_per_output_token_s=[0.01, None],
        token_gaps=TokenGaps(gap_s=[0.01, 0.02], count=[6, 1]),
    )
    record = record_of(name, scaled(factor))
    rounds = [
        msgspec.structs.replace(
            ROUND,
            **{field: getattr(each, field) for field in ("energy_j", "iterations", "tokens")},
            terms=terms,
            served=served,
        )
        for each in record.rounds
    ]
    return msgspec.structs.replace(record, rounds=rounds, windows=RECORD.windows, flags=RECORD.flags)


def build_project(root: Path) -> dict[str, bytes]:
    """Write one valid file of each kind, and return their contents by kind."""
    base, other, head = (
        report_of(full_record("t.py::a", factor), full_record("t.py::b")) for factor in (1, 1.01, 1.2)
    )
    head = msgspec.structs.replace(head, records=[*head.records, RECORD])
    compared = compare_reports(base, head, ("base.json", "head.json"), [Criterion(gated=True)])
    verdicts = [each for each in compared.comparisons if each.id == "t.py::a"]
    head.records[0] = msgspec.structs.replace(head.records[0], comparisons=verdicts)
    paired = PairedReport(
        schema_version=REPORT.schema_version,
        tool=REPORT.tool,
        pairs="6+6",
        complete=True,
        sessions=[
            Session(
                side="base", run_id="1", started_at="2026-01-02T03:04:05Z", finished_at=None, exit_status=0
            )
        ],
        base=base,
        head=head,
        compared=compared,
    )
    journal = root / "journal"
    root.mkdir(parents=True, exist_ok=True)
    file = Journal(journal, msgspec.structs.replace(base, records=[]))
    for record in base.records:
        file.add(record)
    file.close(remove=False)
    commits = [
        msgspec.structs.replace(REPORT.source, commit=f"abc{number}", dirty=False) for number in range(5)
    ]
    store = Store(root / "history")
    for number, source in enumerate(commits):
        run = msgspec.structs.replace(
            base.run, id=f"run{number}", started_at=f"2026-01-0{number + 2}T03:04:05Z"
        )
        add_run(msgspec.structs.replace(base, source=source, run=run), "base.json", store)
    (device,) = store.folders()
    accepted = {"schema_version": 1, "commit": "abc1", "tests": ["t.py::a"], "reason": "new", "time": "2026"}
    contents = {
        "report": encode_report(head),
        "journal": journal.read_bytes(),
        "paired": encode_paired_report(paired),
        "saved": encode_report(head),
        "saved pair": encode_paired_report(paired),
        "job": encode_paired_report(paired),
        "entries": store.read(device, store.files(device)[0]),
        "accepted": json.dumps(accepted).encode() + b"\n",
    }
    for kind, data in contents.items():
        path = root / PLACES[kind].format(device=device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "base.json").write_bytes(encode_report(base))
    (root / "other.json").write_bytes(encode_report(other))
    rest = msgspec.structs.replace(head, records=[full_record("t.py::rest")])
    (root / "rest.json").write_bytes(encode_report(rest))
    journal.unlink()
    return contents


def find_place(root: Path, kind: str) -> Path:
    (device,) = (each.name for each in (root / "history").iterdir() if each.name != "accepted")
    return root / PLACES[kind].format(device=device)


#: Text that stands for a number, which Python would write in another way.
HUGE = "1e400"

NUMBERS: list[Any] = [0, -1, 0.5, 5e-324, 1e30, 1e300, -1e308, math.nan, math.inf, HUGE, 2**64, 10**400]

TEXTS = [
    "",
    "\ud800",
    "\x1b[31m",
    "\u202e",
    "\x00",
    "\n",
    "x" * 100_000,
    "2026-13-99T99:99:99Z",
    "%s{0}",
    "../../x",
]


def _nest(depth: int, kind: str) -> Any:
    # Python cannot write deep structures, so the bytes are put in afterwards.
    return f"@nest {kind} {depth}@"


VALUES: list[Any] = [
    *NUMBERS,
    *TEXTS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"a": None},
    _nest(50_000, "["),
    _nest(50_000, "{"),
]


def list_spots(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below a node."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from list_spots(value, (*path, key))


def find_value(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def write_json(tree: Any) -> bytes:
    text = json.dumps(tree).replace(f'"{HUGE}"', HUGE)
    for opening, closing in (("[", "]"), ('{\\"a\\":', "}")):
        mark = json.dumps(_nest(50_000, opening[0]))
        if mark in text:
            text = text.replace(mark, opening.replace("\\", "") * 50_000 + "1" + closing * 50_000)
    return text.encode()


@st.composite
def spoiled_trees(draw: st.DrawFn, data: bytes) -> bytes:
    """Change values, keys and the order of the JSON in one of the lines, or in the whole."""
    lines = data.split(b"\n")[:-1] if data.count(b"\n") and _is_json(data.split(b"\n")[0]) else [data]
    number = draw(st.integers(0, len(lines) - 1))
    tree = json.loads(lines[number])
    twice = False
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        path = draw(st.sampled_from(list(list_spots(tree)) or [()]))
        if not path:
            break
        parent = find_value(tree, path[:-1])
        value = parent[path[-1]]
        change = draw(st.sampled_from(["value"] * 6 + ["remove", "repeat", "reverse", "rename", "twice"]))
        if change == "remove":
            del parent[path[-1]]
        elif change == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(value))
        elif change == "reverse" and isinstance(value, list):
            value.reverse()
        elif change == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["", "unknown", "\ud800", "x" * 1000, "\x1b[0m"]))] = parent.pop(
                path[-1]
            )
        elif change == "twice":
            twice = True
        else:
            kinds = NUMBERS if type(value) in (int, float) and draw(st.booleans()) else VALUES
            parent[path[-1]] = copy.deepcopy(draw(st.sampled_from(kinds)))
    spoiled = write_json(tree)
    if twice and spoiled.startswith(b"{"):
        spoiled = spoiled[:-1] + b"," + spoiled[1:]
    lines[number] = spoiled
    return b"\n".join(lines) + (b"\n" if len(lines) > 1 or data.endswith(b"\n") else b"")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@st.composite
def spoiled_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut, flip, insert or encode bytes."""
    place = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "line", "encode"]))
    if kind == "cut":
        return data[:place]
    if kind == "flip":
        return (
            data[:place]
            + bytes(b ^ draw(st.integers(1, 255)) for b in data[place : place + 1])
            + data[place + 1 :]
        )
    if kind == "line":
        lines = data.split(b"\n")
        number = draw(st.integers(0, len(lines) - 1))
        changed = draw(st.sampled_from([[], [lines[number]] * 2, [b""], [b"null"], [b"[]"]]))
        return b"\n".join([*lines[:number], *changed, *lines[number + 1 :]])
    if kind == "encode":
        text = data.decode()
        return draw(
            st.sampled_from(
                [
                    b"\xef\xbb\xbf" + data,
                    text.encode("utf-16"),
                    text.encode("utf-32"),
                    gzip.compress(data, 1),
                    data * 2,
                    data[::-1],
                ]
            )
        )
    extra = draw(
        st.sampled_from(
            [
                b"\x00",
                b"\xff\xfe",
                b"\xed\xa0\x80",
                b"\\ud800",
                b"[" * 20_000,
                b'{"a":' * 20_000,
                b"\xf4\x90\x80\x80",
                b"//",
                b",",
            ]
        )
    )
    return data[:place] + extra + data[place:]


def spoiled(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy of damaged versions of a file, most of them JSON."""
    return st.one_of(spoiled_trees(data), spoiled_trees(data), spoiled_bytes(data))


#: Whole contents that are no file of any kind, except some for a tolerant reader.
WHOLE = {
    "empty": b"",
    "blank": b" \n\n",
    "null": b"null\n",
    "list": b"[]\n",
    "object": b"{}\n",
    "number": b"1e400\n",
    "string": b'"report"\n',
    "surrogate": b'{"schema_version": 1, "\\ud800": "\\udfff"}\n',
    "newer": b'{"schema_version": 999}\n',
    "older": b'{"schema_version": -1}\n',
    "NUL": b"\x00" * 4096,
    "not UTF-8": b"\xff\xfe\x00\xd8",
    "nested list": b"[" * 200_000,
    "nested object": b'{"a":' * 200_000,
    "nested and closed": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "nested after the version": b'{"schema_version": 1, "compared": ' + b"[" * 200_000,
    "gzip": gzip.compress(b"{}"),
    "UTF-16": '{"schema_version": 1}'.encode("utf-16"),
    "BOM": b'\xef\xbb\xbf{"schema_version": 1}\n',
    "HTML": b"<!doctype html><title>404</title>\n",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
}
