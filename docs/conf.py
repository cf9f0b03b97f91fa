# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration."""

from __future__ import annotations

import pytest_llenergy

project = "pytest-llenergy"
author = "the pytest-llenergy developers"
release = pytest_llenergy.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "alabaster"
exclude_patterns = ["_build"]
