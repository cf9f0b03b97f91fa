# SPDX-License-Identifier: Apache-2.0
"""Run a backend's ranks in the Python of another environment, for libraries with conflicting requirements."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pytest_llenergy.backends.timeouts import PROBE_PYTHON_TIMEOUT_S
from pytest_llenergy.errors import BackendError

#: Modules that every rank imports besides this package.
RANK_MODULES = ("msgspec", "cloudpickle")

#: Variables that would make another Python import the modules of pytest's environment.
INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

PROBE_PROGRAM = """
import importlib.util, json, sys
sys.path[:] = [each for each in sys.path if each]
absent = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps(absent))
"""


def activated_environment(environment: Mapping[str, str], python: str | None) -> dict[str, str]:
    """Return the environment variables as if the environment of ``python`` were activated."""
    if python is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in INTERPRETER_VARIABLES}
    # Libraries compile at run time, with programs installed next to the interpreter.
    programs = [str(Path(python).parent), *filter(None, [environment.get("PATH")])]
    return {**kept, "PATH": os.pathsep.join(programs)}


@lru_cache(maxsize=64)
def missing_modules(python: str, modules: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return which of these modules, and of those that ranks need, an interpreter lacks.

    ``name`` is the backend, for messages. Raises ``BackendError`` if this is no Python interpreter.
    """
    try:
        done = subprocess.run(
            [python, "-c", PROBE_PROGRAM, *modules, *RANK_MODULES],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROBE_PYTHON_TIMEOUT_S,
            env=activated_environment(os.environ, python),
            check=False,
        )
        # A wrapper or sitecustomize may print before it.
        return tuple(json.loads(done.stdout.rstrip().rpartition("\n")[2]))
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"cannot be used ({error})"
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = f"is not a working Python ({said[-1]})"
    raise BackendError(
        f"the Python of {name}, {python}, {why}; name a Python interpreter, such as "
        "vllm=.venvs/vllm/bin/python"
    )
