"""What has changed since a checkpoint, and what that means."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import config, resume_report
from kamui_dist.config import Config
from kamui_dist.errors import EXIT_STOPPED, UserError
from kamui_dist.resume_report import HARMLESS, REFUSED, ROUNDING, TRAJECTORY, compare, lines, refusals
from tests import tiny


def setup(**overrides: Any) -> dict[str, Any]:
    """As start.facts makes it, after a way through a checkpoint's JSON."""
    top = {k: overrides.pop(k) for k in list(overrides) if "__" not in k}
    made: dict[str, Any] = {
        "config": Config().model_dump(), "world_size": 8, "strategy": "DDP 8", "global_batch": 64, "steps": 100,
        "data_fingerprint": "0123456789abcdef" * 4, "data": {"anything": 1},
        "versions": {"git": "a" * 40, "torch": "2.13.0", "python": "3.11.7", "device": "H200"}, **top,
    }  # fmt: skip
    for key, value in overrides.items():
        section, name = key.split("__")
        made["config"][section][name] = value
    return json.loads(json.dumps(made))


def test_every_key_of_the_config_has_one_class() -> None:
    """A new key fails here until somebody has said what it means for a run that is resumed with another value."""
    assert sorted(resume_report.CLASSES) == sorted(config.KEYS)
    assert set(resume_report.CLASSES.values()) == {HARMLESS, ROUNDING, TRAJECTORY, REFUSED}


def test_nothing_has_changed() -> None:
    assert compare(setup(), setup()) == []
    assert lines([]) == ["nothing has changed since: it goes on bit by bit"]
    assert refusals([]) == []


@pytest.mark.parametrize(("change", "kind", "told"), [
    ({"log__every": 20}, HARMLESS, "log.every 10 -> 20"),
    ({"optim__lr": 1e-3}, TRAJECTORY, "optim.lr 0.0003 -> 0.001"),
    ({"train__micro_batch": 4}, ROUNDING, "train.micro_batch 8 -> 4"),
    ({"model__d_model": 512}, REFUSED, "model.d_model 384 -> 512"),
    ({"world_size": 4}, ROUNDING, "world size 8 -> 4"),
    ({"strategy": "FSDP 8"}, ROUNDING, "strategy DDP 8 -> FSDP 8"),
    ({"global_batch": 32}, TRAJECTORY, "sequences a step 64 -> 32"),
    ({"data_fingerprint": "f" * 64}, TRAJECTORY, "data fingerprint 0123456789ab -> ffffffffffff"),
    ({"versions": {"git": "b" * 40 + "-dirty"}}, TRAJECTORY, "version of git aaaaaaaaaaaa -> bbbbbbbbbbbb-dirty"),
    ({"versions": {"torch": "2.14.0"}}, ROUNDING, "version of torch 2.13.0 -> 2.14.0"),
    ({"versions": {"python": "3.12.1"}}, HARMLESS, "version of python 3.11.7 -> 3.12.1"),
    ({"versions": {"device": "B200"}}, ROUNDING, "version of device H200 -> B200"),
    ({"model__factory_args": {"a": 1}}, TRAJECTORY, "model.factory_args {} -> {'a': 1}"),
    ({"data__path": "/elsewhere"}, HARMLESS, "data.path None -> /elsewhere"),
    ({"model__new": 1}, REFUSED, "model.new 0 -> 1"),
    ({"train__new": 1}, TRAJECTORY, "train.new 0 -> 1"),
])  # fmt: skip
def test_one_change(change: dict[str, Any], kind: str, told: str) -> None:
    unknown = {"model__new": 0, "train__new": 0}  # keys that the table does not have
    [found] = compare(setup(**unknown), setup(**{**unknown, **change}))
    assert (found.kind, f"{found.what} {found.before} -> {found.now}") == (kind, told)
    assert lines([found]) == [f"changed since, {resume_report.MEANING[kind]}: {told}"]
    assert bool(refusals([found])) == (kind != HARMLESS)


def test_the_batch_is_what_counts_and_not_how_it_was_written() -> None:
    same = compare(setup(train__global_batch=64), setup(train__grad_accum_steps=1))
    assert {c.kind for c in same} == {HARMLESS}
    assert {c.what for c in same} == {"train.global_batch", "train.grad_accum_steps"}


