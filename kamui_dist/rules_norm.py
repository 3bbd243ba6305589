"""Rules of the watch on the gradient norm before clipping, a window at a time. Pure; imports no torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from kamui_dist import knobs
from kamui_dist.findings import Sign
from kamui_dist.rules import Rule


@dataclass
class Norms(Rule):
    """The norms of a window of `size` steps, one window after the other."""

    cfg: knobs.Watch
    size: int
    warmup: int
    begins: int = 0
    norms: list[float] = field(default_factory=list)

    def add(self, step: int, norm: float) -> bool:
        """Whether the window is now full and to be judged."""
        if not self.norms or len(self.norms) >= self.size:
            self.begins, self.norms = step, []
        self.norms.append(norm)
        return len(self.norms) == self.size

    def large(self) -> Sign | None:
        """Above norm_limit in all of the window."""
        lowest = min(self.norms)
        if lowest <= self.cfg.norm_limit:
            return None
        return Sign(
            f"the gradient norm before clipping was above {self.cfg.norm_limit:g} in all of the last {self.size} steps: "
            f"{lowest:.3g} at least, {statistics.median(self.norms):.3g} in the middle.", self.begins,
        )  # fmt: skip

    def clipped(self, grad_clip: float | None) -> Sign | None:
        """On more than clip_share of the window's steps. Not during warmup, nor in the first window: there it is usual."""
        if not grad_clip or self.begins <= max(1, self.warmup):
            return None
        share = sum(norm > grad_clip for norm in self.norms) / self.size
        if share <= self.cfg.clip_share:
            return None
        return Sign(
            f"{share:.0%} of the last {self.size} updates were clipped to {grad_clip:g}; the norm's median was "
            f"{statistics.median(self.norms):.3g}.", self.begins,
        )  # fmt: skip
