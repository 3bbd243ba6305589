"""Validation loss over a fixed set of windows, divided among all ranks: the exact mean over tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn

from kamui_dist import distributed, parallel, precision


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device, compute: str
) -> tuple[float, int, float]:
    """Mean cross-entropy in nats over all targets of all ranks' batches. Collective.

    `batches` yields (inputs (B, T), targets (B, T)), the same number on every rank (FSDP gathers weights in each forward);
    rows without a target weigh nothing. Returns (mean loss, number of targets, seconds). Leaves the model's mode as it was.
    """
    started, training = time.perf_counter(), model.training
    model.eval()
    loss_sum, targets = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)
    try:
        for x, y in batches:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with precision.autocast(device, compute):
                loss_sum += model(x, y)
            targets += (y != -100).sum()
    finally:
        parallel.reshard(model)
        model.train(training)
    rows = distributed.gather_rows(loss_sum, targets, device=device)
    total, count = sum(r[0] for r in rows), sum(r[1] for r in rows)
    return total / count if count else float("nan"), int(count), time.perf_counter() - started
