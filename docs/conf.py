# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import pytest_llenergy

sys.path.insert(0, str(Path(__file__).parent))

project = "pytest-llenergy"
author = "the pytest-llenergy developers"
release = pytest_llenergy.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# What stands in quotes, or has two dashes, is often to be typed.
smartquotes = False

# Light and dark, as the system is.
html_theme = "furo"
html_title = f"pytest-llenergy {release}"
# Comments after a command are no part of it, and neither is the prompt.
copybutton_prompt_text = "$ "

# Hosts that answer slowly, or refuse the first time.
linkcheck_retries = 3
linkcheck_timeout = 20
# What a script writes into a page is not there for who asks without one.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]


def setup(app: Sphinx) -> None:
    """Called by sphinx."""
    app.connect("config-inited", lambda *_: _is_current())


def _is_current() -> None:
    """Pages of reference are what the code says, or nothing is built."""
    from reference import stale

    found = ", ".join(path.name for path in stale())
    if found:
        raise ExtensionError(f"{found}: not what the code says now; run python docs/reference.py")
