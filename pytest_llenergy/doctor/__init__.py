# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: list devices, meters and backends, find faults, and recommend remedies."""
