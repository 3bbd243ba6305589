"""The few numbers that resume a run. With the tensors of a checkpoint they are the whole state: batches, learning rate and
random numbers are functions of (seed, step), so there is no loader, scheduler or generator to save. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kamui_dist.plan import Plan


@dataclass
class State:
    step: int = 0  # optimizer updates offered
    samples: int = 0  # windows trained on: the place in the data order, but for what rollbacks left out
    tokens: int = 0
    best_val_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_due: bool = False  # the run was stopped when a validation was due: it comes first after the resume
    validated_on: str | None = None  # what the losses so far were measured on (validation.measured)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # all of the run so far (rollback.py)

    def advance(self, plan: Plan) -> None:
        """One more step. In a run of whole epochs the padding of the last batch does not count."""
        end = self.samples + plan.global_batch
        end = end if plan.total_samples is None else min(end, plan.total_samples)
        self.step += 1
        self.tokens += (end - self.samples) * (plan.tokens_per_step // plan.global_batch)
        self.samples = end

    def position(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def judge(self, val_loss: float, min_improvement: float) -> bool:
        """Takes note of a validation loss; true if it is the best so far. NaN is never better."""
        if self.best_val_loss is None:
            improved = val_loss == val_loss
        else:
            improved = val_loss < self.best_val_loss - min_improvement
        if improved:
            self.best_val_loss, self.best_step, self.evals_since_best = val_loss, self.step, 0
        else:
            self.evals_since_best += 1
        return improved

    def out_of_patience(self, patience: int) -> bool:
        return patience > 0 and self.evals_since_best >= patience

    @property
    def impatience(self) -> str:
        """The reason of an early stop."""
        return f"{self.evals_since_best} validation{'s' * (self.evals_since_best != 1)} without improvement"

    def is_over(self, steps: int, patience: int, validates: bool) -> bool:
        """Whether nothing is left to do; a validation that was put off is something."""
        return self.out_of_patience(patience) or (self.step >= steps and not (self.evaluation_due and validates))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], measured: str | None = None) -> State:
        """measured: what validations are measured on from now on; None: there are none, or nobody knows. A best loss that was
        measured on something else cannot be compared with theirs: it is forgotten, and patience begins anew."""
        state = cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
        if measured is not None:
            if state.validated_on not in (None, measured):
                state.best_val_loss, state.best_step, state.evals_since_best = None, None, 0
            state.validated_on = measured
        return state