def test_a_longer_run_changes_what_depends_on_its_length() -> None:
    longer = compare(setup(train__steps=100), setup(train__steps=200, steps=200))
    assert [(c.kind, c.what) for c in longer] == [(TRAJECTORY, "steps of the run"), (HARMLESS, "train.steps")]
    constant: dict[str, Any] = {"schedule__kind": "constant", "schedule__warmup": 10}
    longer = compare(setup(train__steps=100, **constant), setup(train__steps=200, steps=200, **constant))
    assert [(c.kind, c.what) for c in longer] == [(HARMLESS, "train.steps")]
    for more in (
        {"schedule__warmup": 0.1},
        {"watch__on_plateau": "stop"},
    ):  # a fraction of the run; a fifth of it is a window
        longer = compare(setup(**constant | more), setup(steps=200, **constant | more))
        assert [(c.kind, c.what) for c in longer] == [(TRAJECTORY, "steps of the run")]


# Each: what both have, what changes, and the class.
WHERE: list[tuple[dict[str, Any], dict[str, tuple[Any, Any]], str]] = [
    # What the watch looks at, and how often: only where it does more than tell. It always stops for what is never finite.
    *(({"watch__on_spike": action}, {key: (a, b)}, kind)
      for action, kind in (("off", HARMLESS), ("warn", HARMLESS), ("skip", TRAJECTORY), ("rollback", TRAJECTORY),
                           ("stop", TRAJECTORY))
      for key, a, b in (("watch__spike_factor", 3.0, 4.0), ("watch__window", 128, 64), ("watch__plateau_nats", 0.1, 0.2),
                        ("log__detail_every", 100, 10))),
    ({"watch__on_dead_layers": "stop"}, {"log__detail_every": (100, 0)}, TRAJECTORY),
    *(({}, {"watch__on_spike": pair}, kind)
      for pair, kind in ((("off", "warn"), HARMLESS), (("warn", "note"), HARMLESS), (("warn", "skip"), TRAJECTORY),
                         (("rollback", "stop"), TRAJECTORY), (("stop", "off"), TRAJECTORY))),
    ({}, {"watch__on_spike": ("warn", "stop"), "watch__spike_z": (6.0, 7.0)}, TRAJECTORY),  # in one of the two is enough
    ({}, {"watch__on_spike": ("stop", "warn"), "watch__spike_z": (6.0, 7.0)}, TRAJECTORY),
    ({}, {"watch__max_skipped": (20, 10)}, TRAJECTORY),
    ({"watch__on_non_finite": "warn"}, {"watch__max_skipped": (20, 10)}, HARMLESS),
    *(({"watch__on_non_finite": action}, {key: (a, b)}, kind)
      for action, kind in (("stop", HARMLESS), ("rollback", TRAJECTORY))
      for key, a, b in (("watch__rollback_steps", 100, 50), ("watch__rollback_lr_factor", 1.0, 0.5), ("watch__max_rollbacks", 3, 4),
                        ("watch__rollback_warmup", 0, 5), ("checkpoint__every", 500, 100), ("checkpoint__keep", 3, 2),
                        ("checkpoint__keep_every", 0, 9), ("checkpoint__best", True, False))),
    # What is validated, and when: only where that ends the run, or turns it back.
    *((given, {key: (a, b)}, kind)
      for given, kind in (({}, HARMLESS), ({"eval__patience": 3}, TRAJECTORY), ({"watch__on_overfitting": "stop"}, TRAJECTORY),
                          ({"watch__on_spike": "rollback"}, TRAJECTORY), ({"watch__on_spike": "stop"}, HARMLESS),
                          ({"watch__on_spike": "rollback", "checkpoint__best": False}, HARMLESS))
      for key, a, b in (("eval__every", 250, 100), ("eval__batches", 20, 10), ("data__val_path", "/a", "/b"),
                        ("eval__min_improvement", 0.0, 0.1), ("eval__sets", [], [{"name": "a", "path": "/a"}]))),
    ({}, {"eval__patience": (0, 3)}, TRAJECTORY),
    # What only FSDP reads.
    *(({"strategy": strategy, "world_size": 8}, {key: (a, b)}, kind)
      for strategy, kinds in (("DDP 8", (HARMLESS,) * 3), ("FSDP 8", (ROUNDING, ROUNDING, TRAJECTORY)),
                              ("HSDP 2 x 4", (ROUNDING, ROUNDING, TRAJECTORY)))
      for (key, a, b), kind in zip((("parallel__defer_sync", True, False), ("parallel__reshard_after_forward", True, False),
                                    ("parallel__reduce_dtype", "fp32", "bf16")), kinds, strict=True)),
    # Optimizers and schedules have keys of their own.
    ({"optim__name": "adamw"}, {"optim__beta2": (0.95, 0.9)}, TRAJECTORY),
    ({"optim__name": "sgd"}, {"optim__beta2": (0.95, 0.9), "optim__beta1": (0.9, 0.8), "optim__eps": (1e-8, 1e-6)}, HARMLESS),
    ({"optim__name": "adamw"}, {"optim__momentum": (0.0, 0.9)}, HARMLESS),
    ({"optim__name": "sgd"}, {"optim__momentum": (0.0, 0.9)}, TRAJECTORY),
    ({"optim__weight_decay": 0.0}, {"optim__decay_embeddings": (True, False)}, HARMLESS),
    ({"optim__weight_decay": 0.1}, {"optim__decay_embeddings": (True, False)}, TRAJECTORY),
    ({"schedule__kind": "cosine"}, {"schedule__decay": (0.1, 0.2), "schedule__decay_shape": ("sqrt", "linear")}, HARMLESS),
    ({"schedule__kind": "wsd"}, {"schedule__decay": (0.1, 0.2)}, TRAJECTORY),
    ({"schedule__kind": "constant"}, {"schedule__min_lr": (0.0, 1e-5)}, HARMLESS),
    ({"schedule__kind": "cosine"}, {"schedule__min_lr": (0.0, 1e-5)}, TRAJECTORY),
    # The same in other words.
    ({"world_size": 2, "strategy": "DDP 2"}, {"parallel__replicate": (-1, 2)}, HARMLESS),
    ({"world_size": 2, "strategy": "FSDP 2"}, {"parallel__replicate": (-1, 1), "parallel__shard": (2, -1)}, HARMLESS),
    ({}, {"run__device": ("auto", "cpu")}, HARMLESS),
    ({"run__precision": "bf16", "strategy": "FSDP 8"}, {"parallel__param_dtype": (None, "bf16")}, HARMLESS),
    ({"run__precision": "bf16", "strategy": "FSDP 8"}, {"parallel__param_dtype": (None, "fp32")}, TRAJECTORY),
    ({"schedule__kind": "wsd"}, {"schedule__warmup": (0.1, 10), "schedule__decay": (20, 0.2)}, HARMLESS),  # of 100 steps
    ({"schedule__kind": "wsd"}, {"schedule__warmup": (0.1, 11)}, TRAJECTORY),
    ({"schedule__kind": "wsd", "schedule__warmup": 0.5, "steps": 3}, {"schedule__decay": (0.5, 1)}, HARMLESS),
    ({"model__n_heads": 6}, {"model__n_kv_heads": (None, 6)}, HARMLESS),
    ({"model__n_heads": 6}, {"model__n_kv_heads": (None, 3)}, REFUSED),
    ({"model__d_model": 384}, {"model__d_ff": (None, 1536)}, HARMLESS),
    ({"model__d_model": 384, "model__mlp": "swiglu"}, {"model__d_ff": (None, 1024)}, HARMLESS),
    ({"model__d_model": 384}, {"model__d_ff": (None, 1024)}, REFUSED),
    ({"model__vocab_size": 50304}, {"model__vocab_multiple": (64, 1)}, HARMLESS),
    ({"model__vocab_size": 50257}, {"model__vocab_multiple": (64, 1)}, REFUSED),
    ({"model__position": "learned"}, {"model__rope_theta": (1e4, 1e5)}, HARMLESS),
    ({"model__position": "rope"}, {"model__rope_theta": (1e4, 1e5)}, REFUSED),
    ({"model__factory": "a:b"}, {"model__rope_theta": (1e4, 1e5)}, REFUSED),  # who knows what it does with it
    ({"model__factory": "a:b"}, {"model__d_ff": (None, 1536)}, REFUSED),
    ({}, {"data__dtype": (None, "uint16")}, HARMLESS),  # the fingerprint knows the type
    ({}, {"data__sources": ([{"path": "/a"}], [{"path": "/b"}])}, HARMLESS),  # and what is at the path
    ({"data__document_mask": True},
     {"data__sources": ([{"path": "/a", "separator": 0}], [{"path": "/a", "separator": 1}])}, TRAJECTORY),
    ({}, {"data__separator": (None, 0)}, HARMLESS),
    ({"data__document_mask": True}, {"data__separator": (None, 0)}, TRAJECTORY),
    ({}, {"model__flex_attention": (True, False)}, HARMLESS),
    ({"data__document_mask": True}, {"model__flex_attention": (True, False)}, ROUNDING),
    # With dropout other masks are drawn.
    *(({"model__dropout": dropout}, change, kind)
      for dropout, kind in ((0.0, ROUNDING), (0.1, TRAJECTORY))
      for change in ({"world_size": (8, 4)}, {"train__micro_batch": (8, 4)}, {"model__compile": (False, True)},
                     {"versions": ({"device": "H200"}, {"device": "B200"})})),
    ({"model__dropout": 0.1}, {"strategy": ("DDP 8", "FSDP 8")}, ROUNDING),
]  # fmt: skip


