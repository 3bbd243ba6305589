#!/usr/bin/env bash
# The same run in one plain process: no torchrun, no process group, no compilation; breakpoints and print work.
#
#   launch/debug.sh configs/char_debug.toml [section.key=value ...]
#
# Deterministic, with anomaly detection in backward (slow: it names the forward line that made a NaN); on an error the debugger
# opens where it happened. Your overrides come last and win. Good company: train.overfit_one_batch=true, whose loss has to go to 0
# unless the model or the optimizer is broken, and run.dir=runs/debug, to leave the real run's directory alone.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
usage "$@"
. "$root/launch/env.sh"

config=$1
shift
exec "$python" -m kamui_dist.train "$config" run.debug=true run.deterministic=true model.compile=false \
  parallel.replicate=1 parallel.shard=1 "$@"
