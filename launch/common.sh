# shellcheck shell=bash
# What local.sh, node.sh, debug.sh and demo.sh share. Sourced.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
me=$(basename -- "$0")

die() { # CODE MESSAGE
  echo "$me: $2" >&2
  exit "$1"
}

# .venv as install.sh makes it, else whatever environment you have put kamui_dist into.
python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) || die 2 "there is no python3; run $root/launch/install.sh"

# say MESSAGE: also where nobody hears it any more (the terminal was closed).
say() { echo "$me: $1" >&2 || true; }

# usage CONFIG...: the arguments must begin with a config file.
usage() {
  if [[ $# -eq 0 || $1 == -* ]]; then die 2 "usage: $0 CONFIG [section.key=value ...]"; fi
  "$python" -c 'import kamui_dist' 2>/dev/null || die 2 "kamui_dist is not installed for $python; run $root/launch/install.sh"
}

# ranks_here CONFIG [overrides]: ranks to start on this node: NPROC, else one for each GPU, else 2.
ranks_here() {
  local gpus=0
  if [[ -n ${NPROC:-} ]]; then
    [[ $NPROC =~ ^[1-9][0-9]*$ ]] || die 2 "NPROC is the number of processes on this node, 1 or more; it is '$NPROC'"
    echo "$NPROC"
    return
  fi
  # torch is asked and not nvidia-smi, since it counts what the ranks will see (CUDA_VISIBLE_DEVICES, a CPU build, ROCm); but it
  # takes seconds to import, so not where there is no GPU to count.
  if [[ -e /dev/nvidiactl || -e /dev/kfd ]] &&
    [[ $("$python" -m kamui_dist.train "$@" --print run.device 2>/dev/null || true) != cpu ]]; then
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  fi
  echo $((gpus > 0 ? gpus : 2))
}

# supervise ON_SIGNAL CMD...: runs CMD in a process group of its own and returns its exit code. SIGTERM, SIGINT and SIGHUP to this
# script call ON_SIGNAL, which finds CMD's pid in $child. Only the script itself hears a Ctrl-C, so it decides what the ranks hear.
supervise() {
  local on_signal=$1 code ended=''
  shift
  trap 'signalled=1; '"$on_signal"' TERM' TERM
  trap 'signalled=1; '"$on_signal"' INT' INT
  trap 'signalled=1; '"$on_signal"' HUP' HUP
  # Killed by force, this script hears nothing and can tell nobody: the kernel does.
  local with=()
  if setpriv --pdeathsig TERM true 2>/dev/null; then with=(setpriv --pdeathsig TERM); fi
  set -m # a background job gets its own process group, and does not ignore Ctrl-C
  "${with[@]}" "$@" <&0 &
  child=$!
  set +m
  # A signal ends `wait` early, and then its code is not CMD's: hence the loop.
  while :; do
    signalled=
    code=0
    wait "$child" || code=$?
    [[ -n $signalled ]] || break
    ended=$code
  done
  trap - TERM INT HUP
  if [[ $code == 127 && -n $ended ]]; then code=$ended; fi # the signal came after CMD's end, which the first wait had told
  return "$code"
}

# pass_on SIGNAL: the handler for commands that need no more than that. The whole group, for scripts with children of their own.
pass_on() { kill -s "$1" -- "-$child" 2>/dev/null || true; }

# stop_ranks SIGNAL: the handler for torchrun. The ranks are asked directly: passed through torchrun, a SIGTERM becomes a SIGKILL after
# 30 seconds, in which a large model may not be saved. Asked again, torchrun does just that; asked a third time, all are killed.
asked=0
asked_at=-9
stop_ranks() {
  # One Ctrl-C or `timeout` may arrive several times.
  if ((SECONDS - asked_at < 2)); then return; fi
  asked_at=$SECONDS
  asked=$((asked + 1))
  local ranks=()
  mapfile -t ranks < <(ranks_of "$child")
  if ((asked == 1 && ${#ranks[@]} > 0)); then
    say "SIG$1: asked ${#ranks[@]} ranks to stop after this step, with a checkpoint (again: within 30 s; a third time: at once)"
    kill -TERM "${ranks[@]}" 2>/dev/null || true
    # Ranks that have stopped are not a failure to be repaired by a restart.
    if ((${MAX_RESTARTS:-0} > 0)); then
      (while kill -0 "${ranks[@]}"; do sleep 0.1; done; kill -TERM "$child") 2>/dev/null &
    fi
  elif ((asked <= 2)); then
    say "SIG$1: ending torchrun"
    kill -TERM "$child" 2>/dev/null || true
  else
    say "SIG$1: killing torchrun and the ranks"
    kill -KILL "$child" "${ranks[@]}" 2>/dev/null || true
  fi
}

# ranks_of PID: the pids of torchrun's workers: those of its children that were told a LOCAL_RANK.
ranks_of() {
  local pid
  # shellcheck disable=SC2013  # the pids are words of one line
  for pid in $(cat "/proc/$1"/task/*/children 2>/dev/null); do
    if grep -qz '^LOCAL_RANK=' "/proc/$pid/environ" 2>/dev/null; then echo "$pid"; fi
  done
}

# run_torchrun "TORCHRUN FLAGS" WORLD_SIZE CONFIG [overrides]: check, train, and exit with the trainer's exit code.
run_torchrun() {
  local flags=$1 world=$2 run_dir status before new=0 code=0
  shift 2
  # Options, such as --print-config, are questions; one process answers. But for the one that is about training.
  local questions=" $*"
  questions=${questions// --resume-strict/}
  if [[ $questions == *" --"* ]]; then exec "$python" -m kamui_dist.train "$@" --world-size "$world"; fi

  # A mistake in the config is told by one process, in one line; through torchrun every rank would tell it, with a traceback.
  supervise pass_on "$python" -m kamui_dist.train "$@" --check --world-size "$world" || exit
  run_dir=$("$python" -m kamui_dist.train "$@" --print run.dir) || exit
  status=$run_dir/status.json
  before=$(stat -c '%i %y' "$status" 2>/dev/null || true) # of an earlier start: says nothing about this one

  # Where a restart would only end the same way, the ranks leave their exit code here, and torchrun sees 0 (command_line.py).
  noted=$(mktemp 2>/dev/null) || noted=
  if [[ -n $noted ]]; then
    export KAMUI_EXIT_CODE_FILE=$noted
    trap 'rm -f "$noted"' EXIT
  fi

  # SIGUSR1 is for the ranks (they stop with a checkpoint); torchrun would die of it and leave them behind. Ignoring is inherited
  # by torchrun, and by the ranks until they install their handlers.
  trap '' USR1
  # shellcheck disable=SC2086  # flags are words
  supervise stop_ranks "$python" -m torch.distributed.run $flags --max-restarts="${MAX_RESTARTS:-0}" -m kamui_dist.train "$@" || code=$?

  [[ "$(stat -c '%i %y' "$status" 2>/dev/null || true)" == "$before" ]] || new=1
  code=$("$python" -I "$root/launch/outcome.py" "$status" "$new" "$code" "$asked" "${NODE_RANK:-0}" "$noted")
  exit "$code"
}
