# SPDX-License-Identifier: Apache-2.0
"""What may be used: inventory, visibility, leases."""
