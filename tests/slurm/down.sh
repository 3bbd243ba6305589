#!/usr/bin/env bash
# Stop the cluster that up.sh started in DIR: jobs first, then slurmd, slurmctld, munged, by pid.
set -uo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
[ -d "$1" ] || { echo "no $1: nothing to stop"; exit 0; }
DIR=$(cd "$1" && pwd -P)
[ "${SLURM_CONF:-}" != "$DIR/slurm.conf" ] || [ -z "${SLURM_JOB_ID:-}" ] || { echo "not from inside one of its jobs" >&2; exit 2; }
export SLURM_CONF=$DIR/slurm.conf PATH=$PATH:/usr/sbin:/sbin

# is $1 a live (not zombie) process of this cluster?  (guards against a reused pid)
ours() { local st; st=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 1
         [ "${st%% *}" != Z ] && tr '\0' ' ' < "/proc/$1/cmdline" 2>/dev/null | grep -qF "$DIR"; }
alive() { local p; p=$(cat "$1" 2>/dev/null) && [ -n "$p" ] && ours "$p"; }

if alive "$DIR/run/slurmctld.pid"; then
    mapfile -t ids < <(timeout 5 squeue -h -o %A 2>/dev/null | sort -u)
    if [ ${#ids[@]} -gt 0 ]; then
        timeout 5 scancel --signal=KILL --full "${ids[@]}" 2>/dev/null
        timeout 5 scancel "${ids[@]}" 2>/dev/null
        for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
    fi
fi
stop() {   # $1: pid file
    local p
    alive "$1" || { rm -f "$1"; return 0; }
    p=$(cat "$1"); kill -TERM "$p" 2>/dev/null
    for _ in $(seq 50); do ours "$p" || break; sleep 0.1; done
    if ours "$p"; then echo "down.sh: $p did not stop: SIGKILL" >&2; kill -KILL "$p" 2>/dev/null; sleep 0.2; fi
    rm -f "$1"
}
for f in "$DIR"/run/slurmd.*.pid; do [ -e "$f" ] && stop "$f"; done
stop "$DIR/run/slurmctld.pid"
stop "$DIR/run/munged.pid"
# what a killed slurmd or slurmstepd left behind: job processes carry this cluster's SLURM_CONF and a
# SLURM_JOB_ID in their environment, slurmstepds the former and their name.  Ended by pid.
left=0
for d in /proc/[0-9]*; do
    p=${d#/proc/}
    env=$(tr '\0' '\n' 2>/dev/null < "$d/environ") 2>/dev/null || continue
    case $'\n'$env$'\n' in *$'\n'"SLURM_CONF=$DIR/slurm.conf"$'\n'*) ;; *) continue ;; esac
    cmd=$(tr '\0' ' ' 2>/dev/null < "$d/cmdline") 2>/dev/null || cmd=
    case $'\n'$env in *$'\n'SLURM_JOB_ID=*) ;; *) [[ $cmd = slurmstepd* ]] || continue ;; esac
    kill -KILL "$p" 2>/dev/null && left=$((left + 1))
done
[ $left = 0 ] || echo "down.sh: ended $left left-over job process(es)"
echo "stopped"
