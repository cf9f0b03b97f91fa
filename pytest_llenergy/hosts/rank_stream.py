# SPDX-License-Identifier: Apache-2.0
"""The messages of one rank between its host and pytest's. Nothing here unpickles anything."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait

from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.transport import set_time_limit


def relay(near: Connection, far: Connection) -> None:
    """Pass messages on between a rank and pytest until one of them has gone; then close both connections.

    Args:
        near: The connection to the rank, on this host.
        far: The connection to pytest.
    """
    for each in (near, far):
        # A side that stops within a message must not block this process.
        set_time_limit(each, timeouts.PARTIAL_MESSAGE_TIMEOUT_S)
    try:
        while True:
            ready = wait([near, far])
            if near in ready:
                far.send_bytes(near.recv_bytes())
            else:
                near.send_bytes(far.recv_bytes())
    except (EOFError, OSError):
        return
    finally:
        near.close()
        far.close()
