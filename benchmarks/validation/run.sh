#!/usr/bin/env bash
# Validate on the GPU of this machine, in under thirteen minutes and without a network:
#   benchmarks/validation/run.sh --out DIR [--parts sensor,accuracy,…] [--total SECONDS] [--dry]
# PYTHON names another interpreter than python3. Card settings are left as they are.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" "$root/benchmarks/validation/install.py" "$site"
export PYTHONPATH="$root:$site${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m benchmarks.validation.runner "$@"
