#!/usr/bin/env bash
# From a fresh clone to a language model that has read Jane Austen, in one command:   ./launch/demo.sh
#
# Installs into .venv, makes a tokenizer and token shards of data/austen, trains configs/austen_tiny.toml on all GPUs (or on 2 CPU
# processes), and lets the model write. Stop it anywhere (Ctrl-C) and start it again: it goes on where it was. Arguments are
# overrides of the config, for example train.steps=100.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
. launch/common.sh

config=configs/austen_tiny.toml
shards=data/demo/austen
tokenizer=data/demo/tokenizer.json

# One step of the demo; stopping it stops the demo.
step() {
  local code=0
  supervise pass_on "$@" || code=$?
  case $code in
    0) ;;
    75 | 129 | 130 | 143) echo "stopped; run ./launch/demo.sh again to go on" >&2 && exit "$code" ;;
    *) exit "$code" ;;
  esac
}

step launch/install.sh
kamui=$root/.venv/bin/kamui-dist

if [[ -f $tokenizer ]]; then
  echo "== tokenizer: $tokenizer is there"
else
  echo "== tokenizer: 4096 byte pairs learned from data/austen"
  mkdir -p data/demo
  step "$kamui" tokenizer data/austen --vocab-size 4096 --out "$tokenizer"
fi
echo "== data: data/austen as token shards"
step "$kamui" prepare data/austen --tokenizer "$tokenizer" --split '^(CHAPTER|Chapter) ' --val-fraction 0.05 --out "$shards"

# bf16 without instructions for it is slower than fp32.
precision=()
if [[ ! -e /dev/nvidiactl && ! -e /dev/kfd ]] && ! grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null; then
  precision=(run.precision=fp32)
fi
set -- "$config" "${precision[@]}" "$@"
run=$("$root/.venv/bin/python" -m kamui_dist.train "$@" --print run.dir)
echo "== training: launch/local.sh $*"
step launch/local.sh "$@"

echo
echo "== sample"
step "$kamui" sample "$run" --prompt "It was a truth" --max-tokens 120

cat <<END

== what you have
$run/metrics.jsonl     every step: loss, learning rate, gradient norms, throughput
$run/checkpoints/      the newest and the best checkpoints
curves:                .venv/bin/tensorboard --logdir runs      (then open the address it prints)
more text:             .venv/bin/kamui-dist sample $run --prompt "Mr. Darcy"
train longer:          ./launch/local.sh $config${precision:+ ${precision[*]}} train.steps=2000   (goes on from the last checkpoint)
again from scratch:    ./launch/local.sh $config${precision:+ ${precision[*]}} run.dir=runs/again
every knob:            ./launch/local.sh $config --print-config
read next:             kamui_dist/train.py, from top to bottom: it is the whole training loop
END
