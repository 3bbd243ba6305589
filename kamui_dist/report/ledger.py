"""Where the wall time of a run went, over all its starts: goodput and what it lost. Pure over records.

Goodput is the share of the time in which the run made progress that it kept, as in "Introducing ML Productivity Goodput"
(Google Cloud, 2024): work that is done again after a crash or a rollback does not count, waiting does not count.

The time from the first record to the last is cut at every step, start and rollback. Each piece is shared out among what the
records say was done in it, in the order in which it was done, and never more than the piece is long: so the parts always sum
to the whole, whatever a record claims. The sums are integers of microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# name: (words, what it is)
PARTS = {
    "productive": ("training", "updates that count"),
    "replayed": ("done again", "updates lost to a crash or a rollback"),
    "skipped": ("skipped", "updates that were not finite"),
    "data": ("data", "waiting for the next batch"),
    "meet": ("other ranks", "rank 0 waiting for the others"),
    "eval": ("validation", ""),
    "save": ("checkpoints", "training held while saving"),
    "start": ("start-up", "from the record of a start to its first update, and going back"),
    "down": ("down", "between attempts, with loading the program"),
    "other": ("other", "logging, looks into the layers, garbage collection"),
}
_BOUNDS = ("start", "resume", "rollback", "step", "end")
_SECOND = 1_000_000


@dataclass(frozen=True)
class Ledger:
    parts: dict[str, int]  # microseconds, every name of PARTS
    starts: int
    rollbacks: int
    lost_steps: int
    unknown: frozenset[str] = field(default_factory=frozenset)  # parts that the records do not tell: in another part

    @property
    def total(self) -> int:
        """Microseconds."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """None for a run without time."""
        return self.parts["productive"] / self.total if self.total else None

    def seconds(self, part: str) -> float | None:
        """None: not known."""
        return None if part in self.unknown else self.parts[part] / _SECOND


def split(step: dict[str, Any]) -> dict[str, float]:
    """The seconds of one update, from its record: data, meet and productive (or skipped). They sum to its step_seconds.

    data_seconds is the longest wait of any rank. What rank 0 did not itself wait for data it waited in the meeting, for the
    rank that did: that part of meet_seconds is data, too, and is counted once.
    """
    whole = _seconds(step, "step_seconds")
    data = min(whole, _seconds(step, "data_seconds"))
    meet = _seconds(step, "meet_seconds")
    own = max(0.0, whole - _seconds(step, "compute_seconds") - meet - _seconds(step, "update_seconds"))
    meet = min(whole - data, max(0.0, meet - max(0.0, data - own)))
    return {"data": data, "meet": meet, "skipped" if step.get("skipped") else "productive": whole - data - meet}


@dataclass
class _Piece:
    step: int  # the update that it ends with, or that it follows
    parts: dict[str, int]


def account(records: Iterable[dict[str, Any]]) -> Ledger:
    """`records`: of metrics.jsonl, in the order of the file; those without a time are left out."""
    timed = [r for r in records if isinstance(r.get("time"), int | float)]
    held = _held(timed)
    pieces: list[_Piece] = []
    starts = rollbacks = lost_steps = 0
    unknown: set[str] = set()
    last: float | None = None  # time of the record before
    began: float | None = None  # of the piece that is open
    at, fresh = 0, False  # updates done; whether the first update of this attempt is still to come
    for record in timed:
        kind, now = record["kind"], record["time"]
        if began is None:
            began = last = now
        if kind in ("resume", "rollback", "start"):
            # Cut here, so that what came before is closed off at its last record and the gap stands alone.
            _close(pieces, at, last - began, _during(held, at), "start" if fresh else "other")
            step = record.get("step") or 0
            gone = sum(_undo(pieces, step))
            gap = _us(now - last)
            lost = record.get("lost_seconds")
            if kind == "start" or lost is None:
                if kind != "start":
                    unknown.add("replayed")
                lost = 0.0
            replayed = min(gap, max(0, _us(lost) - gone))
            pieces.append(
                _Piece(step, {"replayed": replayed, "start" if kind == "rollback" else "down": gap - replayed})
            )
            lost_steps += record.get("lost_steps") or 0
            starts += kind != "rollback"
            rollbacks += kind == "rollback"
            began, at, fresh = now, step, True
        elif kind == "step":
            claims = {**_during(held, at), **split(record)}
            _close(pieces, record.get("step") or 0, now - began, claims, "start" if fresh else "other")
            if "meet_seconds" not in record:
                unknown.add("meet")
            began, at, fresh = now, record.get("step") or 0, False
        last = max(last, now) if last is not None else now
    if began is not None and last is not None:
        _close(pieces, at, last - began, _during(held, at), "start" if fresh else "other")
    return Ledger(
        {name: sum(p.parts.get(name, 0) for p in pieces) for name in PARTS},
        starts,
        rollbacks,
        lost_steps,
        frozenset(unknown),
    )
