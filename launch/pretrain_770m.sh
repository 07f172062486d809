#!/usr/bin/env bash
# Parcae 770m, the paper's run.
#
#     bash launch/pretrain_770m.sh [--set section.key=value ...]
#     deepspeed --hostfile HOSTFILE --no_python ./launch/pretrain_770m.sh [...]
#     srun bash launch/pretrain_770m.sh [...]         (one task per GPU)
#
# DRY_RUN=1 prints ranks, hosts and devices and starts nothing. More in launch/run.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" pretrain_770m "$@"
