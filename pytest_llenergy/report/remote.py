# SPDX-License-Identifier: Apache-2.0
"""Read and write files at URLs through fsspec: http, S3, GCS and others.

Every read is limited in size and time, whatever the protocol. Messages and reports show URLs
without user, password and query, which may be secret.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model import files
from pytest_llenergy.model.secrets import redact_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

#: One scheme, or a chain of them. A path may contain a colon, and ``C:\\`` is not a scheme.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")

#: A URL without a host although its protocol needs one.
HOSTLESS = re.compile("(?:^|::)(ftps?|sftp|ssh|https?)://(?:/|$)")

#: Read or write one remote file: time for a large report over a slow line.
REMOTE_TIMEOUT_S = 120.0


def is_url(text: str) -> bool:
    """Whether the text is a URL rather than a path."""
    return URL.match(text) is not None


def redact_url(url: str) -> str:
    """Remove user, password, query and fragment from every URL of a chain."""
    # The user comes first, since a password may contain any character.
    url = re.sub("://[^/]*@", "://", url)
    return re.split("[?#]", url, maxsplit=1)[0]


def redact_arguments(words: Iterable[str]) -> list[str]:
    """Redact every URL and every secret in the arguments of a command line."""
    return redact_secrets(_redact_argument_urls(word) for word in words)


def _redact_argument_urls(word: str) -> str:
    if word.count("://") == 1:
        # A single URL may contain spaces.
        before, _, rest = word.partition("://")
        return before + redact_url(f"://{rest}")
    return re.sub(r"://\S*", lambda found: redact_url(found[0]), word)


def fetch_url(url: str) -> bytes:
    """Read a whole file.

    Raises:
        ReportError: If it cannot be read or is too large.
    """
    return read_remote(url, lambda: open_file_system(url))


def read_remote(url: str, open_system: Callable[[], tuple[AbstractFileSystem, str]]) -> bytes:
    """Read a whole file of the file system that ``open_system`` returns with the file's path in it.

    Raises:
        ReportError: As for ``fetch_url``.
    """

    def read() -> bytes:
        system, path = open_system()
        data = bytearray()
        with system.open(path, "rb") as file:
            # A stream may return less than was asked for.
            while len(data) <= files.MAX_FILE_BYTES and (
                part := file.read(files.MAX_FILE_BYTES + 1 - len(data))
            ):
                data += part
        return bytes(data)

    data = run_with_timeout(url, read)
    if len(data) > files.MAX_FILE_BYTES:
        raise ReportError(f"{redact_url(url)}: {files.describe_limit()}")
    return data


def open_file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Some protocols connect here, so call it within ``run_with_timeout``.

    Raises:
        ReportError: If the URL names no host, or if fsspec or the package that it needs for the scheme is not
            installed.
    """
    hostless = HOSTLESS.search(redact_url(url))
    if hostless is not None:
        raise ReportError(f"{redact_url(url)}: names no host; expected {hostless[1]}://host/path")
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ReportError(
            f"{redact_url(url)}: URLs need fsspec; pip install 'pytest-llenergy[remote]'"
        ) from None
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ReportError(f"{redact_url(url)}: {_describe(error, url)}") from None
    return system, path


def run_with_timeout(url: str, work: Callable[[], T]) -> T:
    """Run ``work`` with the time limit ``REMOTE_TIMEOUT_S`` and return its result.

    It runs in a thread, since not every protocol has a time-out. A thread that hangs is abandoned.

    Raises:
        ReportError: If ``work`` fails or exceeds the limit.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="llenergy-remote", daemon=True).start()
    try:
        return future.result(REMOTE_TIMEOUT_S)
    except ReportError:
        raise
    except Exception as error:
        reason = _explain(error, url) if future.done() else f"no answer within {REMOTE_TIMEOUT_S:g} s"
        raise ReportError(f"{redact_url(url)}: {reason}") from None


def _explain(error: BaseException, url: str) -> str:
    # fsspec also raises FileNotFoundError for a server that cannot be reached, with the cause attached.
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "no such file"
    if isinstance(error, PermissionError):
        return "access denied"
    if isinstance(status, int):
        return f"the server answered {status} {getattr(error, 'message', '')}".rstrip()
    return f"cannot be reached ({_system_error(error) or _describe(error, url)})"


def _system_error(error: BaseException) -> str | None:
    """Return the system's words for a failed connection, such as ``Connection refused``, if it has any.

    asyncio and aiohttp put addresses and TLS settings around them.
    """
    cause = getattr(error, "os_error", error)
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError):
        return None
    if isinstance(cause, socket.gaierror):
        return cause.strerror
    # Attempts at several addresses are one error, whose text has the number of each.
    number = re.search(r"\[Errno (\d+)\]", str(cause))
    return os.strerror(int(number[1])) if number else None


def _describe(error: BaseException, url: str) -> str:
    """Return the error on one line, without the secrets of the URL."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message.replace(url, redact_url(url))
