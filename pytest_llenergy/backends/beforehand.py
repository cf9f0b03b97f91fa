# SPDX-License-Identifier: Apache-2.0
"""Converting a model by pytest's own Python, for ranks of another one that cannot do it themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import ModelError

#: In a process of its own: pytest's loads no framework. The search path is pytest's.
PROGRAM = """
import json, sys
source, path = json.loads(sys.argv[1])
sys.path[:] = path
from pytest_llenergy.backends.convert import local_directory
from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import ModelError
try:
    said = {"directory": local_directory(ModelSource(**source))}
except ModelError as error:
    said = {"error": str(error)}
print(json.dumps(said))
"""

#: Of a large file it takes minutes, once.
TIMEOUT_S = 3600.0


def converted(source: ModelSource) -> ModelSource:
    """A model with the ``directory`` that was made of it; as it is where it needs no conversion.

    Raises ``ModelError`` when that fails.
    """
    if source.kind not in ("gguf", "random"):
        return source
    told = json.dumps([asdict(source), [path for path in sys.path if isinstance(path, str)]])
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, told],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            # It runs beside the test's devices, and not on them.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{source.label}: not converted within {TIMEOUT_S:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        last = said[-1] if said else f"exit code {done.returncode}"
        raise ModelError(
            f"{source.label}: pytest's own Python converts it for engines of other environments, and cannot "
            f"({last}); pip install 'pytest-llenergy[transformers]', or name a directory"
        )
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise ModelError(answer["error"])
    return replace(source, directory=answer["directory"])
