# SPDX-License-Identifier: Apache-2.0
"""The history of measurements over many runs: storing, displaying, and finding changes."""
