#!/usr/bin/env bash
# Measure both commits of a pull request in turn, and publish the comparison.
# All inputs are environment variables, so that no branch name or title is ever executed.
set -euo pipefail

usage() {
    echo "$1" >&2
    exit 2
}
: "${COMMAND:?the pytest command}" "${OUT:?a folder for results}"
if [[ ${BASE:-} =~ ^0*$ ]]; then
    usage "no commit to compare with, as in a manual run or the first push of a branch: give base, such as main"
fi
python=${PYTHON:-python}
# Drop the working directory from the path, so that modules in the checkout are not imported.
llenergy() {
    "$python" -c "import sys; sys.path[:1] = []; from pytest_llenergy.cli import main; sys.exit(main())" "$@"
}
mkdir -p "$OUT"

if [[ $(git rev-parse --is-shallow-repository) == true ]]; then
    git fetch --quiet --unshallow origin ||
        usage "this clone is shallow, and git fetch --unshallow failed: check out with fetch-depth: 0"
fi
head=${HEAD:-HEAD}
if ! git rev-parse --verify --quiet "$BASE^{commit}" >/dev/null && git fetch --quiet origin "$BASE" 2>/dev/null; then
    BASE=$(git rev-parse --verify "FETCH_HEAD^{commit}")
fi

# Compare with the merge base, so that later changes of others do not count.
arguments=(--base "$BASE...$head" --head "$head" --output "$OUT/energy.json")
arguments+=(--inconclusive "${INCONCLUSIVE:-warn}")
[[ -z ${PAIRS:-} ]] || arguments+=(--pairs "$PAIRS")
[[ -z ${FLOOR:-} ]] || arguments+=(--floor "$FLOOR")
[[ -z ${SETUP:-} ]] || arguments+=(--setup "$SETUP")
while read -r expression; do
    [[ -z $expression ]] || arguments+=(--fail-on "$expression")
done <<<"${FAIL_ON:-}"

# Split like a shell, but without any expansion.
words() {
    xargs -r printf '%s\n' <<<"$2" || {
        echo "$1 has a quote that is not closed: $2" >&2
        return 2
    }
}
options=$(words options "${OPTIONS:-}") || exit 2
command=$(words command "$COMMAND") || exit 2
[[ -z $options ]] || mapfile -t -O "${#arguments[@]}" arguments <<<"$options"
mapfile -t command <<<"$command"

status=0
llenergy ab "${arguments[@]}" -- "${command[@]}" || status=$?
if [[ -s $OUT/energy.json ]]; then
    for format in markdown html; do
        # The exit code of the comparison is known already.
        llenergy compare "$OUT/energy.json" --format "$format" \
            --output "$OUT/energy.$format" || true
    done
    [[ -z ${GITHUB_STEP_SUMMARY:-} ]] || cat "$OUT/energy.markdown" >>"$GITHUB_STEP_SUMMARY" || true
fi
exit "$status"
