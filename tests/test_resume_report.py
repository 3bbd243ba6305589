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
])  # fmt: skip
def test_one_change(change: dict[str, Any], kind: str, told: str) -> None:
    [found] = compare(setup(), setup(**change))
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
