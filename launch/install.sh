#!/usr/bin/env bash
# Puts kamui_dist with its dependencies into .venv, at the versions of constraints.txt. Needs Python 3.11 or newer, no root.
#
#   launch/install.sh         to train
#   launch/install.sh dev     with the tools of extra [dev] as well
#
# Run again, it looks at a stamp and is done at once, unless pyproject.toml or constraints.txt changed. An interrupted install
# leaves a mark, and the next one starts from an empty .venv: a package that was copied by half looks installed to pip.
# PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made of.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv stamp=$root/.venv/kamui-installed mark=$root/.venv/kamui-installing log=$root/.venv/kamui-install.log

die() {
  echo "install.sh: $*" >&2
  exit 1
}

# The folder belongs to the hash, since a venv holds absolute paths and does not survive being moved.
want=$(cat "$root/pyproject.toml" "$root/constraints.txt" - <<<"$root" | sha256sum | cut -c 1-64)

# satisfied EXTRA: does the stamp (line 1: the hash, line 2: extras) vouch for it? More than was asked for is fine.
satisfied() {
  local have_hash='' have_extras=''
  [[ -x $venv/bin/python && -f $stamp ]] || return 1
  { read -r have_hash && read -r have_extras; } <"$stamp" || true
  [[ $have_hash == "$want" && (-z $1 || ,$have_extras, == *,$1,*) ]]
}

# Prints the first Python that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed; ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true). Set PYTHON to a newer one"
}

extra=${1:-}
if satisfied "$extra"; then exit 0; fi

# Two installs at once would take each other's mark for a crash. A directory can be locked, so no lock file is left lying
# about; on a file system without locks (some NFS) this goes on without.
exec 9<"$root"
if command -v flock >/dev/null; then flock 9 || true; fi
if satisfied "$extra"; then exit 0; fi # the other one did it while we waited

# Extras that were installed stay, or their pins would go stale.
extras=$extra
if [[ -f $stamp ]]; then
  installed=$(sed -n 2p "$stamp")
  if [[ ,$installed, != *,$extra,* ]]; then extras=$installed${extra:+,$extra}; else extras=$installed; fi
  extras=${extras#,}
fi

began=$SECONDS
echo "installing kamui_dist${extras:+ [$extras]} into $venv (the first time this fetches PyTorch and can take minutes)" >&2

# A .venv that was moved or copied here still starts the Python of where it was.
if [[ -e $mark ]] || ! grep -qsF "$venv/bin/python" "$venv/bin/pip" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments; install its venv package (Debian, Ubuntu: apt-get install python3-venv) or set PYTHON to another Python"
  # Without pip first, so that the mark is there before the slow part begins.
  "$python" -m venv --clear --without-pip "$venv" || die "could not make $venv"
  touch "$mark"
  "$venv/bin/python" -m ensurepip --default-pip >"$log" 2>&1 || die "could not put pip into $venv; see $log"
fi

touch "$mark"
rm -f "$stamp"
# PIP_USER in a user's settings would send the packages past the venv.
if ! (cd "$root" && PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
  "$venv/bin/python" -m pip install -c constraints.txt -e ".${extras:+[$extras]}") >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  die "pip failed; its last lines are above, all of them in $log"
fi
printf '%s\n%s\n' "$want" "$extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$mark"
echo "installed in $((SECONDS - began)) s" >&2
