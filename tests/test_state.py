"""The few numbers of a run, and what of them no longer holds when validations measure something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamui_dist.state import State

HAS = State(
    step=8, samples=64, tokens=512, best_val_loss=1.5, best_step=4, evals_since_best=2, evaluation_due=True, validated_on="a"
)  # fmt: skip


def test_a_state_comes_back_as_it_was() -> None:
    assert State.from_dict(HAS.to_dict()) == HAS
    assert State.from_dict({**HAS.to_dict(), "of_a_later_version": 1}) == HAS
    assert State.from_dict({}) == State()


@pytest.mark.parametrize(("before", "now", "stays", "knows"), [
    ("a", "a", True, "a"),
    ("a", "b", False, "b"),
    ("a", None, True, "a"),  # no validation for a while: what was best is what it was
    (None, "b", True, "b"),  # of an earlier version, which did not say
    (None, None, True, None),
])  # fmt: skip
def test_a_best_loss_on_something_else_is_forgotten(
    before: str | None, now: str | None, stays: bool, knows: str | None
) -> None:
    state = State.from_dict(replace(HAS, validated_on=before).to_dict(), now)
    best = HAS if stays else State()
    assert state == replace(
        HAS, best_val_loss=best.best_val_loss, best_step=best.best_step, evals_since_best=best.evals_since_best, validated_on=knows
    )  # fmt: skip
    assert state.out_of_patience(2) == stays


def test_an_early_stop_by_another_set_is_none() -> None:
    early = replace(HAS, evaluation_due=False)
    assert early.is_over(10, 2, validates=True)
    assert not State.from_dict(early.to_dict(), "b").is_over(10, 2, validates=True)
    assert State.from_dict(early.to_dict(), "b").is_over(8, 2, validates=True), "its steps are done all the same"
    # The first loss on the new set is the best so far, however large.
    state = State.from_dict(early.to_dict(), "b")
    assert state.judge(9.0, 0.1)
    assert (state.best_val_loss, state.best_step, state.evals_since_best) == (9.0, 8, 0)
