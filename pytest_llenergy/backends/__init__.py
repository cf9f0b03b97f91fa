# SPDX-License-Identifier: Apache-2.0
"""What runs: the protocol, its capabilities, one file per engine."""
