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
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# Quotes and double dashes are often part of what users type.
smartquotes = False

# Furo follows the system's light or dark mode.
html_theme = "furo"
html_title = f"pytest-llenergy {release}"
# Copy commands without the prompt.
copybutton_prompt_text = "$ "

# Some hosts answer slowly or refuse the first request.
linkcheck_retries = 3
linkcheck_timeout = 20
# GitHub creates its anchors with a script, which linkcheck does not run.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]


def setup(app: Sphinx) -> None:
    """Check the generated pages before the build."""
    app.connect("config-inited", lambda *_: _check_reference())


def _check_reference() -> None:
    from reference import stale

    found = ", ".join(path.name for path in stale())
    if found:
        raise ExtensionError(f"{found}: out of date; run python docs/reference.py")
