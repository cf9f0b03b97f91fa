# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of several hosts meet: addresses that all hosts reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.workers.meeting import LOOPBACK, Offer, choose_address, find_routes, listen

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
            patch.setattr("pytest_llenergy.workers.meeting.read_boot_id", lambda: "")
            assert "127.0.0.1" not in find_routes(replace(tried, boot_id=""))
    assert find_routes(replace(offer, addresses=("127.0.0.1",))) == {}
