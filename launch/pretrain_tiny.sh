#!/usr/bin/env bash
# A Parcae that learns English in minutes, also on CPU (NUM_GPUS=2 for two processes).
#
#     bash launch/pretrain_tiny.sh [--set section.key=value ...]
#     deepspeed --hostfile HOSTFILE --no_python ./launch/pretrain_tiny.sh [...]
#     srun bash launch/pretrain_tiny.sh [...]         (one task per GPU)
#
# DRY_RUN=1 prints ranks, hosts and devices and starts nothing. More in launch/run.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" pretrain_tiny "$@"
