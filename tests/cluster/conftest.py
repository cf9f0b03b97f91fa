# SPDX-License-Identifier: Apache-2.0
"""Clusters on this machine."""

from .ray_cluster import ray_cluster
from .slurm import slurm_cluster

__all__ = ["ray_cluster", "slurm_cluster"]
