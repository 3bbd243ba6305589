#!/usr/bin/env bash
# Installs what the tests need and runs them; arguments go to pytest:   launch/test.sh -m 'not slow' -k schedule
# Three processes share the files, since much of a test is waiting; TEST_WORKERS=0 is one, for a debugger.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh" dev
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the tests make processes enough
tests() { .venv/bin/python -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"; }
if (($#)); then
  tests "$@"
else
  # The jobs of the real SLURM have deadlines: nothing else runs beside them.
  code=0
  tests -m "not slurm" || code=$?
  TEST_WORKERS=0 tests -m slurm || code=$?
  exit "$code"
fi
