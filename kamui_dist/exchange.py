"""Stop requests inside long work that all ranks do in equal parts (a validation): agreed about once a second, acted on alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kamui_dist import distributed


class Exchange:
    """`if asked := exchange.after_batch(): break`, after each batch on every rank.

    poll: this rank's stop request, 0 if there is none. As the ranks do the same number of batches they exchange it after the same
    ones: after the first, then so many later that the slowest rank needs a second for them.
    """

    def __init__(self, poll: Callable[[], int], device: torch.device) -> None:
        self.poll, self.device = poll, device
        self.done, self.last_done, self.next = 0, 0, 1
        self.last = time.perf_counter()

    def after_batch(self) -> int:
        """0, or what the ranks were asked; the same on all ranks. Collective."""
        self.done += 1
        if self.done < self.next:
            return 0
        now = time.perf_counter()
        rows = distributed.gather_rows(self.poll(), now - self.last, device=self.device)  # (ranks, 2)
        batches_a_second = (self.done - self.last_done) / max(1e-9, *(r[1] for r in rows))
        # Twice as many as so far at most: the first ones may have compiled, or come from a cache.
        self.next = self.done + max(1, min(int(batches_a_second), 2 * self.done))
        self.last, self.last_done = now, self.done
        return int(max(r[0] for r in rows))
