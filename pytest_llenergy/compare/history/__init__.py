# SPDX-License-Identifier: Apache-2.0
"""The history of measurements over many runs: store it, show it, and find changes in it."""
