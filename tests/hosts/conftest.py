# SPDX-License-Identifier: Apache-2.0
"""Clusters on this machine, and hosts without one."""

from .ray_cluster import ray_cluster
from .remote_ranks import gang, own_gang, ranks
from .runs import cluster_runs
from .slurm import slurm_cluster
from .two_hosts import two_hosts

__all__ = ["cluster_runs", "gang", "own_gang", "ranks", "ray_cluster", "slurm_cluster", "two_hosts"]
