# SPDX-License-Identifier: Apache-2.0
"""Ranks, the worker processes of a test: plan, start, requests, failures and end."""
