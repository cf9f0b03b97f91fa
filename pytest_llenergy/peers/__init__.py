# SPDX-License-Identifier: Apache-2.0
"""Experiments of other tools, as tests of this one."""
