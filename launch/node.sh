#!/usr/bin/env bash
# Trains on several nodes without a scheduler: start this on every node, with the same CONFIG and overrides. (SLURM: see slurm/.)
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/node.sh configs/gpt2_1558m_fsdp.toml [section.key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 launch/node.sh configs/gpt2_1558m_fsdp.toml [section.key=value ...]
#
#   NNODES          number of nodes
#   NODE_RANK       this node's number, 0 to NNODES - 1, each once
#   MASTER_ADDR     a name or address of node 0 that every node reaches
#   MASTER_PORT     a free port there, the same on all nodes (default 29500)
#   NPROC           processes on this node, the same on all (default: one for each GPU)
#
# The rendezvous is torchrun's static one: ranks are numbered as you numbered the nodes, and they meet at the address that you gave.
# The other kind (c10d) numbers nodes by arrival and takes addresses from host names, which often resolve to the loopback. Static
# knows no restarts: after a crash start the command on all nodes again, and the run goes on from its newest checkpoint.
#
# The run directory has to be on a file system that all nodes share. If the ranks do not find each other, see the end of env.sh.
# Stopping and exit codes: as for local.sh, and one node's signal stops them all.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

missing=
for name in NNODES NODE_RANK MASTER_ADDR; do
  [[ -n ${!name:-} ]] || missing+=" $name"
done
[[ -z $missing ]] || die 2 "set$missing (for example NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1)"
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || die 2 "NNODES is the number of nodes, 1 or more; it is '$NNODES'"
if [[ ! $NODE_RANK =~ ^[0-9]+$ ]] || ((10#$NODE_RANK >= NNODES)); then
  die 2 "NODE_RANK is this node's number, from 0 to NNODES - 1 = $((NNODES - 1)); it is '$NODE_RANK'"
fi
[[ ${MAX_RESTARTS:-0} == 0 ]] || die 2 "MAX_RESTARTS works on one node only (launch/local.sh); start the nodes again instead"
usage "$@"

RANKS_PER_NODE=$(ranks_here "$@")
. "$root/launch/env.sh"

run_torchrun "--nnodes=$NNODES --node-rank=$NODE_RANK --nproc-per-node=$RANKS_PER_NODE \
  --master-addr=$MASTER_ADDR --master-port=${MASTER_PORT:-29500}" $((NNODES * RANKS_PER_NODE)) "$@"
