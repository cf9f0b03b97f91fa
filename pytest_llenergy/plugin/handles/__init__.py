# SPDX-License-Identifier: Apache-2.0
"""What the fixtures return: one file each, and what those of one test share."""
