# SPDX-License-Identifier: Apache-2.0
"""Where a server listens and how to start it, checked before anything is started."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_llenergy.backends.timeouts import SERVER_START_TIMEOUT_S
from pytest_llenergy.errors import BackendError

#: Servers started by the plugin listen where no other host can reach them.
HOST = "127.0.0.1"

PLACEHOLDERS = ("model", "port", "host", "threads", "gpus")


@dataclass(frozen=True)
class Address:
    """Where a server listens. ``host`` is an IP address of this host."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class ServerSettings:
    """The load options of the backend. ``words`` is the command, with its placeholders."""

    words: tuple[str, ...]
    address: Address | None
    health: str
    model: str
    timeout_s: float

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ServerSettings:
        """Validate the load options.

        Raises:
            BackendError: If the command or URL cannot be used.
        """
        command, url = str(options.get("command") or ""), str(options.get("url") or "")
        health = str(options.get("health") or "/health")
        if not health.startswith("/"):
            raise BackendError(f"server: health is {health!r}, needs a path such as /health")
        words = _split_command(command)
        if words and not url and not any("{port}" in word for word in words):
            raise BackendError(
                "server: the command has no placeholder for the port; add {port}, or give the url as well"
            )
        if not words and not url:
            raise BackendError("server: neither a command nor a url; give with_options(command=...) or url")
        timeout_s = options.get("timeout_s") or SERVER_START_TIMEOUT_S
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or timeout_s <= 0:
            raise BackendError(f"server: timeout_s is {timeout_s!r}, needs seconds, more than 0")
        return cls(
            words, parse_local_url(url) if url else None, health, str(options.get("model") or ""), timeout_s
        )

    @property
    def names_model(self) -> bool:
        """Whether the command has a placeholder for the model."""
        return any("{model}" in word for word in self.words)

    @property
    def recorded_command(self) -> str:
        """The program and a digest of the command, which may hold a credential and is not recorded itself."""
        digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()[:12]
        return f"{Path(self.words[0]).name}, sha256 {digest}" if self.words else ""

    def command(self, **values: str) -> list[str]:
        """Return the command with placeholders replaced."""
        return [
            re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word) for word in self.words
        ]


def parse_local_url(url: str) -> Address:
    """Parse a URL.

    Raises:
        BackendError: If it does not point to this host, or contains a user or a password.
    """
    if "@" in url:
        # Not shown: where a password with special characters ends is a guess.
        raise BackendError(
            "server: the url has a user or a password before its @, which servers would not get; leave it out"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BackendError(f"server: url {_shown(url)}: {error}") from None
    if parts.scheme != "http" or not host or parts.path.rstrip("/") not in ("", "/v1"):
        raise BackendError(f"server: url {_shown(url)}, needs a form such as http://127.0.0.1:8000")
    try:
        addresses = [
            str(each[4][0]) for each in socket.getaddrinfo(host, port or 80, type=socket.SOCK_STREAM)
        ]
    except OSError as error:
        raise BackendError(f"server: url {_shown(url)}: {host} has no address ({error})") from None
    own = _own_addresses()
    local = [
        each for each in addresses if ipaddress.ip_address(each.partition("%")[0]).is_loopback or each in own
    ]
    if not local:
        raise BackendError(
            f"server: url {_shown(url)} is another host ({addresses[0]}), whose energy cannot be measured "
            "here; run the tests there"
        )
    return Address(local[0], port or 80)


def find_free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _split_command(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise BackendError(f"server: the command cannot be read: {error}") from None
    unknown = [
        name for word in words for name in re.findall(r"\{([a-z_]+)\}", word) if name not in PLACEHOLDERS
    ]
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise BackendError(f"server: the command has the placeholder {{{unknown[0]}}}; known: {known}")
    return words


def _shown(url: str) -> str:
    return repr(url.partition("?")[0])


def _own_addresses() -> set[str]:
    import psutil

    return {each.address for several in psutil.net_if_addrs().values() for each in several}
