#!/usr/bin/env bash
# Trains on this node: one process for each GPU, or 2 processes where there is none.
#
#   launch/local.sh configs/austen_small.toml [section.key=value ...]
#
#   NPROC=4         processes, instead of one for each GPU
#   MAX_RESTARTS=3  after a crash, start all ranks again from the newest checkpoint, at most so often (default 0: a fault that would
#                   only come back should end the job). Exit codes 2 and 70, which would come back, are never tried again
#
# To stop a run so that the same command goes on from there: Ctrl-C, or SIGTERM to this script, or SIGUSR1 or SIGTERM to any one of
# the ranks, or `touch RUN_DIR/STOP`. All ranks finish the step, write a checkpoint and end. Asked twice, they have 30 seconds; asked
# three times, they are killed, and the run goes on from its last checkpoint. SIGUSR1 to this script or to torchrun does nothing.
#
# Exit code: the trainer's. 0 finished, 2 the config or the data is wrong, 75 stopped with a checkpoint, 70 stopped by the watch,
# 76 a rank hung and was named (after MAX_RESTARTS restarts).
# Relative paths, in the config too, are relative to where you are.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
usage "$@"

RANKS_PER_NODE=$(ranks_here "$@")
. "$root/launch/env.sh"

# --standalone: a rendezvous on a free port, so that two runs on one machine do not meet.
run_torchrun "--standalone --nproc-per-node=$RANKS_PER_NODE" "$RANKS_PER_NODE" "$@"
