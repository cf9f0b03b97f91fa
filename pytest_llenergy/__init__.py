# SPDX-License-Identifier: Apache-2.0
"""pytest-llenergy: joules per token, with their uncertainty, as pytest tests.

Importing this package costs nothing: every worker process imports it before its device visibility is
set, so nothing may be loaded here. Public names live in the rooms below it.
"""

from __future__ import annotations

__version__ = "0.1.0"
