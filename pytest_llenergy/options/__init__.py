# SPDX-License-Identifier: Apache-2.0
"""Options: one table, from which the parser, the ini keys, the settings and the reference page are made."""
