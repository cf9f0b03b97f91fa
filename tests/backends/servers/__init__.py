# SPDX-License-Identifier: Apache-2.0
"""Servers for tests, each a separate program."""
