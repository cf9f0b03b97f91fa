# SPDX-License-Identifier: Apache-2.0
"""What a run needs that has, or may have, tests of ours. Others are spared what is imported here."""

from __future__ import annotations

import pytest

from pytest_llenergy.errand import is_worker
from pytest_llenergy.process import BEGAN, hands_out


def ready(config: pytest.Config) -> None:
    """Put in place what is not there yet."""
    manager = config.pluginmanager
    if not hands_out(config) and not manager.has_plugin("llenergy-hooks"):
        from pytest_llenergy.hooks import Hooks

        manager.register(Hooks(), "llenergy-hooks")
    if is_worker(config) or config.option.collectonly or manager.has_plugin("llenergy-controller"):
        return
    from pytest_llenergy.controller import Controller

    manager.register(Controller(config, config.stash[BEGAN]), "llenergy-controller")
