# SPDX-License-Identifier: Apache-2.0
"""Reports at an address behave like files; errors are one line."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.errors import ReportError
from pytest_llenergy.model import files
from pytest_llenergy.model.report import encode_report
from pytest_llenergy.report import remote
from pytest_llenergy.report.remote import is_url, redact_arguments, redact_url
from pytest_llenergy.report.store import parse_location, read_report

from ..compare.runs import record_of, report_of, scaled

fsspec = pytest.importorskip("fsspec")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        pass

    def do_HEAD(self) -> None:
        if "stream" in self.path:
            self.send_response(200)
            self.end_headers()
        else:
            super().do_HEAD()

    def do_GET(self) -> None:
        if "broken" in self.path:
            self.send_error(503)
        elif "stream" in self.path:
            self.in_pieces(Path(self.translate_path(self.path)).read_bytes())
        else:
            super().do_GET()

    def in_pieces(self, data: bytes) -> None:
        """Without telling how long it is, and with pauses."""
        self.send_response(200)
        self.end_headers()
        for start in range(0, len(data), 1 + len(data) // 3):
            self.wfile.write(data[start : start + 1 + len(data) // 3])
            self.wfile.flush()
            time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of files in ``tmp_path``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("text", "yes"),
    [
        ("https://x/base.json", True),
        ("s3://bucket/base.json", True),
        ("simplecache::https://x/base.json", True),
        ("git+ssh://x", True),
        ("base.json", False),
        ("C:\\reports\\base.json", False),
        ("C:/base.json", False),
        ("2026-01-02T03:04:05.json", False),
        ("a/b://c.json", False),
        ("://x", False),
    ],
)
def test_address_begins_with_a_scheme(text: str, yes: bool) -> None:
    assert is_url(text) is yes
    assert isinstance(parse_location(text), str if yes else Path)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://x/base.json?X-Amz-Signature=secret", "https://x/base.json"),
        ("https://user:pass@word@x/a@b.json#f", "https://x/a@b.json"),
        ("s3://bucket/base.json", "s3://bucket/base.json"),
        ("http://bob:hu#nter2@h/x.json", "http://h/x.json"),
        ("http://bob:hu?nter2@h/x.json", "http://h/x.json"),
        ("zip://x.json::http://bob:hunter2@x/y.zip?token=secret", "zip://x.json::http://x/y.zip"),
    ],
)
def test_secrets_of_an_address_are_hidden(address: str, message: str) -> None:
    assert redact_url(address) == message


def test_secrets_on_the_command_line_are_not_recorded(
    quick: pytest.Pytester, server: str, tmp_path: Path
) -> None:
    (tmp_path / "base.json").write_bytes(encode_report(report_of(record_of())))
    quick.makepyfile("import time\ndef test_a(energy): energy(time.sleep, 0.01)\n")
    address = server.replace("://", "://bob:hunter2@") + "/base.json?token=s3cret"
    more = ("--energy-report", f"--energy-compare={address}", "-o", f"addopts=--deselect={address} -q")
    quick.runpytest_subprocess(*more)
    text = (quick.path / "energy.json").read_text()
    assert f"--energy-compare={server}/base.json" in text
    assert f"addopts=--deselect={server}/base.json" in text
    assert "hunter2" not in text
    assert "s3cret" not in text


def test_two_reports_are_compared_by_address(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.json").write_bytes(encode_report(report_of(record_of())))
    fsspec.filesystem("memory").pipe_file(
        "/reports/head.json", encode_report(report_of(record_of(joules=scaled(1.1))))
    )
    arguments = [f"{server}/base.json?token=secret", "memory://reports/head.json", "--format=json"]
    assert main(["compare", *arguments]) == 1
    out = capsys.readouterr().out
    assert f'"origin": "{server}/base.json"' in out
    assert "secret" not in out


def test_a_server_without_content_length_is_read(server: str, tmp_path: Path) -> None:
    report = report_of(record_of())
    (tmp_path / "stream.json").write_bytes(encode_report(report))
    assert read_report(f"{server}/stream.json") == report


def test_read_only_address_cannot_keep_a_history(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(record_of())
    (tmp_path / "energy.json").write_bytes(encode_report(report))
    place = f"--at={server}/history"
    assert main(["history", "add", "--allow-dirty", f"{server}/energy.json", place]) == 2
    message = f"llenergy history: {server}/history: the server answered 501 Unsupported method ('PUT')\n"
    assert capsys.readouterr().err == message


def refusal(address: str) -> str:
    with pytest.raises(ReportError) as caught:
        read_report(address)
    return str(caught.value)


def test_a_missing_remote_file_is_reported(server: str) -> None:
    assert refusal(f"{server}/none.json") == f"{server}/none.json: no such file"
    assert refusal("memory://none.json") == "memory://none.json: no such file"


def test_a_server_that_refuses_access_is_reported(server: str) -> None:
    message = refusal(f"{server}/broken.json?token=secret")
    assert message.startswith(f"{server}/broken.json: ")
    assert "503" in message
    assert "secret" not in message
    assert "\n" not in message


def test_a_server_that_does_not_exist_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/base.json"
        message = refusal(f"{address}?token=secret")
    assert message == f"{address}: cannot be reached (Connection refused)"


def test_a_server_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REMOTE_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/base.json"
        assert refusal(address) == f"{address}: no answer within 0.3 s"


def test_a_remote_file_that_is_too_large_is_refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "large.json").write_bytes(b" " * ((1 << 20) + 1))
    assert (
        refusal(f"{server}/large.json")
        == f"{server}/large.json: larger than 1 MiB, the limit; name a smaller file"
    )
    (tmp_path / "fits.json").write_bytes(b" " * (1 << 20))
    assert "empty, expected a JSON report" in refusal(f"{server}/fits.json")


def test_an_unknown_scheme_is_reported() -> None:
    assert refusal("gopher://x/base.json") == "gopher://x/base.json: Protocol not known: gopher"


def test_missing_fsspec_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert refusal("https://x/base.json") == (
        "https://x/base.json: URLs need fsspec; pip install 'pytest-llenergy[remote]'"
    )


def test_address_may_contain_spaces() -> None:
    word = "--energy-compare=https://h/my report.json?token=s3cret"
    assert redact_arguments([word]) == ["--energy-compare=https://h/my report.json"]
