# SPDX-License-Identifier: Apache-2.0
"""Run a backend's ranks in the Python of another environment, for libraries with conflicting requirements."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from pytest_llenergy.backends.timeouts import PROBE_PYTHON_TIMEOUT_S
from pytest_llenergy.errors import BackendError

#: Modules that every rank imports besides this package.
RANK_MODULES = ("msgspec", "cloudpickle")

#: Oldest supported Python (see pyproject.toml).
MIN_PYTHON = (3, 10)

#: Variables that would make another Python import the modules of pytest's environment.
INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

#: Runs on any Python 3, so that an old version can be reported.
PROBE_PROGRAM = """
import importlib.util, json, sys
sys.path[:] = [each for each in sys.path if each]
absent = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), absent]))
"""

REMEDY = "name a Python interpreter, such as vllm=.venvs/vllm/bin/python"


def activated_environment(environment: Mapping[str, str], python: str | None) -> dict[str, str]:
    """Return the environment variables as if the environment of ``python`` were activated."""
    if python is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in INTERPRETER_VARIABLES}
    # Libraries compile at run time, with programs installed next to the interpreter.
    programs = [str(Path(python).parent), *filter(None, [environment.get("PATH")])]
    return {**kept, "PATH": os.pathsep.join(programs)}


def missing_modules(python: str, modules: Iterable[str], name: str) -> tuple[str, ...]:
    """Return which of these modules, and of those that ranks need, an interpreter lacks. Results are cached.

    ``name`` is the backend, for messages. Raises ``BackendError`` if this is not a Python 3.10 or later.
    """
    try:
        return _probe_modules(python, (*modules, *RANK_MODULES))
    except BackendError as error:
        raise BackendError(f"the Python of {name}, {python}, {error}; {REMEDY}") from None


@lru_cache(maxsize=64)
def _probe_modules(python: str, modules: tuple[str, ...]) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            [python, "-c", PROBE_PROGRAM, *modules],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROBE_PYTHON_TIMEOUT_S,
            env=activated_environment(os.environ, python),
            check=False,
        )
        version, missing = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise BackendError(f"did not report its version within {PROBE_PYTHON_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise BackendError(f"cannot be started ({error.strerror})") from None
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        raise BackendError(f"is not a working Python (exit code {done.returncode}{last})") from None
    if tuple(version) < MIN_PYTHON:
        found, needed = (".".join(map(str, each)) for each in (version, MIN_PYTHON))
        raise BackendError(f"is Python {found}, and ranks need {needed} or later")
    return tuple(missing)
