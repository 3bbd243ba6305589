"""What the look into the layers and the stopwatch cost, as a share of a step with log.detail_every = 100.

    python tests/benchmarks/monitor_cost.py [--rounds 30] [section.key=value ...]
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/monitor_cost.py [parallel.shard=2 ...]

Steps with a look and without are taken in turn on one model; the look costs the median of their differences. Both have the
stopwatch, whose calls take too little to be seen in that: they are timed by themselves. A step is forward, backward, the ranks'
message, clipping and AdamW, of the model of configs/austen_tiny.toml on random tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from kamui_dist import config as configs
from kamui_dist import distributed, optim, parallel, precision, start
from kamui_dist.monitor import Monitor
from kamui_dist.plan import make_plan
from kamui_dist.stopwatch import Stopwatch, memory_gib, slowest

ROOT = Path(__file__).resolve().parents[2]
EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    cfg, _ = configs.load(ROOT / "configs" / "austen_tiny.toml", options.overrides)
    cfg.model.vocab_size, cfg.log.detail_every = 4096, EVERY
    device = distributed.choose_device(cfg.run.device)
    precision.set_backends(device, cfg.run.precision, False)
    distributed.start(device, 5)
    ranks = distributed.world_size()
    plan = make_plan(cfg, ranks)
    mesh = distributed.make_mesh(device, plan.replicate, plan.shard)
    model = parallel.parallelize(start.build_model(cfg), cfg, plan, mesh, device)
    optimizer = optim.build(parallel.unwrap(model), cfg.optim)
    clock = Stopwatch(device)
    monitor = Monitor(model, cfg, plan, device, clock)
    shape = (plan.grad_accum_steps, cfg.train.micro_batch, cfg.model.context_length)
    tokens = torch.randint(0, cfg.model.vocab_size, shape, device=device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def step(kind: str) -> float:
        """Seconds, until the device has done it all."""
        synchronize()
        began = time.perf_counter()
        detail = monitor.begin(EVERY if kind == "detail" else EVERY + 1)
        clock.start()
        for i, x in enumerate(tokens):
            with parallel.gradient_sync(model, last=i == len(tokens) - 1, defer=cfg.parallel.defer_sync):
                with precision.autocast(device, cfg.run.precision):
                    loss = model(x, x)
                clock.lap("own")
                (loss * (ranks / plan.tokens_per_step)).backward()
        clock.lap("backward")
        rows = distributed.gather_rows(
            loss.detach(), parallel.grad_norm(model), clock.own_seconds, memory_gib(device), device=device
        )
        clock.lap("meet")
        if detail:
            monitor.before_update(1.0)
        parallel.clip_grad_norm(model, rows[0][1], 1.0, cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.lap("update")
        clock.record()
        slowest([row[2] for row in rows])
        if detail:
            monitor.after_update(x, x)
        synchronize()
        return time.perf_counter() - began

    first = step("detail")  # with the causality probe, and the optimizer's state to be made
    times: dict[str, list[float]] = {"plain": [], "detail": []}
    for kind in times:
        step(kind)
    for _ in range(options.rounds):
        for kind, seconds in times.items():
            seconds.append(step(kind))
    plain, detail = (statistics.median(seconds) for seconds in times.values())
    look = statistics.median(d - p for p, d in zip(*times.values(), strict=True))
    began = time.perf_counter()
    for _ in range(1000):
        clock.start()
        for name in (*["own"] * plan.grad_accum_steps, "backward", "meet", "update"):
            clock.lap(name)
        memory_gib(device)
        clock.record()
        slowest([clock.own_seconds] * ranks)
    watch = (time.perf_counter() - began) / 1000
    if distributed.is_main():
        seldom, ms = look / EVERY, 1000
        print(
            f"{plan.strategy} on {device.type}, {options.rounds} rounds; the first step and look took {ms * first:.0f} ms"
        )
        print(
            f"step {ms * plain:.1f} ms, with a look {ms * detail:.1f} ms; the look {ms * look:.1f} ms, {look / plain:.1%} of a step"
        )
        print(
            f"every {EVERY} steps {seldom / plain:.3%}; stopwatch and memory {ms * watch:.3f} ms a step, {watch / plain:.3%}"
        )
        print(f"together {(seldom + watch) / plain:.3%}")
    distributed.stop()


if __name__ == "__main__":
    main()
