# SPDX-License-Identifier: Apache-2.0
"""Blocks of configuration: load them, or validate them against a schema."""

from __future__ import annotations

import configparser
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..ci.test_files import check, commands
from .pages import Block

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Top-level keys of a GitHub workflow.
OF_GITHUB = {"on", True, "jobs"}


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError``."""
    read: dict[str, Any] = tomllib.loads(text)
    return read


def try_config(block: Block, pytester: pytest.Pytester) -> list[str]:
    """Check a block and return the commands in it. Raises ``AssertionError``, or what its parser raises."""
    return READERS[block.language](block, pytester)


def _toml(block: Block, pytester: pytest.Pytester) -> list[str]:
    tool = read_toml(block.code).get("tool", {})
    if "pytest" in tool:
        _load("configured.toml", block.code, pytester)
    return []


def _ini(block: Block, pytester: pytest.Pytester) -> list[str]:
    read = configparser.ConfigParser(interpolation=None)
    read.read_string(block.code)
    if "pytest" in read:
        _load("configured.ini", block.code, pytester)
    return []


def _load(name: str, text: str, pytester: pytest.Pytester) -> None:
    """Load the file in pytest; unknown keys and invalid values are errors."""
    path = pytester.path / name
    path.write_text(text)
    empty = pytester.path / "empty.py"
    empty.touch()
    # pytest checks the keys when it collects.
    result = pytester.runpytest_inprocess("--strict-config", "--collect-only", "-c", path, empty)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED, result.stderr.str() + result.stdout.str()
    result.stdout.fnmatch_lines([f"configfile: {name}*"])
    path.unlink()


def _yaml(block: Block, pytester: pytest.Pytester) -> list[str]:
    data = yaml.safe_load(block.code)
    if isinstance(data, list):
        data = {"on": "push", "jobs": {"one": {"runs-on": "any", "steps": data}}}
    if isinstance(data, dict) and OF_GITHUB & data.keys():
        path = _write(pytester, json.dumps({"on": data.pop(True, None), **data} if True in data else data))
        check("vendor.github-workflows", path)
    elif block.said("file") in (None, ".gitlab-ci.yml"):
        check("vendor.gitlab-ci", _write(pytester, block.code), transform="gitlab-ci")
    return commands(data) + scripts(data)


def scripts(data: Any) -> list[str]:
    """Return every ``script`` of GitLab jobs."""
    jobs = data.values() if isinstance(data, dict) else []
    found = [job["script"] for job in jobs if isinstance(job, dict) and "script" in job]
    return ["\n".join(each) if isinstance(each, list) else str(each) for each in found]


def _write(pytester: pytest.Pytester, text: str) -> Path:
    path = pytester.path / "checked.yml"
    path.write_text(text)
    return path


def _json(block: Block, pytester: pytest.Pytester) -> list[str]:
    json.loads(block.code)
    return []


READERS: dict[str, Callable[[Block, pytest.Pytester], list[str]]] = {
    "toml": _toml,
    "ini": _ini,
    "yaml": _yaml,
    "json": _json,
}
