#!/usr/bin/env bash
# srun's task for every rank: SLURM's variables become the launch contract RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT.
#   srun --ntasks-per-node=8 slurm/rank.sh -m kamui_dist.train CONFIG
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/task.sh"

# Of the step and not of the job: a step may be smaller than its allocation.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
export LOCAL_WORLD_SIZE=$NPROC
# --gpus-per-task and --gpu-bind show each task only its own GPU, which then is number 0 to it.
if [[ ${CUDA_VISIBLE_DEVICES:-,} != *,* ]]; then LOCAL_RANK=0; fi

# The rank hears signals itself. This shell outlives them, to tell srun that a rank which stopped on request (75) is no failure:
# --kill-on-bad-exit would kill the others. RUN/status.json says what happened.
trap '' USR1
trap : TERM INT HUP
code=0
"$PYTHON" "$@" || code=$?
((code == 75)) || exit "$code"
