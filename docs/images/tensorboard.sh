#!/usr/bin/env bash
# Makes tensorboard.png: the Custom Scalars tab of a run, as a browser shows it.
#
#   docs/images/tensorboard.sh DIRECTORY_WITH_ONE_RUN          needs chromium; Pillow, if it is there, makes the file small
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
runs=$(realpath -- "$1")
python=.venv/bin/python
log=$(mktemp)
profile=$(mktemp -d)
"$python" -m tensorboard.main --logdir "$runs" --host 127.0.0.1 --port 0 2>"$log" &
server=$!
trap 'kill "$server"; rm -rf -- "$log" "$profile"' EXIT
for _ in $(seq 60); do
  address=$(grep -o 'http://127[^ ]*' "$log") && break
  sleep 1
done
sleep 10 # it reads the run
chromium --headless=new --no-sandbox --disable-gpu --disable-3d-apis --hide-scrollbars --user-data-dir="$profile" \
  --window-size=1500,1200 --virtual-time-budget=100000 --run-all-compositor-stages-before-draw \
  --screenshot=docs/images/tensorboard.png "${address}#custom_scalars&_smoothingWeight=0" 2>/dev/null
"$python" -c 'from PIL import Image; p = "docs/images/tensorboard.png"; Image.open(p).convert("P", palette=1, colors=64).save(p, optimize=True)' || true
ls -l docs/images/tensorboard.png
