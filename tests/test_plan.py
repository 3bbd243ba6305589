"""Derived numbers: mesh, accumulation, duration, warmup and decay; and each contradiction told in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.plan import Plan, make_plan
from kamui_dist.state import State

NEW = (0, 0, 0)  # a run that has done nothing yet


def config(**overrides: Any) -> Config:
    """16 tokens a sequence, 10 steps; section__key=value."""
    values: dict[str, dict[str, Any]] = {"model": {"context_length": 16}, "train": {"steps": 10, "micro_batch": 2}}
    for key, value in overrides.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    if {"tokens", "epochs"} & values["train"].keys():
        del values["train"]["steps"]
    return Config.model_validate(values)


def plan(world_size: int = 1, windows: int | None = None, **overrides: Any) -> Plan:
    return make_plan(config(**overrides), world_size, windows, NEW)


def faults(world_size: int = 1, windows: int | None = None, **overrides: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        plan(world_size, windows, **overrides)
    return str(error.value).splitlines()


# ---- mesh


@pytest.mark.parametrize(
    ("world", "replicate", "shard", "mesh", "name"),
    [
        (1, None, None, (1, 1), "single"), (1, 1, 1, (1, 1), "single"), (1, -1, 1, (1, 1), "single"),
        (1, None, -1, (1, 1), "single"), (8, None, None, (8, 1), "DDP 8"), (8, 8, 1, (8, 1), "DDP 8"),
        (8, 8, None, (8, 1), "DDP 8"), (8, None, 8, (1, 8), "FSDP 8"), (8, 1, -1, (1, 8), "FSDP 8"),
        (8, None, -1, (1, 8), "FSDP 8"), (16, 2, 8, (2, 8), "HSDP 2 x 8"), (16, -1, 8, (2, 8), "HSDP 2 x 8"),
        (16, None, 8, (2, 8), "HSDP 2 x 8"), (16, 2, -1, (2, 8), "HSDP 2 x 8"), (3, None, 3, (1, 3), "FSDP 3"),
        (6, None, 2, (3, 2), "HSDP 3 x 2"),
    ],
)  # fmt: skip
def test_mesh(world: int, replicate: int | None, shard: int | None, mesh: tuple[int, int], name: str) -> None:
    given = {"parallel__replicate": replicate, "parallel__shard": shard}
    found = plan(world, **{k: v for k, v in given.items() if v is not None})
    assert (found.replicate, found.shard) == mesh
    assert found.strategy == name
    assert found.global_batch == 2 * world


@pytest.mark.parametrize(
    ("world", "replicate", "shard", "numbers"),
    [
        (3, 2, 2, ("(2)", "(2)", "(3)", "start 4 processes")), (8, -1, 3, ("(-1)", "(3)", "(8)")),
        (8, 3, -1, ("(3)", "(-1)", "(8)")), (8, 1, 1, ("(1)", "(8)")), (2, -1, 4, ("(4)", "(2)")),
        (1, 2, 1, ("(2)", "(1)")),
    ],
)  # fmt: skip
def test_a_world_that_does_not_factor(world: int, replicate: int, shard: int, numbers: tuple[str, ...]) -> None:
    # The batch does not fit either, but what it would have to be is not known without a mesh: one line.
    [line] = faults(world, parallel__replicate=replicate, parallel__shard=shard, train__global_batch=7)
    assert line.startswith("parallel.replicate (")
    assert "parallel.shard" in line
    assert all(number in line for number in numbers), line


def test_a_mesh_of_nothing() -> None:
    assert faults(4, parallel__shard=0) == ["parallel.shard = 0 must be 1 or more, or -1 for the rest of the ranks"]
    assert faults(4, parallel__replicate=-2)[0].startswith("parallel.replicate = -2 must be")
    [line] = faults(4, parallel__replicate=-1, parallel__shard=-1)
    assert "both -1" in line


# ---- batch


def test_accumulation_is_derived_from_the_world_and_not_from_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A24: two nodes of two processes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = plan(4, train__global_batch=16)
    assert (found.grad_accum_steps, found.tokens_per_step) == (2, 256)
    for parallel in ({"parallel__shard": 4}, {"parallel__shard": 2}, {"parallel__replicate": 2, "parallel__shard": -1}):
        assert plan(4, train__global_batch=16, **parallel).grad_accum_steps == 2


def test_a_global_batch_smaller_than_one_pass_is_refused() -> None:
    """A25: never zero micro-batches."""
    assert faults(4, train__global_batch=4) == [
        "train.global_batch (4) must be a multiple of train.micro_batch x data-parallel ranks (2 x 4 = 8); set "
        "train.global_batch to 8"
    ]


def test_a_global_batch_that_does_not_divide() -> None:
    """The message of DESIGN, section 5."""
    assert faults(4, train__global_batch=100, train__micro_batch=8) == [
        "train.global_batch (100) must be a multiple of train.micro_batch x data-parallel ranks (8 x 4 = 32); set "
        "train.global_batch to 96 or 128"
    ]
    for suggested in (96, 128):
        assert plan(4, train__global_batch=suggested, train__micro_batch=8).grad_accum_steps == suggested // 32


def test_accumulation_given_or_neither() -> None:
    assert plan(4, train__grad_accum_steps=3).global_batch == 24
    found = plan(4)
    assert (found.grad_accum_steps, found.global_batch) == (1, 8)
    [line] = faults(4, train__grad_accum_steps=3, train__global_batch=24)
    assert "(24)" in line
    assert "(3)" in line


# ---- duration


def test_steps_tokens_and_epochs_agree() -> None:
    by_steps = plan(2, 100, train__global_batch=8)  # 8 x 16 = 128 tokens a step
    assert (by_steps.steps, by_steps.tokens, by_steps.epochs) == (10, 1280, 0.8)
    assert plan(2, 100, train__global_batch=8, train__tokens=1280) == by_steps
    assert plan(2, 100, train__global_batch=8, train__tokens=1281).steps == 11  # at least as many
    assert plan(2, 100, train__global_batch=8, train__tokens=1).steps == 1
    assert plan(2, 100, train__global_batch=8, train__tokens=2e12).steps == 15_625_000_000
    assert plan(2, None, train__global_batch=8).epochs is None


def test_epochs_are_exactly_so_many_windows() -> None:
    found = plan(1, 4, train__micro_batch=1, train__epochs=2)  # G09: 2 epochs of 4 steps
    assert (found.steps, found.total_samples) == (8, 8)
    found = plan(1, 10, train__global_batch=4, train__epochs=3)  # 30 windows in batches of 4: the last has 2
    assert (found.steps, found.total_samples) == (8, 30)
    state = State()
    for _ in range(found.steps):
        state.advance(found)
    assert (state.step, state.samples, state.tokens) == (8, 30, 30 * 16)
    assert plan(1, 10, train__global_batch=4, train__epochs=0.5).total_samples == 5
    assert plan(1, 10, train__global_batch=4, train__epochs=0.01).steps == 1
    assert plan(1, 2, train__global_batch=8, train__epochs=1).steps == 1  # data smaller than one batch


def test_the_duration_is_given_once() -> None:
    assert faults(train__steps=None) == ["give exactly one of train.steps, train.tokens, train.epochs (given: none)"]
    with pytest.raises(UserError, match=r"given: train.steps = 10, train.tokens = 5"):
        make_plan(Config.model_validate({"train": {"steps": 10, "tokens": 5}}), 1)
    assert "train.tokens = 1.5 must be a whole number" in faults(train__tokens=1.5)


def test_what_is_left_is_never_less_than_nothing() -> None:
    """A duration that was lowered below what is done: the run is at its end, and not beyond it."""
    done = (25, 25 * 8, 25 * 128)  # steps, windows and tokens; 8 windows of 16 tokens a step

    def steps(**duration: Any) -> int:
        return make_plan(config(train__global_batch=8, **duration), 2, 100, done).steps

    assert [steps(train__tokens=n) for n in (1, 128, 25 * 128, 25 * 128 + 1)] == [25, 25, 25, 26]
    assert [steps(train__epochs=n) for n in (0.01, 1, 2, 2.01)] == [25, 25, 25, 26]
    assert steps(train__steps=3) == 3, "the config's own number"
    assert make_plan(config(train__epochs=0.01), 1, 100, NEW).steps == 1


# ---- warmup and decay


def test_lengths_in_steps_or_as_a_fraction() -> None:
    def lengths(steps: int, warmup: float, decay: float, kind: str = "wsd") -> tuple[int, int]:
        found = plan(train__steps=steps, schedule__kind=kind, schedule__warmup=warmup, schedule__decay=decay)
        return found.warmup_steps, found.decay_steps

    assert lengths(100, 0.1, 0.2) == (10, 20)
    assert lengths(100, 10, 20) == (10, 20)
    assert lengths(100, 10, 0.2) == (10, 20)
    assert lengths(100, 1, 1) == (1, 1), "1 is a step, not the whole run"
    assert lengths(100, 0, 0) == (0, 0)
    assert lengths(100, 60, 40) == (60, 40)
    assert lengths(100, 0.1, 20, kind="cosine") == (10, 0), "only wsd has a decay"
    assert lengths(3, 0.5, 0.5) == (2, 1), "fractions that fit are never refused for being rounded"
    assert lengths(1, 0.1, 0.2) == (0, 0)


@given(st.integers(1, 1000), st.floats(0, 0.999), st.floats(0, 0.999))
def test_fractions_that_fit_are_accepted(steps: int, warmup: float, decay: float) -> None:
    if warmup + decay <= 1:
        found = plan(train__steps=steps, schedule__kind="wsd", schedule__warmup=warmup, schedule__decay=decay)
        assert 0 <= found.warmup_steps <= found.warmup_steps + found.decay_steps <= steps
        assert abs(found.warmup_steps - warmup * steps) <= 0.5
        assert abs(found.decay_steps - decay * steps) <= 1


def test_lengths_that_do_not_fit() -> None:
    assert plan(train__steps=5, schedule__warmup=5).warmup_steps == 5  # D03
    [line] = faults(train__steps=5, schedule__warmup=6)
    assert line == "schedule.warmup (6 steps) is longer than the run (5 steps); shorten it"
    [line] = faults(train__steps=10, schedule__warmup=6, schedule__decay=5, schedule__kind="wsd")
    assert line == "schedule.warmup (6 steps) + schedule.decay (5) is longer than the run (10 steps); shorten it"
    assert "longer" in faults(schedule__warmup=0.9, schedule__decay=0.9, schedule__kind="wsd")[0]
    assert faults(schedule__warmup=1.5) == [
        "schedule.warmup = 1.5 must be a whole number of steps, or a fraction below 1"
    ]
    assert "schedule.decay = 2.5" in faults(schedule__decay=2.5, schedule__kind="wsd")[0]
    # With epochs and data not yet known there is no length to compare with.
    assert plan(train__epochs=1, schedule__warmup=100).warmup_steps == 100
    assert "(100 steps)" in faults(1, 10, train__epochs=1, schedule__warmup=100)[0]


def test_a_schedule_is_judged_where_it_is_known_how_much_is_done() -> None:
    """More nodes, hence a larger batch: as a new run it would be too short for its warmup, as the run that it is it is not."""
    larger = config(train__tokens=1600, train__micro_batch=10, schedule__warmup=15)  # 160 tokens a step
    with pytest.raises(UserError, match=r"warmup \(15 steps\) is longer than the run \(10 steps\)"):
        make_plan(larger, 1, done=NEW)
    assert make_plan(larger, 1).warmup_steps == 15, "nobody knows yet"
    found = make_plan(larger, 1, done=(20, 40, 640))
    assert (found.steps, found.warmup_steps) == (20 + 6, 15)
    with pytest.raises(UserError, match=r"warmup \(15 steps\) is longer than the run \(14 steps\)"):
        make_plan(larger, 1, done=(10, 60, 960))
    # What does not depend on the number of steps is told all the same.
    with pytest.raises(UserError, match=r"schedule.warmup = 1.5 must be a whole number"):
        make_plan(config(schedule__warmup=1.5), 1)


# ---- other contradictions


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"model__d_model": 100, "model__n_heads": 6}, ("model.d_model (100)", "model.n_heads (6)")),
        ({"model__n_heads": 6, "model__n_kv_heads": 4}, ("model.n_heads (6)", "model.n_kv_heads (4)")),
        ({"model__d_model": 18, "model__n_heads": 6, "model__position": "rope"}, ("model.position", "3")),
        ({"optim__lr": 1e-4, "schedule__min_lr": 1e-3}, ("schedule.min_lr (0.001)", "optim.lr (0.0001)")),
        (
            {"schedule__kind": "wsd", "schedule__decay_shape": "exponential"},
            ("schedule.decay_shape", "schedule.min_lr"),
        ),
        ({"eval__patience": 3}, ("eval.patience = 3", "data.val_path")),
        ({"eval__sample_tokens": 3}, ("eval.sample_tokens = 3", "data.val_path")),
        ({"log__profile_steps": [0, 2]}, ("log.profile_steps = [0, 2]", "count from 1")),
        ({"log__profile_steps": [5, 3]}, ("log.profile_steps = [5, 3]", "write [3, 5]")),
        ({"log__profile_steps": [1, 51]}, ("log.profile_steps = [1, 51]", "51 steps", "50 at most")),
        ({"log__profile_steps": [11], "train__steps": 10}, ("log.profile_steps = [11]", "train.steps = 10")),
        ({"log__profile_steps": [9, 11], "train__steps": 10}, ("log.profile_steps = [9, 11]", "train.steps = 10")),
    ],
)
def test_contradictions(overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    [line] = faults(**overrides)
    assert all(part in line for part in parts), line


def test_all_contradictions_at_once_and_what_is_none() -> None:
    found = faults(
        4,
        train__global_batch=4,
        train__steps=3,
        schedule__warmup=5,
        model__n_heads=5,
        optim__lr=0.0,
        schedule__min_lr=1.0,
    )
    assert len(found) == 4
    assert (
        plan(log__profile_steps=[3], train__steps=10).steps == plan(log__profile_steps=[1, 10], train__steps=10).steps
    )
    assert plan(model__factory="a:b", model__n_heads=5).strategy == "single", "a factory reads [model] as it likes"
    assert plan(optim__lr=1e-4, schedule__min_lr=1e-3, schedule__kind="constant").steps == 10
