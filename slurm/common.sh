# shellcheck shell=bash
# What the job scripts share: `begin` before the ranks are started, `finish` after they have ended. Sourced; PROJECT_DIR and
# ENV_DIR are set.

me=slurm
die() { # CODE MESSAGE
  echo "$me: $2" >&2
  exit "$1"
}

python=${ENV_DIR:?}/bin/python
[[ -x $python ]] || die 2 "ENV_DIR = $ENV_DIR has no bin/python; run $PROJECT_DIR/launch/install.sh on the login node, or set ENV_DIR"
export PATH=$ENV_DIR/bin:$PATH
# The code of this checkout runs, whatever is installed in the environment.
export PYTHONPATH=$PROJECT_DIR${PYTHONPATH:+:$PYTHONPATH} PYTHON=$python

# The name by which this job, and nothing else, can be requeued: the last task of an array has the array's own id as SLURM_JOB_ID,
# and to requeue that is to requeue all tasks.
job=${SLURM_JOB_ID:-}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# head_address NODELIST: a name or address of the first host that the others reach. Nobody should parse a node list by hand.
head_address() {
  local head address
  head=$(scontrol show hostnames "$1" | head -n 1)
  [[ -n $head ]] || return 1
  if ! getent hosts "$head" >/dev/null; then # no name service for node names: SLURM knows the address
    address=$(scontrol show node "$head" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    head=${address:-$head}
  fi
  echo "$head"
}

# free_port START: the first port from START on that is free on this host, which is the first of the allocation.
free_port() {
  "$python" -c '
import socket, sys
for port in range(int(sys.argv[1]), int(sys.argv[1]) + 200):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
        print(port)
        break
else:
    sys.exit("slurm: no free port")' "$1"
}

# begin WORLD_SIZE CONFIG [overrides]: sets run_dir, MASTER_ADDR and MASTER_PORT; exits with 2 for a config that is wrong.
begin() {
  local world=$1
  shift
  [[ $# -gt 0 && $1 != -* ]] || die 2 "usage: sbatch SCRIPT CONFIG [section.key=value ...]"
  # A requeued job was checked before; the ranks look again in any case.
  ((${SLURM_RESTART_COUNT:-0} > 0)) || "$python" -m kamui_dist.train "$@" --check --world-size "$world" || exit
  run_dir=$("$python" -m kamui_dist.train "$@" --print run.dir --world-size "$world") || exit
  run_dir=$(realpath -ms -- "$run_dir")
  mkdir -p "$run_dir" || die 2 "run.dir: $run_dir cannot be made"

  MASTER_ADDR=$(head_address "$SLURM_JOB_NODELIST") || die 1 "scontrol does not tell the hosts of $SLURM_JOB_NODELIST"
  # Below the range from which the kernel gives ports to outgoing connections (32768 on).
  MASTER_PORT=$(free_port $((10000 + SLURM_JOB_ID * 7 % 20000))) || exit
  export MASTER_ADDR MASTER_PORT
  "$python" "$PROJECT_DIR/slurm/requeue.py" begin "$run_dir" "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" || exit
  echo "$me: job $job, attempt ${SLURM_RESTART_COUNT:-0}: $SLURM_JOB_NUM_NODES node(s) ($SLURM_JOB_NODELIST) x $NPROC = $world process(es)," \
    "meeting at $MASTER_ADDR:$MASTER_PORT, run directory $run_dir"
}

# finish CODE: what the ranks' srun ended with. Ends the script; requeues the job if requeue.py says so.
finish() {
  local code=$1 lost='' verdict reason state
  if ((code)) && ! nodes_answer; then lost=--lost-node; fi
  # Two lines: "requeue" or an exit code, and the reason.
  { read -r verdict && read -r reason; } < <("$python" "$PROJECT_DIR/slurm/requeue.py" end "$run_dir" "$job" \
    "${SLURM_RESTART_COUNT:-0}" "$code" --max-idle "${MAX_IDLE:-2}" $lost) || die 1 "requeue.py failed; not requeued"
  echo "$me: job $job, attempt ${SLURM_RESTART_COUNT:-0} ended (srun: $code): $reason"
  [[ $verdict == requeue ]] || exit "$verdict"

  # A job that is being cancelled stays cancelled: scancel may come at any moment up to here.
  state=$(scontrol show job "$job" --oneliner | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
  if [[ $state != RUNNING ]]; then
    echo "$me: not requeued: the job is ${state:-not known to scontrol}"
  elif scontrol requeue "$job"; then
    sleep 300 # the requeue ends this script
  else
    echo "$me: the requeue was refused; sbatch the same again, and the run goes on"
  fi
  exit $((code ? code : 75))
}

# Whether every node of the job still starts processes. A dead one is not known to SLURM as DOWN until SlurmdTimeout (300 s) is over.
nodes_answer() {
  timeout 90 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap true 2>/dev/null
}
