# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of several hosts meet: addresses that all hosts reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.meeting import (
    Offer,
    Routes,
    arrange_meetings,
    choose_address,
    find_routes,
    listen,
)
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOOPBACK, HostDevices, ProcessPlan, plan_on_hosts
from pytest_llenergy.record.record import Parallel
from tests.ranks.groups import run

OFFER = Offer(("10.0.0.1", "172.17.0.1", "127.0.0.1"), 4711, (4712, 4713), "boot")


def test_ranks_meet_at_the_first_address_that_all_hosts_reach() -> None:
    everywhere = dict.fromkeys(OFFER.addresses, "eth0")
    assert choose_address(OFFER, ["n1", "n2"], [everywhere, everywhere]) == "10.0.0.1"
    some = {"172.17.0.1": "docker0", "127.0.0.1": "lo"}
    assert choose_address(OFFER, ["n1", "n2"], [everywhere, some]) == "172.17.0.1"


def test_a_host_that_reaches_no_address_is_named() -> None:
    with pytest.raises(
        WorkerError, match=r"^n2 reaches none of the addresses of n1, .*10\.0\.0\.1, 172.*: open all ports"
    ):
        choose_address(OFFER, ["n1", "n2"], [{"10.0.0.1": "eth0"}, {}])


def test_a_host_finds_its_interface_to_each_address_that_answers() -> None:
    server, offer = listen()
    with server:
        assert offer.addresses[-1] in ("127.0.0.1", "::1")
        assert len({offer.port, *offer.free_ports}) == 3
        # Addresses for documentation (RFC 5737), which no host has.
        tried = replace(offer, addresses=("198.51.100.1", *offer.addresses))
        routes = find_routes(tried)
        assert routes["127.0.0.1"] == LOOPBACK
        assert "198.51.100.1" not in routes
        # On another host, the loopback interface leads elsewhere.
        assert "127.0.0.1" not in find_routes(replace(tried, boot_id="another"))
        # Unknown ones are equal to none, not even to each other.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pytest_llenergy.hosts.meeting.read_boot_id", lambda: "")
            assert "127.0.0.1" not in find_routes(replace(tried, boot_id=""))
    assert find_routes(replace(offer, addresses=("127.0.0.1",))) == {}


class OfferingHost(LocalHost):
    """Meets others as hosts with agents do, and keeps its offers."""

    def __init__(self) -> None:
        super().__init__("spawn")
        self.offers: list[Offer] = []

    def meet(
        self, group: str, plan: ProcessPlan, hosts: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, dict[str, dict[str, str]]]:
        return arrange_meetings(group, plan.nodes, hosts, environment)

    def offer_meeting(self, group: str) -> Offer:
        server, offer = listen()
        server.close()
        self.offers.append(offer)
        return offer

    def find_routes(self, offer: Offer) -> Routes:
        return dict.fromkeys(offer.addresses, LOOPBACK)


def master_port() -> int:
    return int(os.environ["MASTER_PORT"])


def test_two_models_over_two_hosts_each_meet_at_ports_that_are_used_for_nothing_else() -> None:
    """A host that offers twice has released the ports of its first offer, and may offer them again."""
    row = Capabilities(launch="backend", hosts="several", data=True, tensor=True, gpu=True)
    hosts = {name: OfferingHost() for name in ("n1", "n2", "n3", "n4")}
    holds = [HostDevices(name, Lease(devices=(f"GPU-{name}",)), [0, 1]) for name in hosts]
    plan = plan_on_hosts(row, Parallel(tensor=2, data=2), holds, 1, tensor_across_hosts=True)
    group = RankGroup(plan, hosts)
    try:
        ports = run(group, master_port)
    finally:
        group.close()
        for host in hosts.values():
            host.close()
    assert [len(host.offers) for host in hosts.values()] == [1, 0, 1, 0]
    first, second = (hosts[name].offers[0].free_ports[1] for name in ("n1", "n3"))
    assert ports == [first, first, second, second]
