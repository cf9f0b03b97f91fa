# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest_llenergy.cli``."""

from pytest_llenergy.cli import main

raise SystemExit(main())
