#!/usr/bin/env bash
# All checks: environment, ruff, mypy, tests.
#
#   bash tests/run.sh                          everything, on a fresh machine too
#   bash tests/run.sh tests/config -k batch    arguments go to pytest; ruff and mypy are left out
#   PYTHON=/path/to/python bash tests/run.sh   in an environment of your own
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/environment.sh

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
summary=()
failed=0

check() { # check NAME COMMAND...: run it, note the outcome and the time
    local name=$1 started=$SECONDS outcome
    shift
    echo "== $name"
    if "$@"; then outcome=passed; else outcome="FAILED (exit code $?)" failed=1; fi
    summary+=("$(printf '%-8s %s, %d s' "$name" "$outcome" $((SECONDS - started)))")
}

if [[ $# -eq 0 ]]; then
    check style "$PYTHON" -m ruff check .
    check format "$PYTHON" -m ruff format --check .
    check types "$PYTHON" -m mypy
fi
check tests "$PYTHON" -m pytest "$@"

echo
echo "== summary"
printf '%s\n' "${summary[@]}"
echo "python   $PYTHON"
exit $failed