@pytest.mark.parametrize(("both", "change", "kind"), WHERE)
def test_what_a_change_means_depends_on_the_rest(
    both: dict[str, Any], change: dict[str, tuple[Any, Any]], kind: str
) -> None:
    old, new = ({key: pair[side] for key, pair in change.items()} for side in (0, 1))
    for before, now in ((old, new), (new, old)):
        found = compare(setup(**both, **before), setup(**both, **now))
        assert len(found) == len(change)
        assert {c.kind for c in found} == {kind}, [str(c) for c in found]


def test_another_validation_set_is_told_by_what_it_is_and_not_by_where_it_lies() -> None:
    measured = "0123456789abcdef" * 4 + ", 64 windows"
    moved = {"data__val_path": "/elsewhere"}
    for patience, kind in ((0, HARMLESS), (3, TRAJECTORY)):
        [told] = compare(
            setup(validation=measured, eval__patience=patience), setup(validation=measured, eval__patience=patience, **moved)
        )  # fmt: skip
        assert str(told) == "harmless: data.val_path None -> /elsewhere"
        smaller = setup(validation=measured.replace("64", "32"), eval__patience=patience, eval__batches=2)
        told, batches = sorted(
            compare(setup(validation=measured, eval__patience=patience), smaller), key=lambda c: c.what, reverse=True
        )
        assert (told.kind, batches.kind, batches.what) == (kind, HARMLESS, "eval.batches")
        assert told.what == "first validation set (a best loss on the old one is forgotten)"
        assert (told.before, told.now) == ("0123456789ab, 64 windows", "0123456789ab, 32 windows")
    # A checkpoint that does not say.
    assert [
        c.kind for c in compare(setup(eval__patience=3), setup(validation=measured, eval__patience=3, **moved))
    ] == [TRAJECTORY]


