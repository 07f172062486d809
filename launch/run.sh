#!/usr/bin/env bash
# Body of launch/pretrain_*.sh: bash launch/run.sh NAME [--set section.key=value ...]
#
# No ranks yet    start `deepspeed`, which starts NAME's script once per rank. Read from the
#                 environment: HOSTFILE, NUM_NODES, NUM_GPUS, INCLUDE, EXCLUDE, MASTER_ADDR,
#                 MASTER_PORT, NODE_RANK, SSH_PORT, LAUNCHER_ARGS, EXTRA_ARGS, DRY_RUN, PYTHON.
# Ranks exist     (deepspeed --no_python, torchrun --no-python, srun) become one of them.
set -euo pipefail

name=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z "${PYTHON:-}" ]]; then
    if [[ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" && -x "$root/.venv/bin/python" ]]; then
        PYTHON=$root/.venv/bin/python
    else
        PYTHON=$(command -v python3 || command -v python)
    fi
fi
export PYTHON PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

arguments=(--config "$root/launch/configs/$name.yaml")
is_rank=false
if [[ -n "${RANK:-}" || "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]]; then is_rank=true; fi
while [[ $# -gt 0 ]]; do
    case $1 in
        --local_rank=* | --local-rank=*) ;; # LOCAL_RANK says the same
        --local_rank | --local-rank) shift ;;
        -h | --help) is_rank=true arguments+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

if ! $is_rank; then
    exec "$PYTHON" -m megaparcae.launcher.command "$root/launch/$name.sh" "${arguments[@]}"
fi
if [[ -n "${EXTRA_ARGS:-}" ]]; then
    while IFS= read -r -d '' word; do arguments+=("$word"); done \
        < <(printf '%s' "$EXTRA_ARGS" | xargs printf '%s\0')
fi
exec "$PYTHON" -u -m megaparcae.train "${arguments[@]}"
