#!/usr/bin/env bash
# Start a throw-away, real Slurm cluster (munged + slurmctld + N slurmd) on this one machine.
#
#   up.sh DIR            start (or, if it already runs, just print how to use it)
#   node.sh DIR kill N   'power failure' of one node (and: start N)
#   down.sh DIR          stop it (by pid), and end what is left of its jobs
#   . DIR/env.sh               SLURM_CONF for sbatch/srun/squeue/scontrol/scancel
#
# Everything lives under DIR (config, keys, sockets, state, logs, pids).  Nothing outside it is
# written: no /etc/hosts, /etc/slurm, /etc/munge or systemd unit is needed or touched.
#
# Knobs (environment):
#   TSLURM_NODES=2              virtual nodes node1..nodeN
#   TSLURM_CPUS=4               CPUs that each node claims (may exceed what the machine has)
#   TSLURM_MEM=4000             MB that each node claims
#   TSLURM_GPUS=2               fake gpus per node (0: none)
#   TSLURM_ISOLATION=uts|none   uts (default as root): each slurmd has its own hostname and /etc/hosts
#   TSLURM_CRED_EXPIRE=5        seconds a requeued job is held back (stock Slurm: 120)
#   TSLURM_KILL_WAIT=10         seconds between SIGTERM and SIGKILL (stock Slurm: 30)
#   TSLURM_NODE_TIMEOUT=15      seconds until a silent node is DOWN (stock Slurm: 300)
#   TSLURM_GRACE=15             GraceTime of the preemptable partition 'low'
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
DIR=$(cd "$1" && pwd -P)
NODES=${TSLURM_NODES:-2} CPUS=${TSLURM_CPUS:-4} MEM=${TSLURM_MEM:-4000} GPUS=${TSLURM_GPUS:-2}
CRED_EXPIRE=${TSLURM_CRED_EXPIRE:-5} KILL_WAIT=${TSLURM_KILL_WAIT:-10}
NODE_TIMEOUT=${TSLURM_NODE_TIMEOUT:-15} GRACE=${TSLURM_GRACE:-15}
if [ "$(id -u)" = 0 ]; then ISOLATION=${TSLURM_ISOLATION:-uts}; else ISOLATION=${TSLURM_ISOLATION:-none}; fi
for v in "${!SLURM_@}"; do unset "$v"; done          # when started from inside a job of another cluster
ME=$(id -un)
HERE=$(cd "$(dirname "$0")" && pwd -P)
export PATH=$PATH:/usr/sbin:/sbin

die() { echo "up.sh: $*" >&2; exit 1; }
alive() {   # pid file -> is that process alive and ours?  (kill -0 also succeeds on a zombie, and on a reused pid)
    local p; p=$(cat "$1" 2>/dev/null) && [ -n "$p" ] && tr '\0' ' ' < "/proc/$p/cmdline" 2>/dev/null | grep -qF "$DIR"; }
usage() {
    cat <<U
slurm cluster in $DIR: nodes node[1-$NODES], partitions batch* low high, $GPUS fake gpu(s) per node
  use:   . $DIR/env.sh; sinfo; sbatch job.sbatch; squeue     ('sbatch --wait' looks only after 2, 10, 42 ... s)
  logs:  $DIR/log/    finished jobs: $DIR/log/jobcomp.log
  fail:  $HERE/node.sh $DIR kill 2     (and: start 2)
  stop:  $HERE/down.sh $DIR
U
}

