#!/usr/bin/env bash
# Makes the pictures of docs/diagnosis.md: trains failing runs of tests/failing.py, and draws each with `kamui-dist diagnose`.
#
#   docs/images/diagnosis.sh                  all; diagnose.png needs chromium, and Pillow makes it small
#   docs/images/diagnosis.sh NAME ...         only these runs; `rollback` is one of the names
#
# The page quotes what the pictures say: tests/test_docs_diagnosis.py tells where the two differ. What a busy machine adds is left
# out: a slow rank and a drop of throughput are looked for only in the runs that have them.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1
python=.venv/bin/python
kamui=.venv/bin/kamui-dist
pictures=docs/images/diagnosis
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
mkdir -p "$pictures"

all=(detached random-targets lr-over-1000 bad-init leak unshifted lr-x100 spike nan large-norm clipping plateau dead-layers overfitting
  data-starvation slow-rank throughput-drop memory-growth rollback)

draw() { # PICTURE RUN ...
  local quiet=()
  [[ $1 == throughput-drop ]] || quiet+=(watch.on_throughput_drop=off)
  [[ $1 == slow-rank ]] || quiet+=(watch.on_slow_rank=off)
  "$kamui" diagnose "${@:2}" "${quiet[@]}" --svg "$pictures/$1.svg"
}

# The text as it was; with random bytes in it and nobody who does anything; and with a rollback.
rollback() {
  "$python" -m pytest -q tests/test_rollback.py::test_a_run_that_diverges_is_rescued --basetemp="$scratch/pytest" >"$scratch/log"
  mv "$scratch"/pytest/*0/healthy "$scratch/undisturbed"
  mv "$scratch"/pytest/*0/rescued "$scratch/rescued"
  "$python" -m kamui_dist.train "$scratch/rescued/config.toml" run.dir="$scratch/left-alone" watch.on_divergence=warn >"$scratch/log"
  draw rollback "$scratch/undisturbed" "$scratch/left-alone" "$scratch/rescued"
}

(($#)) || set -- "${all[@]}"
for name in "$@"; do
  echo "== $name"
  if [[ $name == rollback ]]; then
    rollback
  else
    "$python" -m tests.failing "$name" "$scratch/$name" >"$scratch/log"
    draw "$name" "$scratch/$name/run"
  fi
done

run=$scratch/lr-x100/run
if [[ -d $run ]]; then
  mkdir "$scratch/named"
  mv "$run" "$scratch/named/lr-x100"
  "$kamui" diagnose "$scratch/named/lr-x100" watch.on_throughput_drop=off --html "$scratch/page.html"
  chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$scratch/browser" \
    --window-size=1400,1040 --screenshot=docs/images/diagnose.png "file://$scratch/page.html" 2>/dev/null
  "$python" -c 'from PIL import Image; p = "docs/images/diagnose.png"; Image.open(p).convert("RGB").quantize(256, dither=0).save(p, optimize=True)' || true
fi
ls -l docs/images "$pictures"
