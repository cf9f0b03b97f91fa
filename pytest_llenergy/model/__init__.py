# SPDX-License-Identifier: Apache-2.0
"""Plain data: records, reports, timelines. No pytest, no I/O beyond one file."""
