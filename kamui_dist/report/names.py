"""What other trainers call our fields, and how their numbers are spelled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

# Field of ours: names in other logs, the best first; "*" stands for anything. Case, and all signs between words, do not count.
NAMES = {
    "step": ["step", "global_step", "trainer/global_step", "iter", "iteration", "it", "num_updates", "update", "_step"],
    "loss": ["loss", "train_loss_step", "train/loss_step", "train_loss", "train/loss", "training_loss", "lm_loss", "lm-loss",
             "train/CE loss", "train/CrossEntropyLoss", "loss/train", "train_inner/loss", "loss_metrics/global_avg_loss",
             "train_loss_epoch"],
    "norm": ["grad_norm", "gnorm", "norm", "train/grad_norm", "gradient_norm", "grad_norm_pre_clip", "total_norm",
             "optim/total_grad_norm", "optim/grad/global_norm", "global_grad_norm", "train_inner/gnorm"],
    "lr": ["lr", "learning_rate", "train/lr", "train/learning_rate", "optim/learning_rate*", "optim/lr", "lr-*",
           "train_inner/lr"],
    "val_loss": ["val_loss", "eval_loss", "valid_loss", "validation_loss", "val/loss", "eval/loss", "loss/val", "eval/CE loss",
                 "valid/loss", "val_loss_epoch"],
    "tokens": ["tokens", "tokens_seen", "num_tokens", "total_tokens", "num_input_tokens_seen", "train/num_input_tokens_seen",
               "throughput/total_tokens", "n_tokens_seen", "consumed_tokens"],
    "tokens_per_sec": ["tokens_per_sec", "tokens_per_second", "tok/s", "tokens/s", "tps", "throughput(tps)",
                       "train_tokens_per_second", "throughput/device/tokens_per_second"],
    "mfu": ["mfu", "train/mfu", "mfu(%)", "throughput/device/mfu"],
    "step_seconds": ["step_seconds", "step_time", "iter_time", "dt", "time_per_step", "time_metrics/end_to_end(s)"],
    "step_ms": ["step_ms", "dt_ms", "iter_ms", "elapsed_time_per_iteration_(ms)"],
    "data_seconds": ["data_seconds", "data_time", "time_metrics/data_loading(s)"],
    "memory": ["memory_gib", "memory", "peak_memory_gib", "memory/max_active(GiB)"],
}  # fmt: skip
# Field of ours -> of a record in metrics.jsonl, where they differ.
FIELDS = {"norm": "grad_norm_pre_clip", "memory": "memory_gib"}
COUNTS = ("step", "tokens", "tokens_per_sec")  # whole numbers, and large ones
GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")  # thousands
_UNIT = re.compile(r"([-+]?\d*\.?\d+) ?([kKMBGT])")
_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9*]+", "_", name.lower()).strip("_") if name != "_step" else name


_PATTERNS = {
    ours: [re.compile(re.escape(_plain(name)).replace(r"\*", ".*")) for name in names] for ours, names in NAMES.items()
}


def guess(there: Iterable[str]) -> dict[str, str]:
    """Field of ours -> column of theirs, for all that are known."""
    found = {}
    columns = {_called(name): name for name in reversed(list(there)) if not name.endswith(("__MIN", "__MAX"))}
    for ours, patterns in _PATTERNS.items():
        hits = [columns[c] for p in patterns for c in columns if p.fullmatch(c)]
        if hits:
            found[ours] = hits[0]
    return found


def _called(column: str) -> str:
    """By its own name, if that is known."""
    name = _plain(column)
    return name if any(p.fullmatch(name) for patterns in _PATTERNS.values() for p in patterns) else _plain(bare(column))


def bare(name: str) -> str:
    """Without the run's name, which an export of wandb's charts puts before it: "dashing-cloud-3 - train/loss"."""
    return name.rpartition(" - ")[2]


def number(value: Any) -> float | None:
    """NaN and infinity are numbers: they say that the loss was not finite. None: no number stands there. 1,006.5 and 3.2k are
    numbers, 10,75 is none (cells.settled has turned it into one where the comma is the decimal sign)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return _spelled(value) if isinstance(value, str) else None


def _spelled(text: str) -> float | None:
    text = text.strip().rstrip("|;,")
    percent, text = text.endswith("%"), text.rstrip("%")
    text = text.replace(",", "") if GROUPED.fullmatch(text) else text
    if found := _UNIT.fullmatch(text):
        text = f"{found[1]}e{_POWERS[found[2]]}"
    try:
        return float(text) / (100 if percent else 1)
    except ValueError:
        return None


def whole(value: Any) -> int | None:
    """For steps and tokens; None for what is no whole number, negative, or beyond all counting."""
    found = number(value)
    if found is None or not math.isfinite(found) or found != int(found) or not 0 <= found < 1e15:
        return None
    return int(found)
