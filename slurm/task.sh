# shellcheck shell=bash
# What torchrun.sh and rank.sh share. Sourced, on every node.

if [[ -z ${SLURM_STEP_ID:-} || -z ${SLURM_PROCID:-} ]]; then
  # An allocation's shell (salloc) has the job's variables too, but it is one process.
  echo "$(basename -- "$0"): start me with srun (in an salloc shell: slurm/interactive.sh)" >&2
  exit 2
fi
project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
: "${PYTHON:=$project/.venv/bin/python}" "${NPROC:=${SLURM_GPUS_ON_NODE:-1}}"
if [[ -z ${MASTER_ADDR:-} ]]; then MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); fi
: "${MASTER_PORT:=$((10000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 20000))}"
export PYTHON NPROC MASTER_ADDR MASTER_PORT
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH}

# gloo would take the interface that this node's own name resolves to, often a loopback: better the one that reaches the first node.
if [[ -z ${GLOO_SOCKET_IFNAME:-} ]] && ((SLURM_STEP_NUM_NODES > 1)) && command -v ip >/dev/null; then
  address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }') || true
  interface=$(ip -o addr show to "${address:-0.0.0.0}/32" 2>/dev/null | awk '{ print $2; exit }') || true # on the first node itself
  [[ -n $interface || -z $address ]] ||
    interface=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p') || true
  if [[ -n $interface ]]; then export GLOO_SOCKET_IFNAME=$interface; fi
fi

export RANKS_PER_NODE=$NPROC
. "$project/launch/env.sh"
