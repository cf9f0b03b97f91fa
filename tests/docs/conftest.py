# SPDX-License-Identifier: Apache-2.0
"""Tests of the code beside the documentation import it as its scripts do."""

from __future__ import annotations

import sys

from .pages import ROOT

# At the end: names there are short, and must not hide others.
sys.path.append(str(ROOT / "docs"))
