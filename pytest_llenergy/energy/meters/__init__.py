# SPDX-License-Identifier: Apache-2.0
"""What reads counters and power: one file a source."""
