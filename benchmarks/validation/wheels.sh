#!/usr/bin/env bash
# Download the plugin's dependencies into wheels/ in this folder, for a machine without them and without a network:
#   benchmarks/validation/wheels.sh [PYTHON-VERSION of that machine, 3.12]
# For Linux on x86-64; git ignores the folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${1:-3.12}" "${platforms[@]}" -c "$here/../../constraints.txt" -d "$here/wheels" \
    cloudpickle filelock msgspec nvidia-ml-py platformdirs psutil rich markdown-it-py mdurl pygments
ls "$here/wheels"
