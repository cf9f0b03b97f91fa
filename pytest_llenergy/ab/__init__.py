# SPDX-License-Identifier: Apache-2.0
"""``llenergy ab``: two sides, measured in turn."""
