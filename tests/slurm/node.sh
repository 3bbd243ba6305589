#!/usr/bin/env bash
# One virtual node of the throw-away cluster in DIR:
#   node.sh DIR start N    start slurmd of nodeN
#   node.sh DIR kill N     'power failure': SIGKILL slurmd, its slurmstepds and all their tasks
#   node.sh DIR unplug N   SIGKILL slurmd only
#   node.sh DIR pids N     the pids that 'kill' would end
set -euo pipefail
[ $# -eq 3 ] || { sed -n 2,6p "$0" >&2; exit 2; }
DIR=$(cd "$1" && pwd -P); n=node$3; export PATH=$PATH:/usr/sbin:/sbin
# shellcheck source=/dev/null
. "$DIR/env.sh"
pidf=$DIR/run/slurmd.$n.pid
is_slurmd() { tr '\0' ' ' 2>/dev/null < "/proc/$1/cmdline" | grep -qF "slurmd -N $n -f $DIR/"; }
pids() {   # slurmd and every job process of that node
    local p d env
    p=$(cat "$pidf" 2>/dev/null || true)
    if [ -n "$p" ] && is_slurmd "$p"; then echo "$p"; fi
    for d in /proc/[0-9]*; do
        p=${d#/proc/}
        # tasks carry SLURMD_NODENAME and this cluster's SLURM_CONF; slurmstepds only the latter and 'slurmstepd' and,
        # started by slurmd of this node, its private UTS namespace (uts isolation)
        env=$( { tr '\0' '\n' < "$d/environ"; } 2>/dev/null) || continue
        case $'\n'$env$'\n' in
            *$'\n'"SLURM_CONF=$DIR/slurm.conf"$'\n'*) ;; *) continue ;; esac
        case $'\n'$env$'\n' in
            *$'\n'"SLURMD_NODENAME=$n"$'\n'*) echo "$p" ;; esac
    done
    if [ "$TSLURM_ISOLATION" = uts ] && [ -f "$DIR/run/uts.$n" ]; then
        local ns; ns=$(cat "$DIR/run/uts.$n")
        for d in /proc/[0-9]*; do    # in that node's UTS namespace, and with this cluster's hosts file
            if [ "$(readlink "$d/ns/uts" 2>/dev/null)" = "$ns" ] && [ "$d/root/etc/hosts" -ef "$DIR/hosts" ]; then
                echo "${d#/proc/}"
            fi
        done
    fi
}
case $2 in
start)
    p=$(cat "$pidf" 2>/dev/null || true)
    if [ -n "$p" ] && is_slurmd "$p"; then echo "$n already runs: $p"; exit 0; fi
    rm -f "$pidf"; mkdir -p "$DIR/spool/$n"
    if [ "$TSLURM_ISOLATION" = uts ]; then
        # own hostname, own /etc/hosts (a bind mount in a private mount namespace: the real file is not touched)
        # shellcheck disable=SC2016  # for the inner shell
        setsid unshare --uts --mount --propagation private sh -c '
            hostname "$1" && mount --bind "$2/hosts" /etc/hosts && readlink /proc/self/ns/uts > "$2/run/uts.$1" &&
            exec slurmd -N "$1" -f "$2/slurm.conf"' sh "$n" "$DIR"
    else
        setsid slurmd -N "$n" -f "$DIR/slurm.conf"
    fi </dev/null >>"$DIR/log/slurmd.$n.out" 2>&1 || { tail -3 "$DIR/log/slurmd.$n.out" >&2; exit 1; } ;;
kill)
    mapfile -t p < <(pids | sort -un); [ ${#p[@]} = 0 ] || kill -KILL "${p[@]}" 2>/dev/null || true
    rm -f "$pidf"; echo "killed $n: ${p[*]}" ;;
unplug)   # the same for a node on which nothing runs yet, without the time that it takes to look for processes
    one=$(cat "$pidf"); if is_slurmd "$one"; then kill -KILL "$one"; fi; rm -f "$pidf" ;;
pids) pids | sort -un ;;
*) exit 2 ;;
esac
