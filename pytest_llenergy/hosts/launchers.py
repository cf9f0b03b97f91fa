# SPDX-License-Identifier: Apache-2.0
"""Choose the launcher of a run, and the hosts that a test needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.hosts.base import Cluster, HostOffer, Shape


def open_cluster(name: str, environment: Mapping[str, str]) -> Cluster:
    """Return a launcher.

    Args:
        name: ``slurm``, ``ray`` or ``ray:HOST:PORT``.
        environment: Environment variables with which the run began.

    Raises:
        PlanError: It is not available here.
        WorkerError: It does not answer.
    """
    kind, _, address = name.partition(":")
    if kind == "slurm":
        from pytest_llenergy.hosts.slurm import SlurmCluster

        return SlurmCluster(environment)
    from pytest_llenergy.hosts.ray import RayCluster

    return RayCluster(address or environment.get("RAY_ADDRESS"))


def choose_shape(request: GpuRequest, offers: Sequence[HostOffer]) -> Shape:
    """Return how many hosts a request needs: without ``per_host`` as few as can hold it in equal shares.

    If no hosts can, the result is the smallest shape whose share fits on the largest host, and one host if
    none has GPUs; the cluster then explains why it cannot provide this or another shape.
    """
    if request.per_host is not None:
        return Shape(request.n // request.per_host, request.per_host)
    shapes = [Shape(hosts, request.n // hosts) for hosts in range(1, request.n + 1) if request.n % hosts == 0]
    for shape in shapes:
        if sum(offer.devices >= shape.per_host for offer in offers) >= shape.hosts:
            return shape
    largest = max((offer.devices for offer in offers), default=0)
    nearest = next((shape for shape in shapes if shape.per_host <= largest), shapes[0])
    return replace(nearest, others=[shape for shape in shapes if shape != nearest])
