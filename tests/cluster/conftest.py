# SPDX-License-Identifier: Apache-2.0
"""Clusters on this machine."""

from .ray_cluster import ray_cluster

__all__ = ["ray_cluster"]
