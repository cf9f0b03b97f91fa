# SPDX-License-Identifier: Apache-2.0
"""pytest-llenergy: joules per token, with their uncertainty, as pytest tests.

Import nothing here: every rank imports this package before the devices that it may see are set. Public names
are in the subpackages.
"""

from __future__ import annotations

__version__ = "0.1.0"
