# Source me: sets PYTHON to an interpreter that can run megaparcae.
#
#   PYTHON given by the caller   taken as it is, nothing is installed
#   otherwise                    .venv in the checkout: made on first use, brought up to date when
#                                setup.py or launch/constraints.txt have changed
#
# torch is installed first: the one of PyPI (CUDA on Linux), or whatever build pip's own settings
# (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) offer under that version.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 or newer on PATH; install one, or set PYTHON to it" >&2
    return 1
}

_make_environment() {
    local venv=$checkout/.venv base wanted started=$SECONDS
    wanted=$(cat "$checkout/setup.py" "$checkout/launch/constraints.txt" | cksum)
    PYTHON=$venv/bin/python
    if [[ -x $PYTHON && "$(cat "$venv/.installed" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    echo "== environment: installing into $venv" >&2
    if [[ ! -x $PYTHON ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        base=$(_find_python) || return 1
        if ! "$base" -m venv --clear "$venv"; then
            echo "error: $base can't make an environment; on Debian and Ubuntu:" \
                "apt-get install python3-venv" >&2
            return 1
        fi
    fi
    local pip=("$PYTHON" -m pip --disable-pip-version-check install --quiet
        -c "$checkout/launch/constraints.txt")
    if ! { "${pip[@]}" setuptools wheel && "${pip[@]}" "torch==2.13.0" &&
        "${pip[@]}" --no-build-isolation -e "$checkout[test]"; } 2> >(_without_noise >&2); then
        echo "error: pip failed (see above); run the command again to continue" >&2
        return 1
    fi
    echo "$wanted" >"$venv/.installed"
    echo "== environment: ready after $((SECONDS - started)) s" >&2
}

_without_noise() {
    grep -v "is ignored: it is neither a file nor a directory" || true
}

if [[ -z "${PYTHON:-}" ]]; then
    _make_environment || exit 1
fi
export PYTHON
