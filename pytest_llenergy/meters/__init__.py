# SPDX-License-Identifier: Apache-2.0
"""What measures: cumulative joules per domain on the monotonic clock."""
