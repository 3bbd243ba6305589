#!/usr/bin/env bash
# Installs what the tests need and runs them; arguments go to pytest:   launch/test.sh -m 'not slow' -k schedule
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/install.sh" dev
cd "$root"
exec .venv/bin/python -m pytest "$@"
