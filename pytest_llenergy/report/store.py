# SPDX-License-Identifier: Apache-2.0
"""Read and write report files, local and remote, and the journal of a run."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import (
    SCHEMA_VERSION,
    PairedReport,
    Report,
    decode_lean_report,
    decode_paired_report,
    decode_report,
    encode_report,
    is_paired_report,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


# Files elsewhere, by address: whatever fsspec reaches (http, S3, GCS, …).
#
# Reading has a limit for size and one for time, whatever the protocol. Addresses are shown without what may
# be secret in them: user, password and query.

T = TypeVar("T")

#: A scheme, or several that are chained. A path may have a colon in it, and ``C:\\`` is one.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")

#: What follows the scheme, wherever the address stands: behind the name of an option, among other options.
REST = re.compile(r"://\S*")

#: Addresses, as shown, that lack what their protocol cannot do without.
HOSTLESS = re.compile("(?:^|::)(ftps?|sftp|ssh|https?)://(?:/|$)")

#: Ten thousand tests of twelve rounds take 170 MB.
MAX_FILE_BYTES = 1 << 30

#: For reading or writing one file.
REMOTE_TIMEOUT_S = 120.0


def is_url(text: str) -> bool:
    """Whether it is an address, and not a path."""
    return URL.match(text) is not None


def redact_url(address: str) -> str:
    """Without what may be a secret, in none of the addresses of a chain."""
    # First, since a password may have any character.
    place = re.sub("://[^/]*@", "://", address)
    return re.split("[?#]", place, maxsplit=1)[0]


def redact_urls(words: Iterable[str]) -> list[str]:
    """Arguments of a command line, with every address that is in one as ``shown`` has it."""
    return [_without_secrets(word) for word in words]


def _without_secrets(word: str) -> str:
    if word.count("://") == 1:
        # It may have spaces in it.
        before, _, rest = word.partition("://")
        return before + redact_url(f"://{rest}")
    return REST.sub(lambda found: redact_url(found[0]), word)


def fetch_url(address: str) -> bytes:
    """A whole file. Raises ``ReportError`` in one line, whatever keeps it from being read."""

    def read() -> bytes:
        system, path = open_file_system(address)
        parts: list[bytes] = []
        room = MAX_FILE_BYTES + 1
        with system.open(path, "rb") as file:
            # A stream gives what has arrived so far.
            while room and (part := file.read(room)):
                parts.append(part)
                room -= len(part)
        return b"".join(parts)

    data = run_with_timeout(address, read)
    if len(data) > MAX_FILE_BYTES:
        raise ReportError(f"{redact_url(address)}: more than {MAX_FILE_BYTES >> 20} MiB, which no report is")
    return data


def open_file_system(address: str) -> tuple[AbstractFileSystem, str]:
    """What fsspec has for an address, and the path in it.

    Raises ``ReportError`` for one without a host, and where fsspec, or what it needs for the scheme, is not
    installed. Some protocols connect here: for use within ``in_time``.
    """
    hostless = HOSTLESS.search(redact_url(address))
    if hostless is not None:
        raise ReportError(f"{redact_url(address)}: names no host; expected {hostless[1]}://host/path")
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ReportError(
            f"{redact_url(address)}: addresses need fsspec; pip install 'pytest-llenergy[remote]'"
        ) from None
    try:
        system, path = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ReportError(f"{redact_url(address)}: {_clause(error, address)}") from None
    return system, path


def run_with_timeout(address: str, work: Callable[[], T]) -> T:
    """What ``work`` gives, within the time that there is for it. Raises ``ReportError``.

    It is done in a thread, since not every protocol knows a limit; one that hangs is left behind.
    """
    done: dict[str, Any] = {}

    def run() -> None:
        try:
            done["value"] = work()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=run, name="llenergy-remote", daemon=True)
    thread.start()
    thread.join(REMOTE_TIMEOUT_S)
    if not done:
        raise ReportError(f"{redact_url(address)}: no answer within {REMOTE_TIMEOUT_S:g} s")
    error = done.get("error")
    if isinstance(error, ReportError):
        raise error
    if error is not None:
        raise ReportError(f"{redact_url(address)}: {_why(error, address)}") from None
    value: T = done["value"]
    return value


def _why(error: BaseException, address: str) -> str:
    # For fsspec a server that cannot be reached has no such file either.
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "access is refused"
    if isinstance(status, int):
        return f"the server answers {status} {getattr(error, 'message', '')}".rstrip()
    return f"cannot be reached ({_clause(error, address)})"


def _clause(error: BaseException, address: str) -> str:
    """In one line, and without the secrets of the address."""
    told = " ".join(str(error).split()) or type(error).__name__
    return told.replace(address, redact_url(address))


# The journal: one line a finished test, on disk before the next one starts.
#
# A run that is killed leaves it behind; a report that was written whole makes it superfluous. Each run has
# a file of its own, so that no run touches what another has left.

JOURNAL_SUFFIX = ".journal.jsonl"

#: How a line begins that is no record.
HEADER = b'{"schema_version"'


def journal_path(report: Path, run_id: str) -> Path:
    """Beside the report, named after it and the run."""
    return report.with_name(f"{report.stem}.{run_id}{JOURNAL_SUFFIX}")


def find_journals(report: Path) -> list[Path]:
    """Journals beside a report: those of runs that did not end, or have not yet."""
    return sorted(report.parent.glob(f"{report.stem}.*{JOURNAL_SUFFIX}"))


class Journal:
    """Append-only file: the report without records first, then one record a line.

    Of several lines for one attempt at a test the last counts.

    Raises ``OSError`` when a line cannot be written; the lines before it stay whole.
    """

    def __init__(self, path: Path, header: Report) -> None:
        self.path = path
        # Unbuffered: what is left in a buffer on a full disk would fail again at every later call.
        self._file = path.open("ab", buffering=0)
        self._append(msgspec.json.encode(header))

    def add(self, record: Record) -> None:
        """Append a record and make sure that it is on disk."""
        self._append(msgspec.json.encode(record))

    def begin_anew(self, header: Report) -> None:
        """Say the report without records once more: the last one counts."""
        self._append(msgspec.json.encode(header))

    def _append(self, line: bytes) -> None:
        whole = self._file.tell()
        try:
            left = memoryview(line + b"\n")
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(whole)
            raise

    def close(self, *, remove: bool) -> None:
        """Close it; ``remove`` when everything in it is safe elsewhere."""
        self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


def decode_journal(data: bytes, origin: str) -> Report:
    """The report that a journal amounts to, marked incomplete.

    A last line that was cut off in the middle is left out: its test had not finished being written.
    Raises ``ReportError`` when the file is no journal.
    """
    whole = [line for line in data.split(b"\n")[:-1] if line]
    if not whole:
        raise ReportError(f"{origin}: not a journal of pytest --energy-report (no complete line)")
    try:
        header = msgspec.json.decode(whole[0], type=Report)
        records: dict[tuple[str, int], Record] = {}
        for line in whole[1:]:
            if line.startswith(HEADER):
                header = msgspec.json.decode(line, type=Report)
                continue
            record = msgspec.json.decode(line, type=Record)
            # What became of a test later counts.
            records[record.id, record.attempt] = record
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: not a journal of schema version {SCHEMA_VERSION} ({error})") from None
    return msgspec.structs.replace(header, records=list(records.values()))


# Reports in files: written whole or not at all, read strictly.

#: A path, or the text of an address.
Location: TypeAlias = Path | str

#: Addresses of files on this host.
LOCAL = ("file://", "local://")


def write_report(report: Report, path: Path) -> None:
    """Replace ``path`` in one step. Raises ``ReportError``; what was there before is then untouched."""
    replace_file(path, encode_report(report))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises ``ReportError``; what was there before is then untouched."""
    try:
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(scratch).chmod(0o666 & ~_umask())
            Path(scratch).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(scratch).unlink()
            raise
    except OSError as error:
        raise ReportError(f"{path}: could not be written ({error.strerror})") from error


