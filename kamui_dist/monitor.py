"""A look into the layers, every log.detail_every steps and in the first: the same under one process, DDP, FSDP and HSDP.

    monitor = Monitor(model, cfg, plan, device, clock)             model: as `parallelize` returned it
    detail = monitor.begin(state.step + 1)                         before forward; false in most steps
    monitor.before_update(unscale)                                 gradients complete, not yet clipped; also if no update follows
    if detail: metrics.write("detail", step=state.step, **monitor.after_update(x, y, *documents))     the last micro-batch

A layer is a block (a child of a ModuleList), or what lies outside of blocks, by the first part of its name (token_embedding, head).
A run is the same with any detail_every, bit by bit. Memory: during the update, this rank's part of the weights once more.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from kamui_dist import distributed, parallel, precision
from kamui_dist.attention import largest_score
from kamui_dist.config import Config
from kamui_dist.model import GPT, IGNORE, Attention
from kamui_dist.noise import NoiseScale, OwnGradient
from kamui_dist.plan import Plan
from kamui_dist.stopwatch import Stopwatch, seconds_between
from kamui_dist.tensors import local_part

LONGEST = 8192  # tokens of a sequence that are looked at in our model: with documents there is a T x T mask
PROBED = 8  # targets before each cut of the causality probe


class Monitor:
    """noise: running estimate of the gradient noise scale; it belongs into the checkpoint (to_dict, load)."""

    def __init__(
        self, model: nn.Module, cfg: Config, plan: Plan, device: torch.device, clock: Stopwatch | None = None
    ) -> None:
        self.cfg, self.plan, self.device, self.clock = cfg, plan, device, clock
        self.module = parallel.unwrap(model)
        self.blocks = parallel.blocks(self.module)
        # Integers and what is empty have no length, and no share in anything.
        seen = [name for name, p in self.module.named_parameters() if p.numel() and p.is_floating_point()]
        of = {name: self._layer_of(name) for name in seen}
        self.layers = list(dict.fromkeys(of.values()))
        self.layer = {name: self.layers.index(layer) for name, layer in of.items()}  # of each of `seen`
        self.noise, self.own = NoiseScale(), OwnGradient(model, cfg, plan)
        self.due = False  # a look, in this step
        self.probed = False  # for causality, once a start
        self.spent = 0.0  # seconds in `before_update`
        self.frozen: list[float] = []  # share of each layer
        trains = {
            self.layer[name] for name, p in self.module.named_parameters() if name in self.layer and p.requires_grad
        }
        self.trains = [i in trains for i in range(len(self.layers))]  # what nobody froze
        self.weights: dict[str, Tensor] = {}  # before the update
        self.squares: list[Tensor] = []  # of the gradients of each layer, and of this rank's own

    def _layer_of(self, parameter: str) -> str:
        return next((block for block in self.blocks if parameter.startswith(f"{block}.")), parameter.partition(".")[0])

    def begin(self, step: int) -> bool:
        """Whether update `step` (the first is 1) is one to look into."""
        every = self.cfg.log.detail_every
        self.due = every > 0 and (step == 1 or step % every == 0)
        if self.due:
            self.own.begin()
        return self.due

    @torch.no_grad()
    def before_update(self, unscale: float) -> None:
        """Takes the gradients' norms, and a copy of the weights; in a step that is not due nothing. unscale: what makes `.grad` the
        gradient of the mean loss."""
        if not self.due:
            return
        began = time.perf_counter()
        gradients, elements, still = {}, [0] * len(self.layers), [0] * len(self.layers)
        for name, parameter in self.module.named_parameters():
            if name not in self.layer:
                continue
            elements[self.layer[name]] += parameter.numel()
            if parameter.grad is None:
                still[self.layer[name]] += parameter.numel()
            else:
                gradients[name] = local_part(parameter.grad)
        self.frozen = [a / b for a, b in zip(still, elements, strict=True)]
        self.squares = [s * unscale**2 for s in (self._squares(gradients), self.own.take(self.device))]
        self.weights = {name: weight.clone() for name, weight in self._local_weights().items()}
        self.spent = time.perf_counter() - began

    @torch.no_grad()
    def after_update(self, x: Tensor, y: Tensor, *documents: Tensor) -> dict[str, Any]:
        """The record, the same on every rank but for detail_seconds. Collective. Of x, y, documents (B, T) the first row is used.

            layers              name -> grad_norm, weight_norm (after the update), update_norm (0: no update, or skipped),
                                update_ratio = update_norm / weight_norm, frozen (share of its elements that has no gradient),
                                trains (whether a parameter of it asks for one);
                                of a block activation_rms (of its output, mean square over all ranks' sequences), and
                                attention_logit_max (our own attention; largest over ranks, heads and positions)
            noise_scale ...     see noise.py; absent with one process and one micro-batch
            causality_gap       first record of a start only: see `_gaps`; 0 for a causal model
            communication_seconds   DDP: from a rank's last gradient to the end of its backward, the least of all ranks: what
                                of the all-reduce backward does not hide, without the wait for slower ranks
            detail_seconds      what all this took on this rank

        A number that is not finite is None.
        """
        began = time.perf_counter()
        now = self._local_weights()
        torch._foreach_sub_([self.weights[name] for name in now], list(now.values()))
        gradients, own = self.squares
        updates, weights = self._squares(self.weights), self._squares(now)
        self.weights = {}
        length = LONGEST if isinstance(self.module, GPT) else None
        x, y, *starts = (rows[:1, :length] for rows in (x, y, *documents))  # (1, T)
        # No trace of it is left: no dropout, so nothing random is drawn.
        with (
            parallel.evaluating(self.module),
            precision.eager(),
            precision.autocast(self.device, self.cfg.run.precision),
        ):
            activations, scores = self._look(x, y, *starts)
            gaps = [] if self.probed else self._gaps(x, y, bool(starts))
        rows = distributed.gather_rows(
            *gradients, *updates, *weights, own, self._communication(), *gaps, *activations.values(), *scores.values(),
            device=self.device,
        )  # fmt: skip
        columns = iter(zip(*rows, strict=True))  # (ranks,) each

        # The ranks of one shard group hold the whole model, once.
        norms = [[math.sqrt(sum(next(columns)[: self.plan.shard])) for _ in self.layers] for _ in range(3)]
        layers: dict[str, dict[str, float | None]] = {
            name: {
                "grad_norm": number(g), "weight_norm": number(w), "update_norm": number(u),
                "update_ratio": number(u / w) if w else None, "frozen": frozen,
                "trains": trains,
            }
            for name, g, u, w, frozen, trains in zip(self.layers, *norms, self.frozen, self.trains, strict=True)
        }  # fmt: skip
        record: dict[str, Any] = {"layers": layers}
        own_squares, waits = next(columns), next(columns)
        if self.own.sequences:
            small, big = sum(own_squares) / len(own_squares), sum(g * g for g in norms[0])
            self.noise.observe(self.own.sequences, small, self.plan.global_batch, big)
            record |= self.noise.record(self.cfg.model.context_length)
        if not math.isnan(min(waits)):
            record["communication_seconds"] = min(waits)
        if gaps:
            self.probed = True
            told = [gap for _ in gaps for gap in next(columns) if math.isfinite(gap)]
            record["causality_gap"] = max(told) if told else None
        for name in activations:
            squares = next(columns)
            layers.setdefault(name, {})["activation_rms"] = number(math.sqrt(sum(squares) / len(squares)))
        for name in scores:
            largest = next(columns)
            layers[name]["attention_logit_max"] = None if any(map(math.isnan, largest)) else number(max(largest))
        record["detail_seconds"] = self.spent + time.perf_counter() - began
        return record

    def _local_weights(self) -> dict[str, Tensor]:
        return {name: part for name, part in parallel.local_weights(self.module).items() if name in self.layer}

    def _squares(self, tensors: dict[str, Tensor]) -> Tensor:
        """The squared 2-norm of each layer, of this rank's parts of its parameters: fp64, (layers,)."""
        out = torch.zeros(len(self.layers), dtype=torch.float64, device=self.device)
        parts = {name: part for name, part in tensors.items() if part.numel()}  # of a small one a shard can be empty
        if not parts:
            return out
        norms = torch.stack(torch._foreach_norm(list(parts.values()), 2, torch.float32))
        return out.index_add_(
            0, torch.tensor([self.layer[name] for name in parts], device=self.device), norms.double() ** 2
        )

    def _communication(self) -> float:
        end = self.clock.ends.get("backward") if self.clock else None
        return math.nan if self.own.last is None or end is None else seconds_between(self.own.last, end)

    def _loss(self, x: Tensor, y: Tensor, *documents: Tensor) -> Tensor:
        # FlexAttention would write all T x T scores if it is not compiled.
        options = {"flex": False} if isinstance(self.module, GPT) else {}
        return self.module(x, y, *documents, **options).double()

    def _look(self, x: Tensor, y: Tensor, *documents: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By block: mean square of the output, and largest attention score. One forward pass."""
        activations: dict[str, Tensor] = {}
        scores: dict[str, Tensor] = {}

        def output(name: str, _module: nn.Module, _args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if isinstance(out, Tensor):  # what else a block of somebody's own may give is not looked into
                activations[name] = out.float().square().mean()

        def attention(name: str, module: Attention, args: Any) -> None:
            x, rope, mask = args
            q, k, _ = module.heads(x, rope)
            scores[name] = largest_score(q, k, mask)

        hooks = []
        for name, block in self.blocks.items():
            hooks.append(block.register_forward_hook(functools.partial(output, name)))
            ours = [module for module in block.modules() if isinstance(module, Attention)]
            hooks += [module.register_forward_pre_hook(functools.partial(attention, name)) for module in ours]
        try:
            self._loss(x, y, *documents)
        finally:
            for hook in hooks:
                hook.remove()
        return activations, scores

    def _gaps(self, x: Tensor, y: Tensor, documents: bool) -> list[Tensor]:
        """Whether the model sees what it is to predict: other inputs from a cut on must leave the loss before it as it is.

        Two cuts, an early one, where a single token that leaks has little company yet, and the middle; PROBED targets before
        each. Per cut the change in nats a target, fp64; 0 if no more than ten times what the same input twice differs by; NaN
        without targets. Documents are left out: a border at a cut would hide what passes it.
        """
        T = x.shape[1]
        place = torch.arange(T, device=x.device)
        # Two tokens that the sequence has, so that none has a meaning that it never has in the data (padding, ...).
        one = x[:, :1]  # (1, 1)
        two = x.gather(1, (x != one).int().argmax(1, keepdim=True))
        other = torch.where(x == one, two, one)  # (1, T)
        one_document = [torch.zeros_like(x)] if documents else []
        gaps = []
        for cut in sorted({min(PROBED, T // 2), T // 2} - {0}):
            targets = y.masked_fill((place < cut - PROBED) | (place >= cut), IGNORE)
            changed = torch.where(place < cut, x, other)
            first, again, new = (self._loss(inputs, targets, *one_document) for inputs in (x, x, changed))
            gap, unsteady = (first - new).abs(), (first - again).abs()
            gaps.append(torch.where(gap > 10 * unsteady, gap, 0 * gap) / (targets != IGNORE).sum())
        return gaps


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None
