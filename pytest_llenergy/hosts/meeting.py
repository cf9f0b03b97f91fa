# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of several hosts meet: an address and ports that all hosts reach.

Nobody knows which of the addresses of rank 0's host the others can reach: virtual bridges have the same
address everywhere, and firewalls close interfaces. So that host listens, and all hosts try.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import psutil

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.ranks.plan import INTERFACES, LOOPBACK
from pytest_llenergy.record.environment import is_same_boot, read_boot_id

#: How many hosts may try at the same time.
BACKLOG = 1024

Routes = Mapping[str, str]
"""The addresses that a host reaches, and the own interface through which it reaches each."""


@dataclass(frozen=True)
class Offer:
    """Addresses of rank 0's host, the preferred first, the port at which it listens, and two free ports.

    ``boot_id`` is that of this host.
    """

    addresses: tuple[str, ...]
    port: int
    free_ports: tuple[int, int]
    boot_id: str


class MeetingHost(Protocol):
    """A host whose ranks meet those of others."""

    def offer_meeting(self, group: str) -> Offer:
        """Listen for other hosts until the group ends."""

    def find_routes(self, offer: Offer) -> Routes:
        """Return which of the addresses this host reaches, and through which own interface."""


def arrange_meetings(
    group: str, nodes: int, hosts: Mapping[str, MeetingHost], environment: Mapping[str, str]
) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the URL at which the ranks of all hosts meet, and the variables about it for each host.

    Args:
        group: Name of the group.
        nodes: Over how many hosts a backend spreads a model; the variables are about the hosts of a model.
        hosts: The hosts, that of rank 0 first.
        environment: What all ranks inherit.

    Raises:
        WorkerError: The hosts reach no common address.
    """
    names = list(hosts)
    url, variables = _arrange(group, names, hosts, environment)
    if 1 < nodes < len(names):
        # Those of the first model are right already. A second offer of its first host might contain the
        # port at which all ranks meet.
        for start in range(nodes, len(names), nodes):
            variables |= _arrange(group, names[start : start + nodes], hosts, environment)[1]
    return url, variables


def _arrange(
    group: str, names: Sequence[str], hosts: Mapping[str, MeetingHost], environment: Mapping[str, str]
) -> tuple[str, dict[str, dict[str, str]]]:
    offer = hosts[names[0]].offer_meeting(group)
    with ThreadPoolExecutor(len(names)) as threads:
        routes = list(threads.map(lambda name: hosts[name].find_routes(offer), names))
    address, (port, master_port) = choose_address(offer, names, routes), offer.free_ports
    master = {"MASTER_ADDR": address, "MASTER_PORT": str(master_port)}
    # An administrator may have chosen an interface for all hosts.
    unset = [each for each in INTERFACES if each not in environment]
    interfaces = [dict.fromkeys(unset, route[address]) for route in routes]
    url = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    return url, {name: {**master, **each} for name, each in zip(names, interfaces, strict=True)}


def listen() -> tuple[socket.socket, Offer]:
    """Listen on all interfaces, for ``find_routes`` on all hosts. The caller closes the socket.

    Raises:
        OSError: No port is free.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    with ExitStack() as end:
        # Both at the same time, or they could be one port.
        free = [
            end.enter_context(closing(socket.create_server(("", 0), family=family, dualstack_ipv6=both)))
            for _ in range(2)
        ]
        first, second = (int(each.getsockname()[1]) for each in free)
    port = int(server.getsockname()[1])
    return server, Offer(tuple(list_own_addresses()), port, (first, second), read_boot_id())


def find_routes(offer: Offer) -> Routes:
    """Return the addresses of another host that this one reaches soon, with the own interface to each."""
    # Another host cannot be reached through an address that this one has as well.
    own = set() if is_same_boot(offer.boot_id, read_boot_id()) else set(list_own_addresses())
    routes: dict[str, str] = {}
    poll, probes = select.poll(), {}
    with ExitStack() as end:
        for address in offer.addresses:
            if address in own:
                continue
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            probe = end.enter_context(socket.socket(family))
            probe.setblocking(False)
            if probe.connect_ex((address, offer.port)) in (0, errno.EINPROGRESS):
                probes[probe.fileno()] = address, probe
                poll.register(probe, select.POLLOUT)
        deadline_s = time.monotonic() + timeouts.ROUTE_TIMEOUT_S
        while probes and (left_s := deadline_s - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left_s * 1e3):
                poll.unregister(descriptor)
                address, probe = probes.pop(descriptor)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    name = _find_interface(str(probe.getsockname()[0]))
                    routes.update({} if name is None else {address: name})
                    # Packets to the others may be lost, and one address is enough.
                    deadline_s = min(deadline_s, time.monotonic() + timeouts.OTHER_ROUTES_TIMEOUT_S)
    return routes


def choose_address(offer: Offer, hosts: Sequence[str], routes: Sequence[Routes]) -> str:
    """Return the first address that every host reaches.

    Args:
        offer: Of the host of rank 0.
        hosts: The names of all hosts, that of rank 0 first.
        routes: Of each host.

    Raises:
        WorkerError: The hosts have no such address; the message names the host that reaches the fewest.
    """
    for address in offer.addresses:
        if all(address in each for each in routes):
            return address
    fewest = min(zip(hosts, routes, strict=True), key=lambda each: len(each[1]))
    reached = f"only {', '.join(fewest[1])}" if fewest[1] else "none"
    raise WorkerError(
        f"{fewest[0]} reaches {reached} of the addresses of {hosts[0]}, where all ranks would meet "
        f"({', '.join(offer.addresses)}): open all ports between these hosts"
    )


def list_own_addresses() -> list[str]:
    """Return the addresses of this host: IPv4 before IPv6, fast interfaces first, and loopback last."""
    states = psutil.net_if_stats()
    found = [
        (_is_loopback(each.address), each.family == socket.AF_INET6, -states[name].speed, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in states
        and states[name].isup
        and each.family in (socket.AF_INET, socket.AF_INET6)
        # Link-local addresses are valid on one link only.
        and not each.address.startswith(("fe80:", "169.254."))
    ]
    return list(dict.fromkeys(each[-1] for each in sorted(found)))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _find_interface(address: str) -> str | None:
    """Return the interface with an address of this host."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    # The whole network 127.0.0.0/8 is the loopback interface's.
    return LOOPBACK if _is_loopback(address) else None
