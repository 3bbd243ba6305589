"""Stops a real training on real ranks again and again, at random moments, by a signal to one random rank, and goes on each time:

    python -m tests.stop_many [--ranks 2] [--times 20] [--seed 0]

Prints, for each stop: after which step each rank stopped, how long it took from the request to the end of training with its
checkpoint, and how that compares with one step plus one save. Ends with 1 if the ranks ever differed, a checkpoint was missing,
a stop took longer than twice a step and a save and a second, or a window was trained on twice or left out.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kamui_dist import distributed
from kamui_dist.errors import EXIT_FINISHED, EXIT_STOPPED
from kamui_dist.metrics import read_records
from tests import tiny
from tests.ranks import run_ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
SLOW: dict[str, Any] = {"eval__every": 3, "checkpoint__every": 5, "log__every": 1000, "train__steps": 100_000}


def stopped(cfg: Any, number: int, who: int, seconds: float) -> tuple[int, int, float]:
    """One start that is stopped: exit code and updates made of this rank, and, on the one that was asked, seconds from then on."""
    asked = [0.0]

    def ask() -> None:
        begun.wait()
        time.sleep(seconds)
        asked[0] = time.monotonic()
        if distributed.rank() == who:
            os.kill(os.getpid(), number)

    begun = threading.Event()
    thread = threading.Thread(target=ask)
    thread.start()
    # From the first batch on: what comes before is the same each time, and a stop in it is tested elsewhere.
    code, seen = tiny.run_and_trace(cfg, tiny.acting(1, begun.set))
    took = time.monotonic() - asked[0] if distributed.rank() == who else 0.0
    thread.join()
    return code, len(seen), took


def many(base: Path, data: Path, times: int, seed: int) -> list[tuple[int, int, float]]:
    """On every rank: `times` starts that are stopped, each at a moment and in a way drawn from the seed."""
    draw = random.Random(seed)
    cfg = tiny.config(base / "run", data, data__val_path=str(data), **SLOW)
    return [
        stopped(cfg, draw.choice(SIGNALS), draw.randrange(distributed.world_size()), draw.uniform(0.0, 0.5))
        for _ in range(times)
    ]


def check(base: Path, results: list[list[tuple[int, int, float]]], *, timed: bool) -> list[str]:
    """A line for each stop; raises AssertionError if a promise was broken (those on time only if `timed`)."""
    run, lines, step = base / "run", [], 0
    records = read_records(run / "metrics.jsonl")
    starts = [r["step"] for r in records if r["kind"] in ("start", "resume")]
    saves = {r["step"]: r["save_seconds"] for r in records if r["kind"] == "checkpoint"}
    slowest = max(r["step_seconds"] for r in records if r["kind"] == "step")
    for number, stop in enumerate(zip(*results, strict=True)):
        codes, updates, took = {s[0] for s in stop}, {s[1] for s in stop}, max(s[2] for s in stop)
        assert codes == {EXIT_STOPPED}, (number, codes)
        assert len(updates) == 1, f"stop {number + 1}: the ranks made {[s[1] for s in stop]} updates"
        assert starts[number] == step, f"start {number + 1} went on from step {starts[number]} and not from {step}"
        step += updates.pop()
        assert step in saves, f"stop {number + 1}: no checkpoint of step {step}"
        bound = slowest + saves[step]
        lines.append(
            f"stop {number + 1}: step {step} on all ranks, {took:.3f} s (slowest step + this save: {bound:.3f} s)"
        )
        assert not timed or took < 2 * bound + 1, lines[-1]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, step + 1))
    assert tiny.steps_saved(run)[-1] == step
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        data = tiny.write_data(base / "data", windows=4096)
        results = run_ranks(many, args.ranks, base, data, args.times, args.seed, timeout=60 + 20 * args.times)
        lines = check(base, results, timed=True)
    print("\n".join(lines))
    print(f"{len(lines)} of {args.times} stops: the same step on all ranks, with a checkpoint")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
