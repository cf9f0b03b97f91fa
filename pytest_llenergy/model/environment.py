# SPDX-License-Identifier: Apache-2.0
"""Where a run happened and what it ran: facts, and the key made of those that stay the same."""

from __future__ import annotations

import hashlib

import msgspec

from pytest_llenergy.model.base import StoredStruct


class Host(StoredStruct, frozen=True):
    """The machine. Memory is bytes; ``logical_cpus`` are those this process may use."""

    name: str
    system: str
    machine: str
    cpu_model: str
    logical_cpus: int
    memory_bytes: int
    load_average: float | None


class Board(StoredStruct, frozen=True):
    """One GPU. Memory is bytes, the power limit is watts."""

    uuid: str
    name: str
    pci_bus_id: str
    memory_bytes: int | None = None
    power_limit_w: float | None = None


class Environment(StoredStruct, frozen=True):
    """``key`` is equal on two runs when they were made on the same hardware, all boards of the host included.

    Tests are compared by the devices that they used, see ``compare.identity``.

    ``gpus`` are the boards that answered; ``gpus_missing`` says of each that did not, or of the driver, why.
    """

    key: str
    host: Host
    gpus: list[Board]
    driver: str | None
    python: str
    packages: dict[str, str]
    gpus_missing: list[str] = msgspec.field(default_factory=list)


def environment_key(host: Host, gpus: list[Board], missing: int = 0) -> str:
    """Hash the stable facts only: never a UUID, a host name, a load or a package version.

    ``missing`` is how many times there is a reason for GPUs that did not answer: nobody knows what these are.
    """
    facts = {
        "cpu_model": host.cpu_model,
        "machine": host.machine,
        "logical_cpus": host.logical_cpus,
        "memory_gib": round(host.memory_bytes / 2**30),
        "gpus": sorted(([gpu.name, gpu.memory_bytes, gpu.power_limit_w] for gpu in gpus), key=str),
    }
    if missing:
        facts["gpus_missing"] = missing
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]
