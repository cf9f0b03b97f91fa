# SPDX-License-Identifier: Apache-2.0
"""Reference pages, generated from the code."""
