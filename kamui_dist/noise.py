"""Gradient noise scale, the batch size beyond which more data a step buys little (McCandlish et al. 2018, arXiv:1812.06162,
appendix A.1): the gradient of a small batch is longer than that of a large one by what is noise in it.

The small batch is what one rank, or one micro-batch, has made before anything is averaged, and costs nothing but its norm:

    one process, DDP    the first micro-batch of each rank
    FSDP, HSDP          each rank's part of the batch; with parallel.defer_sync=false its first micro-batch

One process with one micro-batch has no smaller part, and no estimate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kamui_dist import parallel, stopwatch
from kamui_dist.config import Config
from kamui_dist.plan import Plan

DECAY = 0.9  # of both averages, an estimate: the last ten count most


class OwnGradient:
    """The length of this rank's own gradient before it is averaged, in steps that `begin` is called for; other steps are free.

    sequences: in the batch that it is the gradient of; 0 where there is no smaller batch than the whole. factor: what makes
    the mean over that batch of it, as the whole gradient is the mean over the global batch.
    """

    def __init__(self, model: nn.Module, cfg: Config, plan: Plan) -> None:
        passes = plan.grad_accum_steps if plan.shard > 1 and cfg.parallel.defer_sync else 1
        self.sequences = passes * cfg.train.micro_batch
        self.factor = plan.global_batch / (self.sequences * plan.world_size)
        if self.sequences == plan.global_batch or cfg.log.detail_every == 0:
            self.sequences = 0
        self.parameters = [] if plan.shard > 1 else [p for p in model.parameters() if p.requires_grad]
        self.stamps = plan.world_size > 1 and plan.shard == 1
        self.last: stopwatch.Stamp | None = None  # DDP: when the last gradient of this rank was there
        self._squares: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._looking = False
        if plan.shard > 1 and self.sequences:
            parallel.show_own_gradients(model, self._see)

    def begin(self) -> None:
        self._looking, self.last = self.sequences > 0, None
        for k, parameter in enumerate(self.parameters if self._looking else []):
            # Runs when autograd has added to .grad, and before DDP takes it from there.
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda p, k=k: self._made(k, p)))

    def _made(self, k: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._see(k, parameter.grad)
        if self.stamps:
            self.last = stopwatch.stamp(parameter.device)

    def _see(self, k: int, gradient: Tensor) -> None:
        if self._looking and k not in self._squares:  # the first one of a step
            self._squares[k] = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def take(self, device: torch.device) -> Tensor:
        """Ends the looking. The squared length, fp64, 0-dim; NaN if nothing was seen."""
        for hook in self._hooks:
            hook.remove()
        squares, self._squares, self._hooks, self._looking = [*self._squares.values()], {}, [], False
        if not squares:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        return torch.stack(squares).sum() * self.factor**2


class NoiseScale:
    """Running estimates of |G|^2 and tr(Sigma) per sequence, smoothed each for itself, since the mean of their quotients is
    not the quotient of their means. They do not depend on the batch, so a resumed run may have another one.
    """

    def __init__(self) -> None:
        self.signal = self.noise = self.weight = 0.0

    def observe(self, small: int, small_square: float, big: int, big_square: float) -> None:
        """The squared length of a gradient of `small` sequences (the mean over all that were measured), and of `big`."""
        if not (math.isfinite(small_square) and math.isfinite(big_square)):
            return
        signal, noise = estimate(small, small_square, big, big_square)
        self.signal = DECAY * self.signal + (1 - DECAY) * signal
        self.noise = DECAY * self.noise + (1 - DECAY) * noise
        self.weight = DECAY * self.weight + (1 - DECAY)  # what to divide by, as both began with 0

    def record(self, tokens: int) -> dict[str, float | None]:
        """For a sequence of so many tokens. `noise_scale` in sequences and in tokens: tr(Sigma) / |G|^2; None while noise
        covers the signal, so that its estimate is not positive."""
        if self.weight == 0.0:
            return {}
        scale = self.noise / self.signal if self.signal > 0 and self.noise >= 0 else None
        return {
            "noise_scale": scale, "noise_scale_tokens": None if scale is None else scale * tokens,
            "gradient_signal": self.signal / self.weight, "gradient_noise": self.noise / self.weight,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def load(self, state: dict[str, Any]) -> None:
        self.signal, self.noise, self.weight = state["signal"], state["noise"], state["weight"]


def estimate(small: int, small_square: float, big: int, big_square: float) -> tuple[float, float]:
    """Unbiased (|G|^2, tr(Sigma)) from the squared lengths of gradients of two batch sizes: with E|G_B|^2 = |G|^2 + tr(Sigma) / B
    these are two equations with two unknowns. Single ones scatter widely, and may be negative."""
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise
