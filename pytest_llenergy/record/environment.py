# SPDX-License-Identifier: Apache-2.0
"""The machine and software of a run, and a key of the facts that stay the same between runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_llenergy.record.base import Count, StoredStruct


class Host(StoredStruct, frozen=True):
    """The machine. ``logical_cpus`` counts the CPUs that the process may use."""

    name: str
    system: str
    machine: str
    cpu_model: str
    logical_cpus: int
    memory_bytes: Count
    load_average: float | None


class Board(StoredStruct, frozen=True):
    """One GPU."""

    uuid: str
    name: str
    pci_bus_id: str
    memory_bytes: Count | None = None
    power_limit_w: float | None = None


class Environment(StoredStruct, frozen=True):
    """The machine and software of a run.

    Attributes:
        key: Equal for two runs on the same hardware, all boards of the host included. Comparisons use only
            the devices of each test, see ``compare.comparability``.
        gpus: Boards that answered.
        gpus_missing: For each other board, or for the driver, the reason why it did not.
        hosts: Those on which tests were measured with ``--energy-cluster``, by their names in ranks and
            domains; unset without. The other fields then describe the host of pytest.
    """

    key: str
    host: Host
    gpus: list[Board]
    driver: str | None
    python: str
    packages: dict[str, str]
    gpus_missing: list[str] = msgspec.field(default_factory=list)
    hosts: dict[str, Environment] | msgspec.UnsetType = msgspec.UNSET

    @property
    def cluster_hosts(self) -> Mapping[str, Environment]:
        """``hosts``, empty if unset."""
        return self.hosts if isinstance(self.hosts, dict) else {}

    def with_hosts(self, hosts: Mapping[str, Environment]) -> Environment:
        """Return it with more hosts of a cluster, if there are any."""
        if not hosts:
            return self
        return msgspec.structs.replace(self, hosts={**self.cluster_hosts, **hosts})


def environment_key(host: Host, gpus: list[Board], missing: int = 0) -> str:
    """Hash the stable facts: never a UUID, a host name, a load or a package version.

    ``missing`` counts GPUs that did not answer, of which nothing else is known.

    Args:
        host: The machine.
        gpus: Its boards that answered.
        missing: Number of boards that did not answer.
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
    import hashlib

    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


#: Where Linux has its identifier of a boot.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return Linux's identifier of this boot, or an empty text if it is unknown."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_same_boot(one: str, other: str) -> bool:
    """Whether two identifiers of boots are known and equal, and so of one machine."""
    return bool(one) and one == other