def read_report(place: Location, *, lean: bool = False) -> Report:
    """A report or a journal. Raises ``ReportError`` naming the file and what is wrong with it.

    ``lean`` leaves out of a report what comparisons do not look at, see ``model.lean``.
    """
    return decode_report_or_journal(read_file(place), location_name(place), lean=lean)


def decode_report_or_journal(data: bytes, name: str, *, lean: bool = False) -> Report:
    """What a report or a journal of this name holds. Raises ``ReportError``."""
    if name.endswith(JOURNAL_SUFFIX):
        return decode_journal(data, name)
    return decode_lean_report(data, name) if lean else decode_report(data, name)


def read_paired_report(place: Location) -> PairedReport:
    """What ``llenergy ab`` wrote. Raises ``ReportError`` naming the file and what is wrong with it."""
    return decode_paired_report(read_file(place), location_name(place))


def read_report_or_paired(place: Location) -> Report | PairedReport:
    """A report, a journal, or what ``llenergy ab`` wrote. Raises ``ReportError``."""
    name, data = location_name(place), read_file(place)
    if name.endswith(JOURNAL_SUFFIX):
        return decode_journal(data, name)
    return decode_paired_report(data, name) if is_paired_report(data) else decode_report(data, name)


def read_file(place: Location) -> bytes:
    """A file, here or elsewhere. Raises ``ReportError``."""
    if isinstance(place, str):
        return fetch_url(place)
    try:
        return place.read_bytes()
    except OSError as error:
        raise ReportError(f"{place}: {error.strerror}") from None


def check_not_overwritten(output: Path, places: Iterable[Location]) -> None:
    """Raises ``ReportError`` for an output that is one of the files to read, by whatever name or link."""
    for place in places:
        if isinstance(place, str) and not place.startswith(LOCAL):
            continue
        path = Path(place.partition("://")[2]) if isinstance(place, str) else place
        try:
            same = path.samefile(output)
        except OSError:
            # One of them is not there.
            same = False
        if same:
            raise ReportError(
                f"{output}: the same file as {location_name(place)}, which is read; name another"
            )


def parse_location(text: str) -> Location:
    """A path, or an address where it begins with a scheme."""
    return text if is_url(text) else Path(text)


def location_name(place: Location) -> str:
    """How messages and reports name it."""
    return redact_url(place) if isinstance(place, str) else str(place)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
