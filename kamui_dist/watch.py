"""Diagnosis on plain floats that all ranks share, so every rank comes to the same findings. Imports no torch.

    verdict = watch.observe(Observation(step, loss, norm, lr, ...))      before the update, which it may forbid
    findings = watch.validated(step, val_loss)
    findings = watch.detailed(step, record)                              a look into the layers (monitor.py)

A loss is judged before it is added to any statistic; spikes and non-finite values are never added.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kamui_dist import findings, knobs
from kamui_dist.findings import Finding

__all__ = ["Facts", "Finding", "Observation", "Verdict", "Watch"]


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


@dataclass(frozen=True)
class Observation:
    """One step, before its update. None: not known. Times and throughput are of the step before."""

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


@dataclass(frozen=True)
class Verdict:
    average: float  # of the healthy losses before this one
    spike: bool  # by watch.spike_factor, the tradition
    findings: list[Finding]

    @property
    def action(self) -> str:
        return findings.gravest(self.findings)


@dataclass
class Watch:
    """Moving average of the last `window` healthy losses, spikes above `spike_factor` times it, and non-finite updates,
    `max_skipped` of which in a row stop the run. `losses` and `skipped_in_a_row` are saved in the checkpoint."""

    cfg: knobs.Watch
    facts: Facts
    losses: deque[float] = field(default_factory=deque)
    skipped_in_a_row: int = 0

    def observe(self, seen: Observation) -> Verdict:
        step, loss = seen.step, seen.loss
        average = math.fsum(self.losses) / len(self.losses) if self.losses else loss
        spike = math.isfinite(loss) and bool(self.losses) and loss > self.cfg.spike_factor * average
        self.skipped_in_a_row = 0 if seen.finite else self.skipped_in_a_row + 1
        found = []
        if not seen.finite:
            found.append(self._non_finite(step, loss, seen.norm))
        if spike:
            found.append(Finding(
                "spike", step, f"loss {loss:.4g} is more than {self.cfg.spike_factor:g} x its average {average:.4g}.",
                "a bad batch, or a learning rate at the edge of stability.",
                "see whether it returns within some steps; if not, lower optim.lr or lengthen schedule.warmup.",
                self.cfg.on_spike,
            ))  # fmt: skip
        elif math.isfinite(loss):
            self.losses.append(loss)
            if len(self.losses) > self.cfg.window:
                self.losses.popleft()
        return Verdict(average, spike, [f for f in found if f.action != "off"])

    def validated(self, step: int, val_loss: float) -> list[Finding]:
        """After a validation of the first set."""
        return []

    def detailed(self, step: int, record: dict[str, Any]) -> list[Finding]:
        """After a look into the layers: `record` is that of kind "detail"."""
        return []

    def _non_finite(self, step: int, loss: float, norm: float | None) -> Finding:
        stop = self.skipped_in_a_row >= self.cfg.max_skipped
        row = f", {self.skipped_in_a_row} in a row" if self.skipped_in_a_row > 1 else ""
        return Finding(
            "non-finite", step, f"loss {loss:.4g}, gradient norm {norm or math.nan:.4g}: update skipped on all ranks{row}.",
            "fp16 looking for its scale (harmless when rare), a learning rate too high, or a batch without a target.",
            "if it goes on, lower optim.lr or use run.precision=bf16."
            + (f" watch.max_skipped = {self.cfg.max_skipped} is reached." if stop else ""),
            self.cfg.on_non_finite if stop else "skip",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "skipped_in_a_row": self.skipped_in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"][-self.cfg.window :])
        self.skipped_in_a_row = state["skipped_in_a_row"]
