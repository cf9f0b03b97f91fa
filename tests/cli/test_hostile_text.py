# SPDX-License-Identifier: Apache-2.0
"""Text of a file is shown as text: no output has control or direction characters of it, nor markup."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history.store import Acceptance, Entry
from pytest_llenergy.record.report import PairedReport, Report

from .bad_files import COMMANDS, build_project, find_place, find_value, list_spots, run_command

#: Escape sequences, direction marks, characters without width, line breaks of all kinds, and markup.
HOSTILE = (
    "a\x1b[31mb\x1b]0;t\x07c\u202ed\u2066e\u2069f\u200bg\x00h\ni\rj\x08k\u2028l\u2029m\x85n\x9bo\ufeffp\x7fq\tr"
    "\U000e0041s<img src=x onerror=alert(1)>t|u`v@mention w[x](http://evil) ![y](http://evil)\n::error::z"
)

#: Types of what is stored.
TYPES: dict[str, Any] = {
    "report": Report,
    "journal": Report,
    "paired": PairedReport,
    "saved": Report,
    "saved pair": PairedReport,
    "job": PairedReport,
    "entries": Entry,
    "accepted": Acceptance,
}

#: Fields that must stay, so that the commands have something to show: those that pair tests and values, and
#: the texts that decide.
KEPT = {
    "metric",
    "started_at",
    "run_id",
    "time",
    "commit",
    "tests",
    "device_key",
    "workload_key",
    "source_digest",
}


def _poison(data: bytes, kind: type[Any]) -> bytes:
    """Put hostile text into every text and key that may have any, and in the place of what is missing."""
    tree = json.loads(data)
    accepted: dict[tuple[Any, ...], bool] = {}

    def change(path: tuple[Any, ...], old: tuple[Any, Any], new: tuple[Any, Any]) -> None:
        """Replace a key and its value, unless the type of the file refuses that; what it does is kept."""
        parent = find_value(tree, path[:-1])
        parent.pop(old[0]) if isinstance(parent, dict) else None
        parent[new[0]] = new[1]
        place = (*(type(each) if isinstance(each, int) else each for each in path), old[0] == new[0])
        if place not in accepted:
            accepted[place] = _is_valid(tree, kind)
        if not accepted[place]:
            parent.pop(new[0]) if isinstance(parent, dict) else None
            parent[old[0]] = old[1]

    for path in sorted(list_spots(tree), key=len, reverse=True):
        last, value = path[-1], find_value(tree, path)
        if (isinstance(value, str) or value is None) and last not in KEPT and path[-2:-1] != ("tests",):
            change(path, (last, value), (last, f"{HOSTILE}{value if last in ('id', 'name') else last}"))
        if isinstance(last, str) and path[-2:-1] != ("metrics",):
            value = find_value(tree, path)
            change(path, (last, value), (f"{HOSTILE}{last}", value))
    return json.dumps(tree).encode()


def _is_valid(tree: Any, kind: type[Any]) -> bool:
    try:
        msgspec.convert(tree, type=kind)
    except msgspec.ValidationError:
        return False
    return True


class _Tags(HTMLParser):
    """Notes the images and the handlers of events."""

    def __init__(self) -> None:
        super().__init__()
        self.suspicious: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.suspicious += [tag] if tag == "img" else []
        self.suspicious += [name for name, _ in attrs if name.startswith("on")]


def _check(line: str, text: str, form: str) -> None:
    plain = text.replace("\r\n", "\n") if form == "csv" else text
    invisible = {each for each in plain if not each.isprintable() and each != "\n"}
    assert not invisible, (line, invisible)
    if form in ("json", "pytest-benchmark", "github-action-benchmark", "bencher"):
        json.loads(text)
    elif form in ("markdown", "comment"):
        for markup in ("<img", "@mention", "](http", "!["):
            assert markup not in text, (line, markup)
    elif form == "html":
        tags = _Tags()
        tags.feed(text)
        assert not tags.suspicious, line
    elif form == "junit":
        ElementTree.fromstring(text)
    elif form == "github":
        assert not any(each.startswith("::error::z") for each in text.split("\n"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.parametrize("kind", TYPES)
def test_no_output_has_raw_text_of_a_file(project: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    content = build_project(project)[kind]
    if kind == "journal":
        header, *records = content.splitlines()
        whole = json.loads(header) | {"records": [json.loads(record) for record in records]}
        poisoned = json.loads(_poison(json.dumps(whole).encode(), Report))
        lines = [poisoned | {"records": []}, *poisoned["records"]]
        hostile = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    elif kind == "entries":
        hostile = b"".join(_poison(line, Entry) + b"\n" for line in content.splitlines())
    else:
        hostile = _poison(content, TYPES[kind]) + b"\n"
    assert hostile.count(b"u202e") > 5 or kind == "accepted"
    summary = project / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    find_place(project, kind).write_bytes(hostile)
    for line in COMMANDS[kind]:
        outcome = run_command(line)
        form = line.partition("--format=")[2].partition(" ")[0] or line.partition(" ")[0]
        # Reports of other machines are not merged.
        assert outcome.code in (0, 1, 3, 5) or line.startswith("merge rest"), (line, outcome.err)
        _check(line, outcome.out, form)
        _check(line, outcome.err, "text")
        if form == "json" and line.startswith("compare"):
            assert r"\u202e" in outcome.out, line
    if summary.exists():
        _check("summary", summary.read_text(), "markdown")


NAME = "bad\x1b[31m\u202e\udcff\u2028x.json"


def test_names_in_messages_are_escaped(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_project(project)
    for words in (
        ["report", NAME],
        ["report", NAME.removesuffix(".json")],
        ["report", "head.json", "-o", f"{NAME}/x"],
        ["report", "head.json", f"--columns={NAME}"],
        ["compare", NAME, "head.json"],
        ["compare", "head.json", NAME],
        ["compare", "base.json", "head.json", f"--metric={NAME}"],
        ["compare", "base.json", "head.json", f"--fail-on={NAME}"],
        ["compare", "base.json", "head.json", "--format=json", "-o", "."],
        ["export", NAME, "--format=csv"],
        ["merge", NAME, "-o", "x.json"],
        ["merge", "head.json", "-o", NAME.removesuffix(".json")],
        ["history", "add", NAME],
        ["history", "show", NAME, "--at=history"],
        ["history", "show", f"--at={NAME}"],
        ["history", "accept", NAME, "--reason=x", "--at=history"],
        ["comment", NAME],
        ["ab", "-o", f"{NAME}/x", "--", "pytest"],
        ["ab", "--base", NAME, "--", "pytest"],
        ["run", "--meter", NAME, "--", "true"],
        ["watch", "--gpus", NAME],
    ):
        assert main(words) == 2, words
        err = capfd.readouterr().err
        assert err.count("\n") == 1, (words, err)
        _check(" ".join(map(ascii, words)), err, "text")


@pytest.mark.parametrize(
    "words",
    [["report", "head.json", f"--{NAME}"], [NAME], ["report", "head.json", NAME], ["history", NAME]],
    ids=ascii,
)
def test_arguments_that_no_command_has_are_escaped(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    err = capfd.readouterr().err
    assert r"bad\x1b[31m\u202e" in err
    _check(ascii(words), err, "text")


def test_an_empty_name_is_one_line(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", ""]) == 2
    assert capfd.readouterr().err == "llenergy report: the name of the report is empty\n"


def test_names_of_saved_reports_and_directories_are_escaped(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_project(project)
    for name in (NAME, f"good{NAME}"):
        (project / ".llenergy" / name).write_bytes(b"{}")
    hostile = project / f"locks{NAME}"
    hostile.mkdir(mode=0o700)
    monkeypatch.setenv("LLENERGY_LOCK_DIR", str(hostile))
    for line in (
        "list",
        "list --format=json",
        "report nothing",
        "doctor --no-steps",
        "doctor --no-steps --format=json",
    ):
        for encoding in ("utf-8", "ascii"):
            outcome = run_command(line, encoding)
            assert outcome.code in (0, 1, 2), outcome
            _check(line, outcome.out, "json" if "json" in line else "text")
            _check(line, outcome.err, "text")


def test_output_in_ascii_is_never_a_traceback(project: Path) -> None:
    build_project(project)
    for lines in COMMANDS.values():
        for line in lines:
            if "html" not in line:
                assert run_command(line, "ascii").code != 2, line
