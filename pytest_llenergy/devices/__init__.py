# SPDX-License-Identifier: Apache-2.0
"""Devices of the host: inventory, visibility and leases."""
