# SPDX-License-Identifier: Apache-2.0
"""Comparing two runs: pairing tests, comparability, the statistical rule, and gates."""
