"""Synchronous against asynchronous saves of one state on 2 ranks, interleaved: how long training is held, and how fast.

    python -m tests.benchmarks.checkpoint_time [--megabytes 1000] [--rounds 5] [--ranks 2] [--strategy ddp fsdp] [--where DIR]

The state is fp32 weights with AdamW's two moments. Every save goes through Saver, as in training: the weights are examined
on all ranks, the files hashed, synced and published. After an asynchronous save the ranks go on with steps of matrix
products (--step-seconds each when nothing else runs) and a small collective, as a training would, until it is published.
"Held" is everything that a step waits for: examination, set-up, and what is left of the copy when the step wants to update
the weights. Medians of rank 0; run it when the machine is quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kamui_dist import distributed, knobs, parallel
from kamui_dist.config import Config
from kamui_dist.metrics import Metrics
from kamui_dist.noise import NoiseScale
from kamui_dist.plan import make_plan
from kamui_dist.precision import LossScaler
from kamui_dist.saver import Saver
from kamui_dist.state import State
from kamui_dist.watch import Facts, Watch
from tests.ranks import run_ranks


class Layers(nn.Module):
    """16 equal matrices and as many vectors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = int((parameters / 16) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))


def build(run_dir: Path, megabytes: float, strategy: str) -> tuple[Any, nn.Module, dict[str, Saver], State]:
    """The model with its optimizer's state filled, and a Saver of either kind for it."""
    ranks = distributed.world_size()
    run_dir.mkdir(parents=True, exist_ok=True)
    mesh = {"shard": ranks, "replicate": 1} if strategy == "fsdp" else {"replicate": ranks}
    savers, metrics = {}, Metrics(run_dir, distributed.is_main(), 1, 1, False, resumed=0)
    for mode in ("sync", "async"):
        cfg = Config.model_validate({
            "run": {"dir": str(run_dir / mode), "precision": "fp32", "device": "cpu"}, "parallel": mesh, "train": {"steps": 1},
            "checkpoint": {"async": mode == "async", "keep": 1},
        })  # fmt: skip
        if mode == "sync":
            plan = make_plan(cfg, ranks)
            device = torch.device("cpu")
            model = parallel.parallelize(
                Layers(int(megabytes * 1e6 / 12)), cfg, plan,
                distributed.make_mesh(device, plan.replicate, plan.shard), device,
            )  # fmt: skip
            module = parallel.unwrap(model)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        savers[mode] = Saver(
            run_dir / mode,
            cfg,
            plan,
            module,
            optimizer,
            Watch(knobs.Watch(), Facts()),
            LossScaler(enabled=False),
            NoiseScale(),
            metrics,
            {},
        )
        (run_dir / mode / "checkpoints").mkdir(parents=True, exist_ok=True)
    return metrics, module, savers, State()


def work(seconds: float, matrix: torch.Tensor) -> int:
    """Matrix products for so long; returns how many."""
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        matrix @ matrix
        count += 1
    return count


def measure(run_dir: Path, megabytes: float, rounds: int, strategy: str, step_seconds: float) -> list[dict[str, Any]]:
    """On every rank. Returns the checkpoint records of rank 0, with `mode`; the first of each mode is a warm-up."""
    with contextlib.redirect_stdout(io.StringIO()):
        metrics, _, savers, state = build(run_dir, megabytes, strategy)
        modes = []
        matrix = torch.randn(384, 384)
        products = work(1.0, matrix) * step_seconds
        for turn in range(rounds + 1):
            for mode in ("sync", "async") if turn % 2 else ("async", "sync"):
                saver = savers[mode]
                state.step += 1
                assert saver.save(state) == ""
                modes.append(mode)
                while mode == "async":  # training goes on: a small collective a step
                    for _ in range(max(1, int(products))):
                        matrix @ matrix
                    rows = distributed.gather_rows(float(saver.code()), device=torch.device("cpu"))
                    saver.poll([int(row[0]) for row in rows])
                    if min(row[0] for row in rows) > 0:
                        break
        metrics.close()
    distributed.barrier()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{"mode": mode, **record} for mode, record in zip(modes, records, strict=True)][2:]


def report(records: list[dict[str, Any]], name: str) -> float:
    """Prints one table; returns the asynchronous stall as a fraction of the synchronous one."""
    of = {m: [r for r in records if r["mode"] == m] for m in ("sync", "async")}

    def median(mode: str, key: str) -> float:
        return statistics.median(r[key] for r in of[mode])

    print(f"{name}: {of['sync'][0]['bytes'] / 1e6:.0f} MB, {len(of['sync'])} rounds, medians of rank 0")
    for mode in ("sync", "async"):
        print(
            f"  {mode:<6} training held {median(mode, 'stall_seconds'):7.3f} s | written in {median(mode, 'write_seconds'):6.3f} s"
            f" = {median(mode, 'mb_per_second'):5.0f} MB/s | finite and equal replicas {median(mode, 'check_seconds'):6.3f} s"
            f" = {median(mode, 'check_seconds') / median(mode, 'save_seconds'):.1%} of the save"
        )
    ratio = median("async", "stall_seconds") / median("sync", "stall_seconds")
    paired = [a["stall_seconds"] / s["stall_seconds"] for a, s in zip(of["async"], of["sync"], strict=True)]
    print(f"  stall, asynchronous to synchronous: {ratio:.1%} (by round {min(paired):.1%} to {max(paired):.1%})")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], nargs="*", default=["ddp", "fsdp"])
    parser.add_argument("--step-seconds", type=float, default=0.25)
    parser.add_argument(
        "--where", default=None, help="directory on the file system to measure (default: the temporary one)"
    )
    args = parser.parse_args()
    for strategy in args.strategy:
        directory = Path(tempfile.mkdtemp(prefix="kamui-checkpoint-time-", dir=args.where))
        try:
            records = run_ranks(
                measure, args.ranks, directory, args.megabytes, args.rounds, strategy, args.step_seconds, timeout=900
            )[0]
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        report(records, f"{strategy} on {args.ranks} rank(s)")


if __name__ == "__main__":
    main()
