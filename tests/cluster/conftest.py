# SPDX-License-Identifier: Apache-2.0
"""Clusters on this machine."""

from .slurm import slurm_cluster

__all__ = ["slurm_cluster"]
