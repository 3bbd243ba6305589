"""Run directories that were never trained: records of every kind, written as the trainer writes them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """[model]
vocab_size = 512
context_length = 128
[data]
path = "data/train"
[optim]
lr = {lr}
grad_clip = 1.0
[train]
steps = {steps}
global_batch = 16
[watch]
window = 32
"""


def step(number: int, time: float, **changed: Any) -> dict[str, Any]:
    """A healthy one."""
    rng = random.Random(number)
    loss = 3.0 + 3.0 * math.exp(-number / 40) + 0.02 * rng.gauss(0, 1)
    return {
        "kind": "step", "step": number, "tokens": number * 2048, "epoch": number * 16 / 100_000, "loss": loss,
        "loss_average": loss, "spike": False, "lr": 1e-3, "grad_norm_pre_clip": 0.5, "grad_norm_post_clip": 0.5,
        "skipped": False, "loss_scale": None, "targets": 2048, "tokens_per_sec": 2048.0, "mfu": 0.4, "step_seconds": 1.0,
        "data_seconds": 0.05, "compute_seconds": 0.7, "meet_seconds": 0.1, "update_seconds": 0.1, "own_seconds": 0.4,
        "slowest_rank": 1, "median_own_seconds": 0.38, "peak_memory_gib": 1.5, "memory_gib": 1.25, "time": time, **changed,
    }  # fmt: skip


def layers(names: list[str], number: int) -> dict[str, Any]:
    values = {"grad_norm": 0.1, "weight_norm": 5.0, "update_norm": 5e-3, "update_ratio": 1e-3, "activation_rms": 0.5,
              "attention_logit_max": 4.0 + 0.01 * number, "frozen": 0.0}  # fmt: skip
    return {name: {**values, "update_ratio": 1e-3 * (1 + k)} for k, name in enumerate(names)}


def records(
    steps: int = 200, spike_at: int | None = 150, names: tuple[str, ...] = ("token_embedding", "blocks.0", "head")
) -> list[Any]:
    """A run that is resumed in its middle and rolled back at three quarters, with validations, checkpoints and details."""
    found: list[dict[str, Any]] = [{"kind": "start", "step": 0, "samples": 0, "tokens": 0, "world_size": 2, "global_batch": 16,
                                    "restarts": 0, "changed": [], "time": 1000.0}]  # fmt: skip
    now = 1010.0
    again = {"world_size": 2, "global_batch": 16, "restarts": 1, "changed": []}
    for number in range(1, steps + 1):
        now += 1.0
        spiked = {"loss": 30.0, "spike": True, "grad_norm_pre_clip": 40.0, "grad_norm_post_clip": 1.0}
        found.append(step(number, now, **(spiked if number == spike_at else {})))
        if number % 50 == 0:
            found.append({"kind": "detail", "step": number, "layers": layers(list(names), number), "noise_scale": 30.0,
                          "noise_scale_tokens": 3840.0, "detail_seconds": 0.1, "time": now + 0.1})  # fmt: skip
            found.append({"kind": "eval", "step": number, "tokens": number * 2048, "set": "val",
                          "val_loss": 3.2 + 3 * math.exp(-number / 40), "val_perplexity": 20.0, "best": True,
                          "eval_seconds": 2.0, "time": now + 2.1})  # fmt: skip
            found.append({"kind": "checkpoint", "step": number, "tokens": number * 2048, "save_seconds": 0.5,
                          "stall_seconds": 0.5, "write_seconds": 0.4, "check_seconds": 0.1, "bytes": 1000,
                          "mb_per_second": 1.0, "aside": False, "time": now + 2.6})  # fmt: skip
            now += 2.6
        position = {"step": number, "samples": number * 16, "tokens": number * 2048}
        if number == steps // 2:
            now += 60.0  # 20 of them updates that are done again
            found.append({"kind": "resume", **position, **again, "lost_steps": 20, "lost_seconds": 20.0, "time": now})
            now += 5.0
        if number == 3 * steps // 4:
            found.append({"kind": "rollback", "finding": "spike", "message": "the loss jumps.", "trigger_step": number + 10,
                          "step": number, "skipped_windows": 160, "time": now + 10.0})  # fmt: skip
            now += 14.0
            found.append({"kind": "resume", **position, **again, "lost_steps": 10, "lost_seconds": 10.0, "time": now})
    found.append(
        {"kind": "end", "step": steps, "tokens": steps * 2048, "outcome": "finished", "reason": "", "time": now}
    )
    return found


def write(
    directory: Path, made: list[dict[str, Any]], findings: tuple[dict[str, Any], ...] = (), **config: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
    (directory / "findings.jsonl").write_text("".join(json.dumps(f) + "\n" for f in findings))
    (directory / "config.toml").write_text(CONFIG.format(**{"lr": 1e-3, "steps": 200, **config}))
    return directory


DISK_FULL = {
    "kind": "disk-full", "step": 120, "message": "no checkpoint: it needs 9 MiB, 1 MiB are free.",
    "cause": "the file system is full.", "advice": "free some of: step-00000050.", "action": "warn",
}  # fmt: skip
