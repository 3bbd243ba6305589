"""All validation sets, each with a loss of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kamui_dist import distributed
from kamui_dist.config import Config
from kamui_dist.data import evaluation_batches
from kamui_dist.evaluate import evaluate
from kamui_dist.stream import TokenStream


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


def evaluate_sets(
    model: nn.Module, sets: dict[str, TokenStream], cfg: Config, max_windows: int | None, device: torch.device,
    poll: Callable[[], int] = lambda: 0,
) -> tuple[list[Validation], int]:  # fmt: skip
    """Each set's loss over `max_windows` windows spread evenly over it (None: all of them). Collective.

    poll: as in `evaluate`; what it has heard ends the set that is being read and the ones after it. Returns the sets that
    were read to the end, and 0 or the request.
    """
    results: list[Validation] = []
    for name, stream in sets.items():
        batches = evaluation_batches(
            stream, cfg.model.context_length, cfg.train.micro_batch, distributed.rank(), distributed.world_size(),
            max_windows, cfg.model.vocab_size, cfg.data.document_mask,
        )  # fmt: skip
        loss, _, seconds, asked = evaluate(model, batches, device, cfg.run.precision, poll)
        if asked:
            return results, asked
        results.append(Validation(name, loss, seconds, stream.bytes_per_target))
    return results, 0
