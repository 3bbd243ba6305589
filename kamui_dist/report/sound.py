"""What in a record of metrics.jsonl can be relied on: its fields are of the types that the trainer writes, or not there."""

from __future__ import annotations

from typing import Any

_WHOLE = {
    "tokens",
    "samples",
    "world_size",
    "global_batch",
    "targets",
    "slowest_rank",
    "lost_steps",
    "restarts",
    "trigger_step",
}
_NUMBERS = {
    "loss", "loss_average", "val_loss", "lr", "grad_norm_pre_clip", "grad_norm_post_clip", "loss_scale", "epoch", "time", "mfu",
    "tokens_per_sec", "step_seconds", "data_seconds", "compute_seconds", "meet_seconds", "update_seconds", "own_seconds",
    "median_own_seconds", "memory_gib", "peak_memory_gib", "eval_seconds", "save_seconds", "stall_seconds", "lost_seconds",
    "causality_gap", "noise_scale", "noise_scale_tokens", "gradient_signal", "gradient_noise", "communication_seconds",
    "detail_seconds", "repeats", "entropy",
}  # fmt: skip
_FLAGS = {"spike", "skipped", "best"}
_WORDS = {"set", "outcome", "reason", "setup", "finding", "message"}
_LARGEST = 1e100  # of any number; rules square it


def is_record(value: Any) -> bool:
    """A kind, a step, and a loss where there is one. A kind that is not for us (a sample, one of a later version) is no damage."""
    if not (isinstance(value, dict) and isinstance(value.get("kind"), str) and type(value.get("step")) is int):
        return False
    return 0 <= value["step"] < 1e15 and _is_number(value.get("loss")) and _is_number(value.get("val_loss"))


def sound(record: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The record without the fields that are of another type, and the names of those. null is of every type."""
    wrong = [name for name, value in record.items() if value is not None and not _fits(name, value)]
    kept = {name: value for name, value in record.items() if name not in wrong} if wrong else record
    for name in ("layers", "sources"):
        if kept.get(name) and (inner := _inner(kept[name])) != kept[name]:
            kept, wrong = {**kept, name: inner}, [*wrong, name]
    return kept, wrong


def _fits(name: str, value: Any) -> bool:
    if name in _NUMBERS:
        return _is_number(value) and (not name.endswith("_seconds") or 0 <= value < 1e12)
    if name in _WHOLE:
        return (
            type(value) is int and 0 <= value < 1e15 and (name not in ("world_size", "global_batch") or 0 < value < 1e9)
        )
    if name in _FLAGS:
        return isinstance(value, bool)
    if name in _WORDS:
        return isinstance(value, str)
    return name not in ("layers", "sources") or isinstance(value, dict)


def _inner(parts: dict[str, Any]) -> dict[str, Any]:
    """Of a record's layers or sources: those that have numbers, and of them the numbers."""
    return {
        name: {field: value for field, value in part.items() if isinstance(value, bool) or _is_number(value)}
        for name, part in parts.items() if isinstance(part, dict)
    }  # fmt: skip


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < _LARGEST)