def test_the_gravest_comes_first_and_old_checkpoints_are_read() -> None:
    changes = compare(setup(), setup(log__every=20, optim__lr=1.0, model__bias=False, world_size=1))
    assert [c.kind for c in changes] == [REFUSED, TRAJECTORY, ROUNDING, HARMLESS]
    old = copy.deepcopy(setup())
    for key in ("versions", "global_batch", "steps", "data"):
        del old[key]
    del old["config"]["run"]["seed"]  # a key that there was not
    old["config"]["run"]["gone"] = 1
    assert compare(old, setup(train__global_batch=32)) == compare(
        {"config": {"train": {"global_batch": None}}}, setup(train__global_batch=32)
    )


# ---- the real trainer


@pytest.mark.slow
def test_a_resume_tells_and_strict_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tiny.write_data(tmp_path / "data"), tmp_path / "run"
    code, _ = tiny.run_and_trace(tiny.config(run, data), tiny.signalling(2, signal.SIGTERM))
    assert code == EXIT_STOPPED
    capsys.readouterr()
    with pytest.raises(UserError) as caught:
        tiny.run(tiny.config(run, data, run__resume_strict=True, optim__lr=0.05, train__micro_batch=8, log__every=5))
    assert str(caught.value).splitlines() == [
        "--resume-strict: changes the trajectory: optim.lr 0.1 -> 0.05; set it back, or leave --resume-strict out",
        "--resume-strict: changes the trajectory by rounding: train.micro_batch 4 -> 8; set it back, or leave --resume-strict out",
    ]
    assert tiny.status(run)["step"] == 2
    changed = tiny.config(run, data, optim__lr=0.05, log__every=5, run__resume_strict=False)
    code, _ = tiny.run_and_trace(changed, tiny.signalling(1, signal.SIGTERM))
    told = capsys.readouterr().out
    assert "changed since, changes the trajectory: optim.lr 0.1 -> 0.05" in told
    assert "changed since, harmless: log.every 10 -> 5" in told
    [record] = tiny.records(run, "resume")
    assert record["changed"] == ["changes the trajectory: optim.lr 0.1 -> 0.05", "harmless: log.every 10 -> 5"]
    assert record["restarts"] == 0
    assert tiny.run(tiny.config(run, data, optim__lr=0.05, log__every=5, run__resume_strict=True)) == 0
    assert "harmless: run.resume_strict False -> True" in capsys.readouterr().out
