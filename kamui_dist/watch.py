"""Diagnosis on plain floats that all ranks share, so every rank comes to the same findings. Imports no torch.

    average, spike, findings = watch.observe(step, loss, norm, skipped)

A loss is judged before it is added to the average; spikes and non-finite values are never added.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    kind: str
    step: int
    message: str
    cause: str
    advice: str
    action: str  # note, warn, skip, stop

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.message} Likely: {self.cause} Do: {self.advice}"


@dataclass
class Watch:
    """Moving average of the last `window` healthy losses, spikes above `spike_factor` times it, and non-finite updates,
    `max_skipped` of which in a row stop the run. `losses` and `skipped_in_a_row` are saved in the checkpoint."""

    spike_factor: float
    window: int
    max_skipped: int
    losses: deque[float] = field(default_factory=deque)
    skipped_in_a_row: int = 0

    def observe(self, step: int, loss: float, norm: float, skipped: bool) -> tuple[float, bool, list[Finding]]:
        """`step`: updates done, this one included. Returns (average before this loss, spike, findings)."""
        average = math.fsum(self.losses) / len(self.losses) if self.losses else loss
        spike = math.isfinite(loss) and bool(self.losses) and loss > self.spike_factor * average
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        findings = []
        if skipped:
            findings.append(self._non_finite(step, loss, norm))
        if spike:
            findings.append(Finding(
                "spike", step, f"loss {loss:.4g} is more than {self.spike_factor:g} x its average {average:.4g}.",
                "a bad batch, or a learning rate at the edge of stability.",
                "see whether it returns within some steps; if not, lower optim.lr or lengthen schedule.warmup.", "warn",
            ))  # fmt: skip
        elif math.isfinite(loss):
            self.losses.append(loss)
            if len(self.losses) > self.window:
                self.losses.popleft()
        return average, spike, findings

    def _non_finite(self, step: int, loss: float, norm: float) -> Finding:
        stop = self.skipped_in_a_row >= self.max_skipped
        row = f", {self.skipped_in_a_row} in a row" if self.skipped_in_a_row > 1 else ""
        return Finding(
            "non-finite", step, f"loss {loss:.4g}, gradient norm {norm:.4g}: update skipped on all ranks{row}.",
            "fp16 looking for its scale (harmless when rare), a learning rate too high, or a batch without a target.",
            "if it goes on, lower optim.lr or use run.precision=bf16."
            + (f" The run stops: watch.max_skipped = {self.max_skipped}." if stop else ""),
            "stop" if stop else "skip",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "skipped_in_a_row": self.skipped_in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"][-self.window :])
        self.skipped_in_a_row = state["skipped_in_a_row"]
