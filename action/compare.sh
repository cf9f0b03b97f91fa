#!/usr/bin/env bash
# Measure both commits of a pull request in turn, and publish the comparison.
# All inputs are environment variables, so that no branch name or title is ever executed.
set -euo pipefail

: "${BASE:?the commit or branch to compare with}" "${COMMAND:?the pytest command}" "${OUT:?a folder for results}"
python=${PYTHON:-python}
# Drop the working directory from the path, so that modules in the checkout are not imported.
llenergy() {
    "$python" -c "import sys; sys.path[:1] = []; from pytest_llenergy.cli import main; sys.exit(main())" "$@"
}
mkdir -p "$OUT"

if [[ $(git rev-parse --is-shallow-repository) == true ]]; then
    git fetch --quiet --unshallow origin
fi
head=$(git rev-parse --verify "${HEAD:-HEAD}^{commit}")
base=$(git rev-parse --verify --quiet "$BASE^{commit}") || {
    git fetch --quiet origin "$BASE"
    base=$(git rev-parse --verify "FETCH_HEAD^{commit}")
}
# Compare with the merge base, so that later changes of others do not count.
merge_base=$(git merge-base "$base" "$head")
echo "base $merge_base (merge base with $BASE), head $head"
if [[ $merge_base == "$head" ]]; then
    echo "head $head is part of $BASE: there is nothing of its own to compare" >&2
    exit 2
fi

arguments=(--base "$merge_base" --head "$head" --output "$OUT/energy.json")
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
options=$(words options "${OPTIONS:-}")
command=$(words command "$COMMAND")
[[ -z $options ]] || mapfile -t -O "${#arguments[@]}" arguments <<<"$options"
mapfile -t command <<<"$command"

status=0
llenergy ab "${arguments[@]}" -- "${command[@]}" || status=$?
if [[ -s $OUT/energy.json ]]; then
    for format in markdown html ${FORMATS:-}; do
        # The exit code of the comparison is known already.
        llenergy compare "$OUT/energy.json" --format "$format" \
            --output "$OUT/energy.$format" || true
    done
    [[ -z ${GITHUB_ACTIONS:-} ]] || llenergy compare "$OUT/energy.json" --format github || true
fi
exit "$status"
