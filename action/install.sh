#!/usr/bin/env bash
# Install pytest-llenergy: action/install.sh PACKAGE [FOLDER], with the Python that PYTHON names.
# FOLDER gets an environment of its own; without it the package goes into that Python.
# -I keeps modules of the working directory out, such as a pip.py in the checkout or in an artifact.
set -euo pipefail

python=${PYTHON:-python}
if [[ -n ${2:-} ]]; then
    "$python" -I -m venv "$2"
    python=$2/bin/python
fi
"$python" -I -m pip install --quiet --disable-pip-version-check "$1" >&2
echo "$python"
