"""Validation loss over a fixed set of windows, divided among all ranks: the exact mean over tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from kamui_dist import distributed, parallel, precision
from kamui_dist.exchange import Exchange


@dataclass(frozen=True)
class Validation:
    name: str  # of the set
    loss: float  # nats a target
    seconds: float
    bytes_per_target: float | None  # of the set's text; None where it is not known

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0)) if math.isfinite(self.loss) else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Does not depend on the tokenizer, as loss and perplexity do: nats / ln 2 a target, over its bytes of text."""
        return None if self.bytes_per_target is None else self.loss / math.log(2) / self.bytes_per_target


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, ...]], device: torch.device, compute: str,
    poll: Callable[[], int] = lambda: 0,
) -> tuple[float, int, float, int]:  # fmt: skip
    """Mean cross-entropy in nats over all targets of all ranks' batches. Collective.

    `batches` yields (inputs (B, T), targets (B, T)) and what else the model takes, the same number on every rank (FSDP gathers
    weights in each forward);
    rows without a target weigh nothing. `poll()` is this rank's stop request, 0 if there is none: about once a second the ranks
    exchange it, and one that has heard something ends the validation on all ranks after the same batch. Returns (mean loss,
    number of targets, seconds, 0 or the request that cut it short). Leaves the model's mode as it was.
    """
    started = time.perf_counter()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    targets = torch.zeros((), dtype=torch.float64, device=device)  # fp32 would stop counting at 2**24
    exchange, asked = Exchange(poll, device), 0
    with parallel.evaluating(model):
        for batch in batches:
            x, y, *documents = (tensor.to(device, non_blocking=True) for tensor in batch)
            with precision.autocast(device, compute):
                loss_sum += model(x, y, *documents)
            targets += (y != -100).sum()
            if asked := exchange.after_batch():
                break
    rows = distributed.gather_rows(loss_sum, targets, device=device)
    total, count = sum(r[0] for r in rows), sum(r[1] for r in rows)
    return total / count if count else float("nan"), int(count), time.perf_counter() - started, asked
