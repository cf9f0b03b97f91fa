# SPDX-License-Identifier: Apache-2.0
"""Options: the table, what their values may be, what a run makes of them, and the places they name."""
