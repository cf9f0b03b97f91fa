# SPDX-License-Identifier: Apache-2.0
"""Files elsewhere, by address: whatever fsspec reaches (http, S3, GCS, …).

Reading has a limit for size and one for time, whatever the protocol. Addresses are shown without what may be
secret in them: user, password and query.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_llenergy.errors import ReportError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

#: A scheme, or several that are chained. A path may have a colon in it, and ``C:\\`` is one.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")

#: What follows the scheme, wherever the address stands: behind the name of an option, among other options.
REST = re.compile(r"://\S*")

#: Addresses, as shown, that lack what their protocol cannot do without.
HOSTLESS = re.compile("(?:^|::)(ftps?|sftp|ssh|https?)://(?:/|$)")

#: Ten thousand tests of twelve rounds take 170 MB.
MOST_BYTES = 1 << 30

#: For reading or writing one file.
TIMEOUT_S = 120.0


def is_address(text: str) -> bool:
    """Whether it is an address, and not a path."""
    return ADDRESS.match(text) is not None


def shown(address: str) -> str:
    """Without what may be a secret, in none of the addresses of a chain."""
    # First, since a password may have any character.
    place = re.sub("://[^/]*@", "://", address)
    return re.split("[?#]", place, maxsplit=1)[0]


def without_secrets(words: Iterable[str]) -> list[str]:
    """Arguments of a command line, with every address that is in one as ``shown`` has it."""
    return [_without_secrets(word) for word in words]


def _without_secrets(word: str) -> str:
    if word.count("://") == 1:
        # It may have spaces in it.
        before, _, rest = word.partition("://")
        return before + shown(f"://{rest}")
    return REST.sub(lambda found: shown(found[0]), word)


def fetch(address: str) -> bytes:
    """A whole file. Raises ``ReportError`` in one line, whatever keeps it from being read."""

    def read() -> bytes:
        system, path = file_system(address)
        parts: list[bytes] = []
        room = MOST_BYTES + 1
        with system.open(path, "rb") as file:
            # A stream gives what has arrived so far.
            while room and (part := file.read(room)):
                parts.append(part)
                room -= len(part)
        return b"".join(parts)

    data = in_time(address, read)
    if len(data) > MOST_BYTES:
        raise ReportError(f"{shown(address)}: more than {MOST_BYTES >> 20} MiB, which no report is")
    return data


def file_system(address: str) -> tuple[AbstractFileSystem, str]:
    """What fsspec has for an address, and the path in it.

    Raises ``ReportError`` for one without a host, and where fsspec, or what it needs for the scheme, is not
    installed. Some protocols connect here: for use within ``in_time``.
    """
    hostless = HOSTLESS.search(shown(address))
    if hostless is not None:
        raise ReportError(f"{shown(address)}: names no host; expected {hostless[1]}://host/path")
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ReportError(
            f"{shown(address)}: addresses need fsspec; pip install 'pytest-llenergy[remote]'"
        ) from None
    try:
        system, path = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ReportError(f"{shown(address)}: {_clause(error, address)}") from None
    return system, path


def in_time(address: str, work: Callable[[], T]) -> T:
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
    thread.join(TIMEOUT_S)
    if not done:
        raise ReportError(f"{shown(address)}: no answer within {TIMEOUT_S:g} s")
    error = done.get("error")
    if isinstance(error, ReportError):
        raise error
    if error is not None:
        raise ReportError(f"{shown(address)}: {_why(error, address)}") from None
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
    return told.replace(address, shown(address))