[ ${#DIR} -le 80 ] || die "DIR is too long for a unix socket path: $DIR"
for b in munged slurmctld slurmd sinfo scontrol sbatch srun; do
    command -v $b >/dev/null || die "no $b: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
done

# ---- already running?
if [ -f "$DIR/env.sh" ] && alive "$DIR/run/munged.pid" && alive "$DIR/run/slurmctld.pid"; then
    ok=1
    for i in $(seq "$NODES"); do alive "$DIR/run/slurmd.node$i.pid" || ok=0; done
    [ $ok = 1 ] && { echo "already running"; usage; exit 0; }
fi
"$HERE/down.sh" "$DIR" >/dev/null 2>&1 || true   # clean up a half-dead one
rm -rf "${DIR:?}"/{run,state,spool,dev,munge}
mkdir -p "$DIR"/{run,state,spool,dev,log,munge,job}
chmod 755 "$DIR" "$DIR/munge" "$DIR/run"

# ---- free ports: one for slurmctld, one for each slurmd
BASE=$(python3 - "$NODES" <<'P'
import random, socket, sys
n = int(sys.argv[1]) + 1
for _ in range(200):
    base = random.randrange(20000, 30000)          # below the ephemeral range
    socks = []
    try:
        for p in range(base, base + n):
            s = socket.socket(); socks.append(s); s.bind(("0.0.0.0", p))
        print(base); break
    except OSError:
        pass
    finally:
        for s in socks: s.close()
else:
    sys.exit("no free port range")
P
) || die "no free ports"

# ---- munge: own key, own socket
MUNGE_SOCK=$DIR/munge/socket
(umask 077; head -c 128 /dev/urandom > "$DIR/munge/key")
munged --force --key-file="$DIR/munge/key" --socket="$MUNGE_SOCK" --pid-file="$DIR/run/munged.pid" \
       --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed" --num-threads=2 2>>"$DIR/log/munged.err" \
    || die "munged did not start: $(tail -3 "$DIR/log/munged.err")"

# ---- addresses: every node has a loopback address and, with uts isolation, a hostname of its own
HOST=$(hostname -s 2>/dev/null || hostname)
addr() { if [ "$ISOLATION" = uts ]; then echo "127.77.0.$1"; else echo 127.0.0.1; fi; }
nhost() { if [ "$ISOLATION" = uts ]; then echo "node$1"; else echo "$HOST"; fi; }

GRES= ; [ "$GPUS" -gt 0 ] && GRES="Gres=gpu:$GPUS"
{
cat <<C
# written by up.sh
ClusterName=throwaway
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
AuthInfo=socket=$MUNGE_SOCK,cred_expire=$CRED_EXPIRE
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
# no cgroups, no systemd.  linuxproc follows the parent-child tree, so it also finds torchrun's
# workers, which torchrun puts into sessions of their own (proctrack/pgid was not tried).
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.log
MpiDefault=none
SwitchType=switch/none
# allow nodes that claim more CPUs and memory than the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# refuse at once what can never run (stock Slurm: queue it for ever)
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
# the state is new at every start: do not hand out the job ids of an earlier run again, whose %j logs and
# run-\$SLURM_JOB_ID directories may still be there
FirstJobId=$(( $(date +%s) % 50000000 + 1000 ))
# requeue and preemption
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
# short timers, for tests
KillWait=$KILL_WAIT
SlurmdTimeout=$NODE_TIMEOUT
SlurmctldTimeout=30
InactiveLimit=0
MinJobAge=600
ReturnToService=2
MessageTimeout=10
C
[ "$GPUS" -gt 0 ] && echo "GresTypes=gpu"
for i in $(seq "$NODES"); do
    echo "NodeName=node$i NodeHostname=$(nhost "$i") NodeAddr=$(addr "$i") Port=$((BASE + i)) CPUs=$CPUS RealMemory=$MEM $GRES State=UNKNOWN"
done
cat <<C
PartitionName=batch Nodes=ALL Default=YES PriorityTier=5 MaxTime=INFINITE DefaultTime=10 State=UP PreemptMode=OFF
PartitionName=low   Nodes=ALL PriorityTier=1 MaxTime=INFINITE DefaultTime=10 State=UP PreemptMode=REQUEUE GraceTime=$GRACE
PartitionName=high  Nodes=ALL PriorityTier=10 MaxTime=INFINITE DefaultTime=10 State=UP PreemptMode=OFF
C
} > "$DIR/slurm.conf"
echo "CgroupPlugin=cgroup/v1" > "$DIR/cgroup.conf"
: > "$DIR/gres.conf"
for ((g = 0; g < GPUS; g++)); do ln -s /dev/null "$DIR/dev/nvidia$g"; done   # must be a device
[ "$GPUS" -gt 0 ] && for i in $(seq "$NODES"); do
    echo "NodeName=node$i Name=gpu File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >> "$DIR/gres.conf"
done
touch "$DIR/log/jobcomp.log"

cat > "$DIR/env.sh" <<C
export SLURM_CONF=$DIR/slurm.conf
export TSLURM_ISOLATION=$ISOLATION
C
# shellcheck source=/dev/null
. "$DIR/env.sh"

{ printf '127.0.0.1 localhost %s\n' "$HOST"
  for i in $(seq "$NODES"); do echo "$(addr "$i") node$i"; done; } > "$DIR/hosts"

# ---- daemons (each one daemonizes itself and writes its pid file).
# Everything is closed off from this shell (setsid, /dev/null) so that no caller waits on them.
setsid slurmctld -f "$DIR/slurm.conf" </dev/null >>"$DIR/log/slurmctld.out" 2>&1 || die "slurmctld: $(tail -3 "$DIR/log/slurmctld.out")"
for i in $(seq "$NODES"); do "$HERE/node.sh" "$DIR" start "$i" || die "slurmd node$i did not start"; done

if [ "$ISOLATION" = none ] && ! getent hosts node1 >/dev/null; then
    echo "up.sh: note: without uts isolation node1 does not resolve here; use its NodeAddr (scontrol show node) as MASTER_ADDR" >&2
fi

# ---- wait until all nodes are idle
for _ in $(seq 150); do
    n=$(sinfo -h -N -p batch -t idle -o %N 2>/dev/null | sort -u | wc -l) || n=0
    [ "$n" = "$NODES" ] && { usage; exit 0; }
    sleep 0.2
done
sinfo -N -l || true
tail -5 "$DIR"/log/*.log >&2
die "the nodes did not become idle in 30 s"
