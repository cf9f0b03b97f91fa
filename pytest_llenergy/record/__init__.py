# SPDX-License-Identifier: Apache-2.0
"""Plain data: records, reports and timelines. Nothing here imports pytest."""
