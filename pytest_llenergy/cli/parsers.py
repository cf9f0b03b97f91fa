# SPDX-License-Identifier: Apache-2.0
"""What a command gets to add itself to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    #: What ``add_subparsers`` gives.
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
