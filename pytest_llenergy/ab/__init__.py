# SPDX-License-Identifier: Apache-2.0
"""``llenergy ab``: measure two sides alternately."""
