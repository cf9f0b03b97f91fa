# SPDX-License-Identifier: Apache-2.0
"""How to measure: windows, rounds, uncertainty, quality."""
