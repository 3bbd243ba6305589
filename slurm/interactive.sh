#!/usr/bin/env bash
# Trains, or checks, in an allocation that you already have: torchrun on all of its nodes, in the foreground.
#
#   salloc --nodes=2 --gpus-per-node=8 --ntasks-per-node=1 --cpus-per-task=64 --time=1:00:00
#   slurm/interactive.sh check configs/gpt2_1558m_fsdp.toml       # preflight: network, disk, clocks, strategies
#   slurm/interactive.sh configs/gpt2_1558m_fsdp.toml train.steps=20
#
# Ctrl-C stops with a checkpoint. Nothing is requeued here. NPROC=2: so many processes a node instead of one for each GPU.
# `sbatch --nodes=2 --gpus-per-node=8 slurm/interactive.sh check CONFIG` runs the check as a job.
set -euo pipefail
if [[ -z ${PROJECT_DIR:-} ]]; then
  PROJECT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
  # sbatch runs a copy elsewhere
  [[ -f $PROJECT_DIR/slurm/common.sh ]] || PROJECT_DIR=${SLURM_SUBMIT_DIR:-$PWD}
fi
ENV_DIR=${ENV_DIR:-$PROJECT_DIR/.venv}
. "$PROJECT_DIR/slurm/common.sh"
me=interactive.sh
[[ -n $job ]] || die 2 "there is no allocation; begin with: salloc --nodes=2 --gpus-per-node=8 --ntasks-per-node=1 --time=1:00:00"

if [[ ${1:-} == check ]]; then
  command=(-m kamui_dist.cli)
else
  [[ $# -gt 0 && $1 != -* ]] || die 2 "usage: $0 [check] CONFIG [section.key=value ...]"
  command=(-m kamui_dist.train)
fi
NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE##*:}}}
export NPROC=${NPROC:-1}
MASTER_ADDR=$(head_address "$SLURM_JOB_NODELIST")
export MASTER_ADDR MASTER_PORT=$((10000 + RANDOM % 20000)) # this shell may be on the login node: which ports are free is not known
if [[ ${command[1]} == kamui_dist.train ]]; then
  "$python" -m kamui_dist.train "$@" --check --world-size $((SLURM_JOB_NUM_NODES * NPROC))
fi
# -X: one Ctrl-C reaches the ranks; else srun wants two within a second.
exec srun -X --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  "$PROJECT_DIR/slurm/torchrun.sh" "${command[@]}" "$@"
