#!/usr/bin/env bash
# Parcae 1.3B on 8 GPUs. For 64 or 256:
#     bash launch/pretrain_1p3b.sh --config launch/configs/pretrain_1p3b_64gpus.yaml
#
#     bash launch/pretrain_1p3b.sh [--set section.key=value ...]
#     deepspeed --hostfile HOSTFILE --no_python ./launch/pretrain_1p3b.sh [...]
#     srun bash launch/pretrain_1p3b.sh [...]         (one task per GPU)
#
# DRY_RUN=1 prints ranks, hosts and devices and starts nothing. More in launch/run.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" pretrain_1p3b "$@"
