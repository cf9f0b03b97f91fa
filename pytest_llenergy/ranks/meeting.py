# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of one host meet: its loopback interface."""

from __future__ import annotations

import _socket
import sys
from contextlib import closing, suppress

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts

#: The network interface between ranks of one host; resolving names for others could only fail.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

#: Addresses of the loopback interface; a container may have only one of them.
LOOPBACK_ADDRESSES = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))


def find_loopback_address() -> tuple[str, int]:
    """Return an address of the loopback interface, and a free port of it.

    Raises:
        WorkerError: The interface does not work.
    """
    for family, address in LOOPBACK_ADDRESSES:
        # The class that no test replaces: a test may forbid sockets in its process.
        with (
            suppress(OSError),
            closing(_socket.socket(family)) as probe,
            closing(_socket.socket(family)) as peer,
        ):
            probe.bind((address, 0))
            probe.listen()
            peer.settimeout(timeouts.LOOPBACK_TIMEOUT_S)
            # An interface that is down may have its address but carries nothing.
            peer.connect(probe.getsockname())
            return address, int(probe.getsockname()[1])
    raise WorkerError(
        f"ranks meet at the loopback interface {LOOPBACK}, which does not work here: bring it up, as with "
        f"'ip link set {LOOPBACK} up'"
    )
