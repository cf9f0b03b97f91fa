# SPDX-License-Identifier: Apache-2.0
"""A Python of another environment, for an engine whose requirements are not those of pytest's own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from pytest_llenergy.errors import BackendError

#: What every rank imports, beside this package.
RANK_MODULES = ("msgspec", "cloudpickle")

#: The oldest that this package runs on (pyproject.toml).
MIN_PYTHON = (3, 10)

#: These would give it the modules of the environment that pytest runs in.
INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

#: It only looks for modules, but may have to be read from a slow disk (seconds).
TIMEOUT_S = 60.0

#: Standard library only, and for any Python: an old one is told of, too.
PROBE_PROGRAM = """
import sys
version = list(sys.version_info[:2])
absent = []
if version >= [3, 10]:
    import importlib.util
    sys.path[:] = [each for each in sys.path if each]
    for name in sys.argv[1:]:
        if importlib.util.find_spec(name) is None:
            absent.append(name)
import json
print(json.dumps([version, absent]))
"""

REMEDY = "energy_python needs lines such as vllm=.venvs/vllm/bin/python"


def activated_environment(environment: Mapping[str, str], python: str | None) -> dict[str, str]:
    """The environment as it is when that of ``python`` has been activated; as it is, without one."""
    if python is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in INTERPRETER_VARIABLES}
    # Engines compile at run time, with programs that are installed beside them.
    programs = [str(Path(python).parent), *filter(None, [environment.get("PATH")])]
    return {**kept, "PATH": os.pathsep.join(programs)}


def missing_modules(python: str, modules: Iterable[str], name: str) -> tuple[str, ...]:
    """Which modules that Python does not have: of these, and of those that a rank needs. Asked once.

    ``name`` is whose it is, for messages. Raises ``BackendError`` for what is no Python of 3.10 or later.
    """
    try:
        return _probe_modules(python, (*modules, *RANK_MODULES))
    except BackendError as error:
        raise BackendError(f"the Python of {name}, {python}, {error}; {REMEDY}") from None


@lru_cache(maxsize=64)
def _probe_modules(python: str, modules: tuple[str, ...]) -> tuple[str, ...]:
    path = Path(python)
    if path.is_dir():
        raise BackendError("is a directory")
    if not path.exists():
        raise BackendError("does not exist")
    if not os.access(path, os.X_OK):
        raise BackendError("cannot be executed")
    try:
        done = subprocess.run(
            [python, "-c", PROBE_PROGRAM, *modules],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            env=activated_environment(os.environ, python),
            check=False,
        )
        version, missing = json.loads(done.stdout.strip().splitlines()[-1])
        found = ".".join(map(str, version))
    except subprocess.TimeoutExpired:
        raise BackendError(f"did not say its version within {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise BackendError(f"cannot be started ({error.strerror})") from None
    except (ValueError, TypeError, IndexError):
        said = done.stderr.strip().splitlines()
        last = f": {said[-1]}" if said else ""
        raise BackendError(f"is no Python that works (exit code {done.returncode}{last})") from None
    if tuple(version) < MIN_PYTHON:
        raise BackendError(f"is Python {found}, and ranks need {'.'.join(map(str, MIN_PYTHON))} or later")
    return tuple(missing)
