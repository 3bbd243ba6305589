"""What the loop costs on top of a bare PyTorch step: the ratio of interleaved runs, one process or DDP over several.

    python tests/benchmarks/step_time.py [--ranks 2] [--pairs 5] [--steps 20] [section.key=value ...]

The bare step has the same model, data shapes, autocast, fused AdamW, clipping and the loss on the host, and nothing else: no
log, no checkpoint, no signals, one fixed batch. Each pair runs both in turn as fresh processes; a run's figure is the median of
its step times after five; printed are all ratios (ours / bare) and their median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[run]
dir = "{run}"
[model]
n_layers = 6
n_heads = 6
d_model = 384
context_length = 256
[data]
path = "{data}/train"
[train]
steps = {steps}
micro_batch = 12
[checkpoint]
every = 100000
[log]
every = 1
"""


def bare(config: Path, overrides: list[str]) -> None:
    """The step without a trainer around it. Prints its times as JSON on rank 0."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from kamui_dist import config as configs
    from kamui_dist import distributed, model

    cfg, _ = configs.load(config, overrides)
    cfg.model.vocab_size = 257
    device = distributed.choose_device(cfg.run.device)
    distributed.start(device, 5)
    with torch.device("meta"):
        net: torch.nn.Module = model.GPT(cfg.model)
    net.to_empty(device=device)
    model.init_weights(net, cfg.run.seed)  # type: ignore[arg-type]
    if distributed.world_size() > 1:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.optim.lr, betas=(0.9, 0.95), fused=True)
    x = torch.randint(0, 256, (cfg.train.micro_batch, cfg.model.context_length), device=device)
    times = []
    for _ in range(cfg.train.steps or 0):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(x, x) / x.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - began)
    if distributed.is_main():
        print(json.dumps(times))
    distributed.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.bare:
        bare(options.bare, options.overrides)
        return
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    launch = [sys.executable]
    if options.ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        subprocess.run(
            [sys.executable, "-m", "kamui_dist.cli", "prepare", str(ROOT / "data/austen"), "--tokenizer", "bytes",
             "--split", "^(CHAPTER|Chapter) ", "--out", str(scratch / "data")],
            check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for pair in range(options.pairs):
            run = scratch / f"run{pair}"
            config = scratch / f"{pair}.toml"
            config.write_text(CONFIG.format(run=run, data=scratch / "data", steps=options.steps))
            ours = [*launch, "-m", "kamui_dist.train", str(config), *options.overrides]
            subprocess.run(ours, check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            # Wall clock from record to record, so that nothing the loop does between steps is left out.
            clock = [r["time"] for r in records if r["kind"] == "step"]
            mine = statistics.median(b - a for a, b in itertools.pairwise(clock[5:]))
            theirs_out = subprocess.run(
                [*launch, __file__, "--bare", str(config), *options.overrides],
                check=True, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            theirs = statistics.median(json.loads(theirs_out.stdout.splitlines()[-1])[5:])
            ratios.append(mine / theirs)
            print(f"pair {pair + 1}: ours {1000 * mine:.1f} ms, bare {1000 * theirs:.1f} ms, ratio {ratios[-1]:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f} over {options.pairs} pairs, {options.ranks} rank(s)")


if __name__ == "__main__":
    main()
