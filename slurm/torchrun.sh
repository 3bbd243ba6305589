#!/usr/bin/env bash
# srun's task on every node: torchrun with NPROC processes.   srun --ntasks-per-node=1 slurm/torchrun.sh -m kamui_dist.train CONFIG
# NPROC, MASTER_ADDR and MASTER_PORT come from the job script (or interactive.sh), the rest from SLURM's variables of this step.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/task.sh"

# SLURM's warning goes to every process of a step. The ranks act on it; torchrun would die of it, and leave them behind.
trap '' USR1
# This shell outlives them, to tell srun what they ended with: torchrun knows only 0 and 1. Where a restart would only end the same
# way (2, 70), they leave their code in this file, and torchrun sees 0 (command_line.py).
trap : TERM INT HUP
noted=$(mktemp 2>/dev/null) || noted=
if [[ -n $noted ]]; then
  export KAMUI_EXIT_CODE_FILE=$noted
  trap 'rm -f "$noted"' EXIT
fi

# Who hosts the meeting is said and not guessed from host names; each agent tells the others the name that SLURM has for its node.
host=false
if ((SLURM_NODEID == 0)); then host=true; fi
own=()
if getent hosts "${SLURMD_NODENAME:-}" >/dev/null; then own=(--local-addr="$SLURMD_NODENAME"); fi

# One meeting for each attempt: a late rank of an earlier one finds nobody. After a crash the job is started anew (finish), rather
# than the processes in place: MAX_RESTARTS is for those who know why.
code=0
"$PYTHON" -m torch.distributed.run --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$NPROC" "${own[@]}" \
  --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-conf="is_host=$host,join_timeout=600" \
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$SLURM_STEP_ID" --max-restarts="${MAX_RESTARTS:-0}" "$@" || code=$?
if [[ -n $noted && -s $noted ]]; then code=$(<"$noted"); fi
exit "$code"
