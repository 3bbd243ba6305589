"""A byte-sized model for model.factory whose speed a test sets while it trains: a file holds the seconds of one forward pass."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Paced(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.pace = Path(cfg.factory_args["pace"])
        self.layers = nn.ModuleList([nn.Embedding(cfg.vocab_size, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, cfg.vocab_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(float(self.pace.read_text() or 0))
        embedding, hidden = self.layers
        logits = self.head(hidden(embedding(x)).tanh())  # (B, T, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def paced(cfg: Any) -> nn.Module:
    return Paced(cfg)
