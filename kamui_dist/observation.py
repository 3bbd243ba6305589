"""What the watch is told, and what it answers: plain numbers. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kamui_dist.findings import Finding, gravest

PREVIOUS = ("step_seconds", "tokens_per_sec")  # an observation has those of the step before


@dataclass(frozen=True)
class Facts:
    """What the watch has to know of a run; None where nobody knows (the log of another trainer)."""

    vocab_size: int | None = None
    steps: int | None = None  # of the whole run
    lr: float | None = None  # peak
    warmup: int | None = None  # steps
    decay_from: int | None = None  # step from which the learning rate falls fast
    grad_clip: float | None = None  # 0: none
    windows: int | None = None  # of the training data; with `global_batch` says when they come again
    global_batch: int | None = None
    fresh: bool = False  # begun with initial weights, by this program: not from another run's
    setup: str | None = None  # ranks, strategy and batch: of other ones time and memory are others
    precision: str | None = None
    repeats: float = 0.0  # share of the targets that are the same token as their input
    entropy: float | None = None  # nats a token, of how often each occurs


@dataclass(frozen=True)
class Observation:
    """One step, before its update. None: not known. step_seconds and tokens_per_sec are of the step before."""

    step: int  # updates offered, this one included
    loss: float
    norm: float | None = None  # before clipping
    lr: float | None = None
    finite: bool = True  # false: the update is skipped on all ranks
    step_seconds: float | None = None
    data_seconds: float | None = None
    tokens_per_sec: float | None = None
    memory_gib: float | None = None
    slowest_rank: int | None = None
    own_seconds: float | None = None  # of the slowest rank
    median_own_seconds: float | None = None

    @classmethod
    def from_record(cls, record: dict[str, Any], before: dict[str, Any]) -> Observation:
        """`record`, `before`: of kind "step", this one and the one before in the same attempt ({}: there is none)."""
        names = [name for name in cls.__dataclass_fields__ if name not in ("loss", "norm", "finite")]
        known: dict[str, Any] = {name: (before if name in PREVIOUS else record).get(name) for name in names}
        loss, norm, skipped = record.get("loss"), record.get("grad_norm_pre_clip"), bool(record.get("skipped"))
        known["finite"] = loss is not None and not (skipped and norm is None)  # else skipped by the watch's order
        known["norm"] = math.nan if skipped and norm is None else norm
        return cls(loss=math.nan if loss is None else loss, **known)


@dataclass(frozen=True)
class Verdict:
    average: float  # of the healthy losses before this one
    spike: bool  # by watch.spike_factor, the tradition
    findings: list[Finding]

    @property
    def action(self) -> str:
        return gravest(self.findings)
