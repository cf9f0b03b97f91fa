# SPDX-License-Identifier: Apache-2.0
"""See that a server is idle before a load, after one whose streams were closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pytest_llenergy.backends.server.answers import explain_status
from pytest_llenergy.backends.server.client import Client
from pytest_llenergy.errors import BackendError

#: A server is idle if a request takes at most so many times as long as the fastest one did, and some seconds,
#: or if it takes no less than this share of the one before it.
IDLE_TIMES, IDLE_S, STEADY_SHARE = 1.5, 0.05, 0.8

#: Longest time for which a server may refuse these requests if no load before them ended early, and interval
#: of the next ones (seconds). After such a load its queue may be full for as long as it is busy.
REFUSED_S, RETRY_S = 5.0, 0.2

#: Longest wait for an idle server where no search limits it (seconds).
SETTLE_S = 60.0


@dataclass
class IdleCheck:
    """Finds out whether a server still works on requests whose streams were closed.

    A request that was sent after them is done after them, or takes longer because of them.

    Attributes:
        is_settled: Whether no load ended early since the server was last idle.
    """

    is_settled: bool = True
    _check: Callable[[], None] = lambda: None
    _client: Client | None = None
    _body: bytes = b""
    _path: str = ""
    _fastest_s: float = inf

    def use(self, body: bytes, client: Client, path: str, check: Callable[[], None]) -> None:
        """Check with this request from now on; ``check`` raises if the server has died."""
        if body != self._body:
            self._fastest_s = inf
        self._client, self._body, self._path, self._check = client, body, path, check

    async def settle(self, end_ns: int) -> bool:
        """Send one request after the other until the server is idle; return whether it is by ``end_ns``.

        Raises:
            BackendError: The server has died, or refuses each of them.
        """
        assert self._client is not None
        before_s = inf
        refused_s = REFUSED_S if self.is_settled else SETTLE_S
        refused_ns = time.monotonic_ns() + round(refused_s * 1e9)
        while True:
            begin_ns = time.monotonic_ns()
            sending = self._client.stream(self._body, self._path)
            try:
                stream = await asyncio.wait_for(sending, max(0.0, (end_ns - begin_ns) / 1e9))
            except asyncio.TimeoutError:
                return False
            if stream.failed:
                if stream.broke:
                    self._check()
                if time.monotonic_ns() > refused_ns:
                    why = stream.broke or explain_status(stream)
                    raise BackendError(f"server: refused single requests for {refused_s:g} s ({why})")
                await asyncio.sleep(RETRY_S)
                continue
            took_s = (time.monotonic_ns() - begin_ns) / 1e9
            self._fastest_s = min(self._fastest_s, took_s)
            if took_s <= IDLE_TIMES * self._fastest_s + IDLE_S or took_s >= STEADY_SHARE * before_s:
                self.is_settled = True
                return True
            before_s = took_s
