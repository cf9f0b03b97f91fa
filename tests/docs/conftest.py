# SPDX-License-Identifier: Apache-2.0
"""Let tests import the scripts of the documentation as they import each other."""

from __future__ import annotations

import sys

from .pages import ROOT

# Last, so that their short names hide no other module.
sys.path.append(str(ROOT / "docs"))
