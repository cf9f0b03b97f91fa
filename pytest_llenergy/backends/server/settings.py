# SPDX-License-Identifier: Apache-2.0
"""The load options of a server, its command and its address, checked before anything is started."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_llenergy.backends.secrets import remember_key
from pytest_llenergy.backends.server import KEY_ENV
from pytest_llenergy.backends.timeouts import SERVER_START_TIMEOUT_S
from pytest_llenergy.errors import BackendError

#: Servers started by the plugin listen where no other host can reach them.
HOST = "127.0.0.1"

#: Where a server that listens at every address is reached.
LOOPBACK = {"0.0.0.0": HOST, "::": "::1"}

#: Options of servers' commands that say over how many GPUs they spread a model: of vLLM, SGLang, TensorRT-LLM
#: and TGI. The product of the degrees is the number of GPUs.
DEGREES = {
    "tensor": ("tensor-parallel-size", "tp", "tp-size", "num-shard"),
    "pipeline": ("pipeline-parallel-size", "pp", "pp-size"),
    "data": ("data-parallel-size", "dp", "dp-size"),
}


@dataclass(frozen=True)
class Address:
    """Where a server listens. ``host`` is an IP address of this host."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True)
class ServerSettings:
    """The load options of the backend.

    Attributes:
        words: The command, with its placeholders.
    """

    words: tuple[str, ...]
    address: Address | None
    model: str
    timeout_s: float
    key_env: str = KEY_ENV

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ServerSettings:
        """Validate the load options."""
        text = {name: str(options.get(name) or "") for name in ("command", "url", "model")}
        words = _split_command(text["command"])
        if words and not text["url"] and not any("{port}" in word for word in words):
            raise BackendError(
                "server: the command has no placeholder for the port; add {port}, or give the url as well"
            )
        if not words and not text["url"]:
            raise BackendError("server: neither a command nor a url; give with_options(command=...) or url")
        timeout_s = float(options.get("timeout_s") or SERVER_START_TIMEOUT_S)
        key_env = str(options.get("key_env") or KEY_ENV)
        if key_env != KEY_ENV and key_env not in os.environ:
            raise BackendError("server: the environment has no variable of the name that key_env gives")
        address = parse_local_url(text["url"]) if text["url"] else None
        return cls(words, address, text["model"], timeout_s, key_env)

    @property
    def key(self) -> str | None:
        """The API key from the environment, which is replaced wherever the server says it."""
        key = os.environ.get(self.key_env, "").strip() or None
        if key:
            remember_key(key)
        return key

    def names(self, placeholder: str) -> bool:
        """Whether the command has a placeholder."""
        return any(f"{{{placeholder}}}" in word for word in self.words)

    @property
    def recorded_command(self) -> str:
        """The program and a digest of the command, which may hold a credential and is not recorded itself."""
        digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()[:12]
        return f"{Path(self.words[0]).name}, sha256 {digest}" if self.words else ""

    def fill_in(self, **values: str) -> list[str]:
        """Return the command with placeholders replaced."""
        return [
            re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word) for word in self.words
        ]


def _split_command(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise BackendError(f"server: the command cannot be read: {error}") from None


def find_degrees(command: Sequence[str]) -> dict[str, int]:
    """Return the degrees of parallelism that a command asks for; without those that are 1.

    A command that starts several servers, such as prefill and decode workers, tells nothing.
    """
    text = " ".join(command)
    found = {}
    for kind, names in DEGREES.items():
        pattern = "|".join(name.replace("-", "[-_]") for name in names)
        given = re.findall(rf"(?<!\S)--?(?:{pattern})[= ](\d+)\b", text)
        if len(given) > 1:
            return {}
        # SGLang's replicas of the attention share the GPUs of its shards.
        shared = kind == "data" and "--enable-dp-attention" in text
        if given and int(given[0]) > 1 and not shared:
            found[kind] = int(given[0])
    return found


def show_degrees(degrees: Mapping[str, int]) -> str:
    """Return degrees as ``tensor 2 x data 2``."""
    return " x ".join(f"{kind} {number}" for kind, number in degrees.items())


def parse_local_url(url: str) -> Address:
    """Parse a URL."""
    if "@" in url:
        # Not shown: where a password with special characters ends is a guess.
        raise BackendError(
            "server: the url has a user or a password before its @, which servers would not get; leave it out"
        )
    shown = repr(url.partition("?")[0])
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BackendError(f"server: url {shown}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.path.rstrip("/") not in ("", "/v1"):
        raise BackendError(f"server: url {shown}, needs a form such as http://127.0.0.1:8000")
    port = port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise BackendError(f"server: url {shown}: {host} has no address ({error})") from None
    for address in addresses:
        if _is_local(reached := LOOPBACK.get(address, address)):
            return Address(reached, port, parts.scheme)
    raise BackendError(
        f"server: url {shown} is another host ({addresses[0]}), whose energy cannot be measured "
        "here; run the tests there"
    )


def _is_local(address: str) -> bool:
    import psutil

    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    return any(each.address == address for several in psutil.net_if_addrs().values() for each in several)


def find_free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
