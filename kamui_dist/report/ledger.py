"""Where the wall time of a run went, over all its starts: goodput, and what was lost. Pure over records.

Goodput is the share of the time that made progress which the run kept (the runtime part of Google Cloud's "ML Productivity
Goodput", 2024): updates that were done again after a crash or a rollback do not count, and waiting does not.

The time from the first record to the last is cut at every update and at every start. Each piece is shared out among what the
records tell of it, and never more than the piece is long: so the parts always sum to the whole, whatever a record claims.
All sums are integers, microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# part: (in two words, what it is)
PARTS = {
    "productive": ("training", "updates that count"),
    "replayed": ("done again", "updates that a crash or a rollback undid"),
    "skipped": ("skipped", "updates left out because they were not finite"),
    "data": ("data", "waiting for the next batch, longest of all ranks"),
    "meet": ("other ranks", "rank 0 waiting for the others"),
    "eval": ("validation", "the validation sets"),
    "save": ("checkpoints", "training held while a checkpoint was made"),
    "start": ("start-up", "from a start to its first update"),
    "down": ("down", "between attempts: queue, loading the program"),
    "other": ("other", "logging, looks into the layers, garbage collection"),
}
_KEPT = ("start", "down")  # of an update that is undone, these were not lost with it


@dataclass(frozen=True)
class Ledger:
    parts: dict[str, int]  # microseconds; every name of PARTS
    starts: int
    rollbacks: int
    lost_steps: int
    unknown: frozenset[str]  # parts that the records do not tell: their time is in another one

    @property
    def total(self) -> int:
        """Microseconds."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """None for a run that took no time."""
        return self.parts["productive"] / self.total if self.total else None


def split(step: dict[str, Any]) -> dict[str, float]:
    """The seconds of one update, from its record: data, meet, and productive or skipped. They sum to its step_seconds.

    data_seconds is the longest wait of any rank. Rank 0 spends in the meeting what another rank waited longer for its data
    than rank 0 did: that part of meet_seconds is counted as data, and once.
    """
    whole, meet = _number(step, "step_seconds"), _number(step, "meet_seconds")
    data = min(whole, _number(step, "data_seconds"))
    own = max(0.0, whole - _number(step, "compute_seconds") - meet - _number(step, "update_seconds"))
    meet = min(whole - data, max(0.0, meet - max(0.0, data - own)))
    return {"data": data, "meet": meet, "skipped" if step.get("skipped") else "productive": whole - data - meet}


def account(records: Iterable[dict[str, Any]]) -> Ledger:
    """`records`: of metrics.jsonl, in the order of the file; those without a time count for nothing."""
    pieces: list[tuple[int, dict[str, int]]] = []  # (update that it ends with or belongs to, parts)
    claims: dict[str, float] = {}  # seconds told since the last cut
    starts = rollbacks = lost_steps = step = 0
    unknown: set[str] = set()
    met = back = False  # whether a record told of meetings; whether the run has just gone back
    rest = "start"  # what the time is that no claim covers
    cut = last = tail = None  # times of the last cut, of the last record, and of a rollback that no start follows yet
    for record in records:
        if not (now := _microseconds(_number(record, "time"))):
            continue
        cut, last = (now, now) if cut is None or last is None else (cut, last)
        match record["kind"]:
            case "rollback" if "lost_seconds" not in record:  # the start that follows tells it
                rollbacks, back, tail = rollbacks + 1, True, now
                continue
            case "start" | "resume" | "rollback" as kind:
                pieces.append((step, _share(last - cut, claims, rest)))
                step = record.get("step") or 0
                undone = _undo(pieces, step)
                back = back or kind == "rollback"
                gap = max(0, now - last)  # in which the updates were lost that left no record
                replayed = min(gap, max(0, _microseconds(_number(record, "lost_seconds")) - undone))
                pieces.append((step, {"replayed": replayed, "start" if back else "down": gap - replayed}))
                if (starts or rollbacks) and record.get("lost_seconds") is None:
                    unknown.add("replayed")
                lost_steps += record.get("lost_steps") or 0
                starts, rollbacks, back = starts + (not back), rollbacks + (kind == "rollback"), False
                cut, claims, rest = now, {}, "start"
            case "step":
                step = record.get("step") or 0
                met = met or "meet_seconds" in record
                pieces.append((step, _share(now - cut, {**claims, **split(record)}, rest)))
                cut, claims, rest = now, {}, "other"
            case "eval":
                claims["eval"] = claims.get("eval", 0.0) + _number(record, "eval_seconds")
            case "checkpoint":
                held = _number(record, "stall_seconds" if record.get("stall_seconds") is not None else "save_seconds")
                if (saved := record.get("step") or 0) == step:
                    claims["save"] = claims.get("save", 0.0) + held
                else:  # checkpoint.async: published some updates after it held training
                    _hold(pieces, saved, _microseconds(held))
        last, tail = now, None
    if cut is not None and last is not None:
        last = last if tail is None else tail
        pieces.append((step, _share(last - cut, claims, rest)))
    if not met:
        unknown.add("meet")
    parts = {name: sum(piece.get(name, 0) for _, piece in pieces) for name in PARTS}
    return Ledger(parts, starts, rollbacks, lost_steps, frozenset(unknown))


def _share(piece: int, claims: dict[str, float], rest: str) -> dict[str, int]:
    """A piece of time among the claims on it, the first ones first; what is left is `rest`. A clock that was set back (another
    node after a restart) makes no time negative."""
    left, parts = max(0, piece), {}
    for name, claimed in claims.items():
        parts[name] = min(left, _microseconds(claimed))
        left -= parts[name]
    parts[rest] = parts.get(rest, 0) + left
    return parts


def _undo(pieces: list[tuple[int, dict[str, int]]], step: int) -> int:
    """Makes the pieces of updates after `step` time that was lost; returns how much. Their records are gone from a run of ours
    (metrics.forget_after), and this finds nothing; a log that was only appended to still has them."""
    undone = 0
    for place in range(len(pieces) - 1, -1, -1):
        done, parts = pieces[place]
        if done > step:
            lost = sum(value for name, value in parts.items() if name not in (*_KEPT, "replayed"))
            undone += lost
            kept = {name: value for name, value in parts.items() if name in _KEPT}
            pieces[place] = (done, {**kept, "replayed": parts.get("replayed", 0) + lost})
    return undone


def _hold(pieces: list[tuple[int, dict[str, int]]], step: int, held: int) -> None:
    """Counts what a save beside training held it, right after update `step`, as saving."""
    for done, parts in reversed(pieces):
        if done == step + 1:
            moved = min(held, parts.get("other", 0))
            parts["other"] = parts.get("other", 0) - moved
            parts["save"] = parts.get("save", 0) + moved
        if done <= step + 1:
            return


def _number(record: dict[str, Any], name: str) -> float:
    """0 for what is missing or cannot be a duration."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12 else 0.0


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
