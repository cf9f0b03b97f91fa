# SPDX-License-Identifier: Apache-2.0
"""Where it runs: process plan, rank entry, groups of ranks."""
