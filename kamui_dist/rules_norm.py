"""Rules of the watch on the gradient norm before clipping, a window at a time. Pure; imports no torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kamui_dist.findings import Sign
from kamui_dist.rules import Windows, stretch


@dataclass
class Norms(Windows):
    warmup: int = 0

    def large(self) -> Sign | None:
        """Above norm_limit in all of the window."""
        lowest = min(self.values)
        if lowest <= self.cfg.norm_limit:
            return None
        return Sign(
            f"the gradient norm before clipping was above {self.cfg.norm_limit:g} in all of "
            f"{stretch(self.begins, self.ended, self.size)}: {lowest:.3g} at least, "
            f"{statistics.median(self.values):.3g} in the middle.", self.begins,
        )  # fmt: skip

    def clipped(self, grad_clip: float | None) -> Sign | None:
        """On more than clip_share of the window's steps. Not during warmup, nor in the first window: there it is usual."""
        if not grad_clip or self.begins <= max(1, self.warmup):
            return None
        share = sum(norm > grad_clip for norm in self.values) / self.size
        if share <= self.cfg.clip_share:
            return None
        return Sign(
            f"{share:.0%} of {stretch(self.begins, self.ended, self.size, 'updates')} were clipped to {grad_clip:g}; "
            f"the norm's median was {statistics.median(self.values):.3g}.", self.begins,
        )  # fmt: skip
