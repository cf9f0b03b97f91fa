# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file: no script, nothing fetched, readable on a phone and in the dark."""
