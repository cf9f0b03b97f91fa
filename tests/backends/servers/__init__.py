# SPDX-License-Identifier: Apache-2.0
"""Servers for tests, each a program of its own."""
