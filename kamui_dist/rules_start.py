"""Rules of the watch on how a run begins: its first loss, and whether it learns at all, or more than it should. Pure; imports
no torch.

A model that knows nothing gives every token of the vocabulary the same probability: its loss is ln(vocabulary).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from kamui_dist.findings import Sign
from kamui_dist.rules import Rule, Window

ABOVE = 0.25  # a first loss above ln(vocabulary) by more than this share of it: bad-init (a Llama of 65B with std 0.02: 0.15)
BELOW = 0.05  # and below it: the model knows targets that it has not learnt
GAP = 1e-5  # nats a target that change with inputs which come later
TOO_GOOD = 0.1  # of ln(vocabulary): 0.55 nats a byte, 1.1 a token of GPT-2's. Nobody is there in
PRETRAINED = 0.5  # of ln(vocabulary): a first loss below it is that of weights that have learnt already
EARLY = 2000  # steps on data seen for the first time
NEAR = 0.01  # of ln(vocabulary)
WAY = 0.12  # of ln(vocabulary) that a healthy run has come by start_steps; byte frequencies alone are worth 0.4
TINY = 3e-5  # update / weight norm; about 1e-3 is usual
USUAL = 3e-4
VANISHED = 1e-6  # gradient norm; usual is 0.1 to 10
IDLE = 16  # steps in a row without gradient or learning rate
CHECK = 16  # steps between looks
ZERO_GRADIENT = (
    "no gradient reaches any weight: the loss is detached from them, or all that it depends on is frozen.",
    "look for .detach(), no_grad(), .item() or argmax on the way from the weights to the loss, and at requires_grad.",
)
USELESS_UPDATES = (
    "the weights change as they should, but the targets have little to do with the inputs: shuffled, of another vocabulary, or "
    "read with another data.dtype than they were written with; else a model without capacity.",
    "look at the data (kamui-dist inspect data CONFIG --step 1), and try train.overfit_one_batch=true.",
)


def first_loss(loss: float, vocab_size: int, repeats: float = 0.0) -> tuple[str, Sign] | None:
    """bad-init or leak, by the loss of fresh weights before the first update. repeats: share of targets that are the same token as
    their input, which a model with tied embeddings begins with a liking for."""
    nothing = math.log(vocab_size)
    if loss > (1 + ABOVE) * nothing:
        return "bad-init", Sign(
            f"the first loss is {loss:.3f}; weights that know nothing give ln({vocab_size}) = {nothing:.3f}."
        )
    if loss < (1 - BELOW - repeats) * nothing:
        return "leak", Sign(
            f"the first loss is {loss:.3f}, before anything was learnt; weights that know nothing give ln({vocab_size}) = "
            f"{nothing:.3f}.",
            cause="the inputs hold the targets: they are not shifted by one, or the model copies its input to its output.",
        )
    return None


def gap(record: dict[str, Any]) -> Sign | None:
    """leak, by the causality probe of a detail record."""
    found = record.get("causality_gap")
    if found is None or found <= GAP:
        return None
    return Sign(
        f"the loss of a token changes by {found:.2g} nats when inputs after it are changed.",
        cause="the model looks ahead: its attention (or another mix over positions) is not causal.",
        advice="make attention causal (is_causal=True, or a mask that is lower triangular), and see that nothing else in the "
        "model, such as a norm or a convolution, mixes positions.",
    )


def too_good(
    step: int, average: float, vocab_size: int, epoch: int, began: float | None, validated: tuple[float, float] | None
) -> Sign | None:
    """leak, by a training loss too low for text, early and before the data come again. epoch: steps until then. began: the loss
    of step 1, if known; validated: the latest validation loss, and the training loss then."""
    nothing = math.log(vocab_size)
    bound = TOO_GOOD * nothing
    if step > min(EARLY, epoch) or average > bound or (began is not None and began < PRETRAINED * nothing):
        return None
    told = f"the training loss is {average:.3f} after {step} steps on data seen once"
    broken = (
        "targets that are not shifted by one, a mask that is not causal, data that repeat themselves, or a model.factory that "
        "returns the mean of its losses, where the sum over the targets is wanted."
    )
    if average < TOO_GOOD * bound:
        return Sign(
            f"{told}; nothing that has to be learnt is learnt to a hundredth of ln({vocab_size}) so early.",
            cause=broken,
        )
    if validated is not None and validated[0] > 2 * validated[1]:
        told += f"; in the last validation it was {validated[1]:.3f}, the validation loss {validated[0]:.3f}"
        return Sign(f"{told}: what is so easy in training is not there in validation.", cause=broken)
    return Sign(
        f"{told}; below {bound:.3f}, a tenth of ln({vocab_size}), is beyond any model of prose so early.",
        cause=f"data that are very regular (tables, logs, padding); else {broken}", at_most="note",
    )  # fmt: skip


def digest(record: dict[str, Any]) -> dict[str, Any]:
    """What the rules below need of a detail record: JSON values, few."""
    layers = record.get("layers") or {}
    ratios = [layer["update_ratio"] for layer in layers.values() if layer.get("update_ratio")]
    updates = [layer["update_norm"] for layer in layers.values() if layer.get("update_norm") is not None]
    dead = [name for name, layer in layers.items() if layer.get("grad_norm") == 0 or layer.get("frozen") == 1]
    asking = [name for name, layer in layers.items() if layer.get("grad_norm") == 0 and layer.get("trains")]
    return {
        "layers": len(layers), "dead": len(dead), "names": dead[:3], "asking": asking if len(asking) < len(layers) else [],
        "ratio": statistics.median(ratios) if ratios else None, "update": max(updates, default=None),
    }  # fmt: skip


def without_gradient(detail: dict[str, Any]) -> str:
    """A sentence on the layers that no gradient reaches; "" if it reaches all, or nobody looked."""
    if not detail.get("dead"):
        return ""
    names = ", ".join(detail["names"]) + (", ..." if detail["dead"] > len(detail["names"]) else "")
    return f"no gradient in {detail['dead']} of {detail['layers']} layers ({names})"


def dead_layers(before: dict[str, Any], now: dict[str, Any]) -> Sign | None:
    """dead-layers, by the digests of two looks in a row: in the first update a layer behind weights that begin with 0 has none."""
    names = [name for name in now["asking"] if name in before.get("asking", ())]
    if not names:
        return None
    told = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return Sign(
        f"no gradient in {len(names)} of {now['layers']} layers ({told}), in two looks in a row; the others learn."
    )


@dataclass
class Learning(Rule):
    """not-learning and slow-learning, from start_steps on until the loss has come WAY below ln(vocabulary) once: then this rule
    is done. What is certain (no gradient at all, no learning rate) is told after IDLE steps, whenever it happens."""

    vocab_size: int | None
    fresh: bool
    start: int  # the step from which the loss is judged
    first: float | None = None  # loss of fresh weights
    began: float | None = None  # loss of the first update, of whatever weights
    count: int = 0
    idle: int = 0
    idle_since: int = 0
    idle_lr: bool = False
    learned: bool = False
    detail: dict[str, Any] = field(default_factory=dict)  # digest of the latest look into the layers

    def add(self, step: int, loss: float, norm: float | None, lr: float | None) -> bool:
        """A finite step. Whether there is now something to judge."""
        self.count += 1
        if step == 1:
            self.began, self.first = loss, loss if self.fresh else None
        if norm == 0 or lr == 0:
            self.idle_since = self.idle_since if self.idle else step
            self.idle, self.idle_lr = self.idle + 1, lr == 0
        elif self.idle:
            self.idle = 0
            return True
        return self.idle == IDLE or (not self.learned and step >= self.start and self.count % CHECK == 0)

    def judge(
        self, step: int, losses: Window, norm: float | None, lr: float | None, diverging: bool
    ) -> tuple[str, Sign | None]:
        """The kind, and its sign; "" and None if all is well. `losses`: healthy ones."""
        if self.idle >= IDLE:
            return "not-learning", self._nothing_moves(step)
        if self.learned or step < self.start or self.vocab_size is None or not len(losses) or diverging:
            return "", None
        nothing = math.log(self.vocab_size)
        now = losses.mean(2 * CHECK)
        if now < (1 - WAY) * nothing:
            self.learned = True
            return "", None
        first = nothing if self.first is None else self.first
        near, come = abs(now - nothing) <= NEAR * nothing, first - now
        if not near and (come >= WAY * nothing or come < -NEAR * nothing):
            return "", None  # it comes down from a bad start, or goes up: not for this rule
        told = f"after {step} steps the loss is {now:.4f}; ln({self.vocab_size}) = {nothing:.4f}"
        told += f"; it began at {self.first:.4f}" if self.first is not None else ""
        told += f"; gradient norm {norm:.2g}" if norm is not None else ""
        told += f"; lr {lr:.2e}" if lr is not None else ""
        if (ratio := self.detail.get("ratio")) is not None:
            told += f"; an update is {ratio:.1e} of a layer's weights (median of those that change)"
        if (near or come < NEAR * nothing) and not self._moves(losses, norm):
            return "not-learning", Sign(f"{told}.", 1, *self._why(norm))
        useless = ratio is not None and ratio >= USUAL and not self._moves(losses, norm)
        return "slow-learning", Sign(f"{told}.", 1, *(USELESS_UPDATES if useless else ()))

    def _moves(self, losses: Window, norm: float | None) -> bool:
        """Slowly but surely: weights change by very little, or the loss is below its beginning by more than chance."""
        ratio = self.detail.get("ratio")
        if self.detail.get("update") == 0 or _vanishes(norm):
            return False
        nothing = math.log(self.vocab_size or 1)
        below = min(nothing, nothing if self.first is None else self.first) - losses.mean(2 * CHECK)
        return (ratio is not None and ratio < TINY) or below > 4 * losses.noise() / (2 * CHECK) ** 0.5

    def _nothing_moves(self, step: int) -> Sign:
        since = self.idle_since
        if self.idle_lr:
            return Sign(
                f"the learning rate has been 0 since step {since}.", since, "optim.lr is 0, or a schedule that ends too early.",
                "set optim.lr above 0; look at schedule.warmup and schedule.min_lr.",
            )  # fmt: skip
        return Sign(f"the gradient norm has been exactly 0 since step {since}.", since, *ZERO_GRADIENT)

    def _why(self, norm: float | None) -> tuple[str, ...]:
        """Cause and advice, the surest first; none: those of the kind."""
        if dead := without_gradient(self.detail):
            return f"{dead}: they are frozen or detached.", ZERO_GRADIENT[1]
        if _vanishes(norm):
            return (
                f"gradients vanish (norm {norm:.1e}): initial weights near 0, activations that saturate, or a loss that is scaled "
                "down.", "raise model.init_std (0.02 is usual), and look at the layers' activation_rms in the detail records.",
            )  # fmt: skip
        if self.detail.get("update") == 0:
            return (
                "weights do not change although they have gradients: the optimizer does not hold them, or updates are lost in "
                "rounding.", "see what optim.build is given, and that weights are fp32.",
            )  # fmt: skip
        return USELESS_UPDATES if (self.detail.get("ratio") or 0.0) >= TINY else ()


def _vanishes(norm: float | None) -> bool:
    return norm is not None and norm < VANISHED
