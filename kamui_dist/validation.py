"""All validation sets, each with a loss of its own, and what follows from the first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from kamui_dist import distributed
from kamui_dist.config import Config
from kamui_dist.data import evaluation_batches
from kamui_dist.evaluate import Validation, evaluate
from kamui_dist.findings import Finding
from kamui_dist.metrics import Metrics
from kamui_dist.plan import Plan
from kamui_dist.rules_loss import Overfitting
from kamui_dist.samples import Sampler
from kamui_dist.signals import Pace, StopRequest
from kamui_dist.state import State
from kamui_dist.stream import TokenStream
from kamui_dist.watch import Watch

__all__ = ["Validation", "Validator", "evaluate_sets", "measured"]


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


def measured(cfg: Config, plan: Plan, sets: dict[str, TokenStream]) -> str | None:
    """Of what the first set's loss, which decides what is best, is the mean: two that are measured on other things cannot be
    compared. None: there is no validation."""
    if not sets:
        return None
    first, limit = next(iter(sets.values())), _limit(cfg, plan)
    windows = first.windows(cfg.model.context_length)
    text = f"{first.content(cfg.model.context_length)}, {windows if limit is None else min(limit, windows)} windows"
    return text + (f" by document (separator {first.separator})" if cfg.data.document_mask else "")


def _limit(cfg: Config, plan: Plan) -> int | None:
    """The most windows of a set that are read."""
    return cfg.eval.batches * plan.global_batch if cfg.eval.batches else None


class Validator:
    """A validation of the loop: every set, what is best so far, what the watch says of it.

    What it is given belongs to the loop; `watch` hears the first set. With no sets there is nothing to do, ever.
    """

    def __init__(
        self, cfg: Config, plan: Plan, sets: dict[str, TokenStream], module: nn.Module, device: torch.device, watch: Watch,
        metrics: Metrics, stop: StopRequest, pace: Pace, sampler: Sampler,
    ) -> None:  # fmt: skip
        self.cfg, self.sets, self.module, self.device, self.watch = cfg, sets, module, device, watch
        self.metrics, self.stop, self.pace, self.sampler = metrics, stop, pace, sampler
        self.limit = _limit(cfg, plan)

    def due(self, step: int, last: bool) -> bool:
        every = self.cfg.eval.every
        return bool(self.sets) and (last or bool(every and step % every == 0))

    def run(self, state: State, asked: float) -> tuple[bool, int, list[Finding]]:
        """Collective. `asked`: a stop request, agreed by all; then the validation is put off until after the resume. Returns
        whether the loss of the first set is the best so far, that request or the one that cut it short, and findings."""
        state.evaluation_due = bool(asked)
        if asked:
            return False, int(asked), []
        results, asked = evaluate_sets(
            self.module, self.sets, self.cfg, self.limit, self.device, poll=lambda: self.stop.poll(self.pace.save)
        )
        state.evaluation_due = bool(asked)
        if asked:
            return False, asked, []
        text = self.sampler.write(state.step)
        self.pace.evaluation(sum(result.seconds for result in results) + self.sampler.seconds)
        if state.best_val_loss is None and not state.evals_since_best:
            # The first one, or the first one on another set (State.from_dict): no loss of before is anything to compare with.
            self.watch.overfitting = Overfitting(self.cfg.watch)
        improved = state.judge(results[0].loss, self.cfg.eval.min_improvement)
        self.metrics.evaluations(state, results, improved)
        self.metrics.sample(state.step, self.sampler.prompt, text)
        found = self.watch.validated(state.step, results[0].loss)
        self.metrics.findings(found)
        return improved, 0, found
