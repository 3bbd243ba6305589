"""What a validation is measured on, and what a run does that goes on with another one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kamui_dist import train
from kamui_dist.config import Config
from kamui_dist.errors import EXIT_FINISHED, EXIT_STOPPED, UserError
from kamui_dist.plan import make_plan
from kamui_dist.shards import TokenDataset
from kamui_dist.stream import CHECKED
from kamui_dist.validation import Validator, measured
from tests import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data"), windows=64)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("other"), windows=40, seed=5)


def of(stream: TokenDataset) -> str:
    return stream.fingerprint[:20] + stream.sample(tiny.T, CHECKED).digest[:20]


def test_what_is_measured(tmp_path: Path, data: Path, other: Path) -> None:
    a, b = TokenDataset(data), TokenDataset(other)

    def told(*sets: TokenDataset, **overrides: Any) -> str | None:
        cfg = tiny.config(tmp_path, data, **overrides)
        return measured(cfg, make_plan(cfg, 1), {str(i): s for i, s in enumerate(sets)})

    assert told() is None
    assert told(a, eval__batches=2) == f"{of(a)}, 32 windows"
    assert told(a, b, eval__batches=2) == told(a, eval__batches=2), "the first set decides what is best"
    assert told(b, eval__batches=2) == f"{of(b)}, 32 windows"
    assert told(a, eval__batches=0) == told(a, eval__batches=4) == told(a, eval__batches=100) == f"{of(a)}, 64 windows"
    assert told(a, eval__batches=2, train__global_batch=8) == f"{of(a)}, 16 windows"
    # Other tokens under the same header.
    changed = Path(shutil.copytree(data, tmp_path / "changed"))
    ids = np.fromfile(changed / "00000.bin", dtype="<u2")
    ids[::-1].tofile(changed / "00000.bin")
    c = TokenDataset(changed)
    assert c.fingerprint == a.fingerprint
    assert told(c, eval__batches=2) != told(a, eval__batches=2)
    # Another loss of the same windows.
    assert told(a, eval__batches=0, data__document_mask=True) == f"{of(a)}, 64 windows by document (separator None)"


def early(run: Path, data: Path, val: Path, **overrides: Any) -> Config:
    """Each validation after the first is none that is better: the run stops after its third, at step 3."""
    return tiny.config(
        run, data, data__val_path=str(val), **{
            "train__steps": 8, "eval__every": 1, "eval__patience": 2, "eval__min_improvement": 100.0, "eval__batches": 2,
            "checkpoint__every": 1, "log__detail_every": 0, **overrides,
        }
    )  # fmt: skip


def best(run: Path) -> dict[str, Any] | None:
    path = run / "checkpoints" / "best.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("change", ["path", "batches", "global_batch"])
def test_another_set_has_a_best_loss_of_its_own(
    tmp_path: Path, data: Path, other: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    run = tmp_path / "run"
    assert tiny.run(early(run, data, data)) == EXIT_FINISHED
    assert (tiny.status(run)["outcome"], tiny.status(run)["step"]) == ("early_stopped", 3)
    assert best(run) == {"step": 1, "val_loss": tiny.records(run, "eval")[0]["val_loss"]}
    assert tiny.run(early(run, data, data)) == EXIT_FINISHED
    assert "nothing left to do" in capsys.readouterr().out

    more: dict[str, Any] = {"path": {}, "batches": {"eval__batches": 1}, "global_batch": {"train__global_batch": 8}}[
        change
    ]
    changed = early(run, data, other if change == "path" else data, **more)
    changed.run.resume_strict = True
    with pytest.raises(
        UserError, match=r"changes the trajectory: first validation set \(a best loss on the old one is"
    ):
        tiny.run(changed)
    assert best(run) is not None, "a start that is refused changes nothing"
    assert best(run)["step"] == 1  # type: ignore[index]

    changed.run.resume_strict = False
    capsys.readouterr()
    assert tiny.run(changed) == EXIT_FINISHED
    told = [line for line in capsys.readouterr().out.splitlines() if "first validation set" in line]
    assert len(told) == 1
    assert (
        "changed since, changes the trajectory: first validation set (a best loss on the old one is forgotten)"
        in told[0]
    )
    # Patience begins anew: at steps 4 (the best so far), 5 and 6.
    evals = tiny.records(run, "eval")
    assert [(r["step"], r["best"]) for r in evals] == [
        (1, True),
        (2, False),
        (3, False),
        (4, True),
        (5, False),
        (6, False),
    ]
    assert tiny.status(run)["step"] == 6
    assert best(run) == {"step": 4, "val_loss": evals[3]["val_loss"]}


def test_until_there_is_a_new_one_no_checkpoint_is_the_best(tmp_path: Path, data: Path, other: Path) -> None:
    run = tmp_path / "run"
    assert tiny.run(early(run, data, data)) == EXIT_FINISHED
    changed = early(run, data, other, eval__every=5)
    assert tiny.run_and_trace(changed, tiny.signalling(1, signal.SIGTERM))[0] == EXIT_STOPPED
    assert best(run) is None
    # Back to the first set: it was forgotten, and is measured anew.
    assert tiny.run(early(run, data, data, eval__every=5)) == EXIT_FINISHED
    assert [(r["step"], r["best"]) for r in tiny.records(run, "eval")][3:] == [(5, True), (8, False)]
    assert best(run) == {"step": 5, "val_loss": tiny.records(run, "eval")[3]["val_loss"]}


def test_the_same_set_in_another_place_is_the_same(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, moved = tmp_path / "run", tiny.write_data(tmp_path / "moved", windows=64)
    assert tiny.run(early(run, data, data)) == EXIT_FINISHED
    again = early(run, data, moved, eval__patience=3, run__resume_strict=False)
    assert tiny.run(again) == EXIT_FINISHED
    out = capsys.readouterr().out
    assert "changed since, harmless: data.val_path" in out
    assert "first validation set" not in out
    assert [(r["step"], r["best"]) for r in tiny.records(run, "eval")] == [
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]


def test_overfitting_is_judged_by_losses_of_one_set(tmp_path: Path, data: Path, other: Path) -> None:
    """What the watch remembers as the best was measured on the old set."""
    run = tmp_path / "run"
    heard: list[tuple[float | None, int]] = []

    class Heard(Validator):
        def run(self, *args: Any) -> Any:
            told = super().run(*args)
            heard.append((self.watch.overfitting.best, self.watch.overfitting.best_step))
            return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Validator", Heard)
        assert tiny.run(early(run, data, data, optim__lr=0.0)) == EXIT_FINISHED
        assert [step for _, step in heard] == [1, 2, 3]  # the same loss again is not worse
        assert tiny.run(early(run, data, other, optim__lr=0.0, eval__every=4)) == EXIT_FINISHED
    losses = {r["step"]: r["val_loss"] for r in tiny.records(run, "eval")}
    assert losses[3] != losses[4]
    assert heard[3] == (losses[4], 4)


# ---- a validation that was put off


class Killed(Exception):
    pass


def test_a_validation_after_a_resume_is_told_once_though_the_run_was_killed_after_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    cfg = tiny.config(run, data, data__val_path=str(data), eval__every=2, eval__batches=1)
    assert tiny.run_and_trace(cfg, tiny.signalling(2, signal.SIGTERM))[0] == EXIT_STOPPED
    assert tiny.records(run, "eval") == []

    def killed(*_: object, **__: object) -> None:
        raise Killed

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("kamui_dist.saver.Saver.save", killed)
            with pytest.raises(Killed):
                tiny.run(cfg)
        assert [r["step"] for r in tiny.records(run, "eval")] == [2]
    assert tiny.run(cfg) == EXIT_FINISHED
    assert [r["step"] for r in tiny.records(run, "eval")] == [2, 4, 5]
    assert [r["step"] for r in tiny.records(run)] == [1, 2, 3, 4, 5]


# ---- a schedule that is too long for a new run, and not for this one


def test_a_resume_with_a_larger_batch_has_the_steps_that_are_left(tmp_path: Path, data: Path) -> None:
    """2 steps of 4 windows are done; 56 of 64 are left: 4 steps of 16. As a new run it would have 4 steps, its warmup 5."""
    run = tmp_path / "run"
    tokens: dict[str, Any] = {"train__tokens": 64 * tiny.T, "schedule__kind": "cosine", "schedule__warmup": 5}
    small = tiny.config(run, data, train__micro_batch=4, train__global_batch=4, **tokens)
    assert tiny.run_and_trace(small, tiny.signalling(2, signal.SIGTERM))[0] == EXIT_STOPPED
    large = tiny.config(run, data, **tokens)
    assert tiny.run(large) == EXIT_FINISHED
    assert [r["tokens"] for r in tiny.records(run)] == [n * tiny.T for n in (4, 8, 24, 40, 56, 72)]
    assert tiny.records(run)[4]["lr"] == 0.1, "the end of the warmup"
    with pytest.raises(UserError, match=r"warmup \(5 steps\) is longer than the run \(4 steps\)"):
        tiny.run(tiny.config(tmp_path / "new", data, **tokens))
    assert not (tmp_path / "new").exists()


def test_a_run_of_fewer_tokens_than_it_has_seen_is_finished(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, before, after in (("train__tokens", 64 * tiny.T, 16 * tiny.T), ("train__epochs", 1, 0.1)):
        run = tmp_path / key
        cfg = tiny.config(run, data, train__micro_batch=4, train__global_batch=4, **{key: before})
        assert tiny.run_and_trace(cfg, tiny.signalling(9, signal.SIGTERM))[0] == EXIT_STOPPED
        capsys.readouterr()
        lowered = tiny.config(run, data, train__micro_batch=4, train__global_batch=4, **{key: after})
        assert tiny.run(lowered) == EXIT_FINISHED
        assert f"nothing left to do: {run} is finished at step 9 of 9" in capsys.readouterr().out
        assert tiny.status(run)["outcome"] == "finished"
