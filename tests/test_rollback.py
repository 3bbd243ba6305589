"""Rollback: back to a good checkpoint, past the data that led away from it, once, whatever kills it in between."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kamui_dist import checkpoint, cli, distributed, retention, rollback
from kamui_dist.batches import positions_of
from kamui_dist.data import TokenDataset, global_batch
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.knobs import Watch
from kamui_dist.metrics import read_records
from kamui_dist.mixture import TrainingData
from kamui_dist.state import State
from tests import failing, tiny
from tests.ranks import run_ranks

STEPS, BATCH, BAD = 24, 16, 15  # the batch of update BAD holds a window that makes the loss explode


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    plain = tiny.write_data(base / "plain", windows=1024)
    bad = (tiny.window_of(plain, BAD, 5), tiny.window_of(plain, BAD, 12))
    return tiny.write_data(base / "poisoned", windows=1024, sentinels=bad)


def config(run_dir: Path, data: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "train__steps": STEPS, "checkpoint__every": 4, "watch__on_spike": "rollback", "watch__rollback_steps": 2,
        "model__factory": "tests.tiny:trap", "model__factory_args": {"trap": "large"}, "optim__momentum": 0.9,
        "model__dropout": 0.2,
    }  # fmt: skip
    return tiny.config(run_dir, data, **{**values, **changes})


class stopping(tiny.Tracing):
    """Rank 1 is asked to stop three updates after it has begun again."""

    def next(self) -> Any:
        if len(tiny.Tracing.seen) == BAD + 3 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().next()


def _ranks(base: Path, data: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, mesh in (("ddp", {}), ("fsdp", {"parallel__shard": -1, "parallel__replicate": 1})):
        out[name] = tiny.run_and_trace(config(base / name, data, **mesh))
        # Stopped in the middle of what comes after the rollback, and resumed.
        stopped = config(base / f"{name}-stopped", data, **mesh)
        first = tiny.run_and_trace(stopped, stopping)
        out[f"{name}-stopped"] = first[0], tiny.run_and_trace(stopped)
    return out


@pytest.mark.slow
def test_it_goes_back_and_past(tmp_path: Path, data: Path) -> None:
    ranks = run_ranks(_ranks, 2, tmp_path, data)
    for name in ("ddp", "fsdp"):
        run_dir = tmp_path / name
        codes, seen = zip(*[r[name] for r in ranks], strict=True)
        assert codes == (0, 0)
        # Found at 15; two steps before lies 13, and the newest checkpoint from then is 12: updates 14 and 15 are left out.
        [entry] = json.loads((run_dir / "rollbacks.json").read_text())
        assert (entry["kind"], entry["trigger_step"], entry["step"]) == ("spike", BAD, 12)
        assert entry["gap"] == [13 * BATCH, 15 * BATCH]
        steps = tiny.records(run_dir)
        assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
        assert not any(r["spike"] or r["skipped"] for r in steps)
        assert [r["tokens"] for r in steps] == [n * BATCH * tiny.T for n in range(1, STEPS + 1)]
        windows = [sorted(a + b) for a, b in zip(*seen, strict=True)]
        order = [
            sorted(global_batch(TokenDataset(data), step * BATCH, BATCH, tiny.T, 7).tolist())
            for step in range(STEPS + 2)
        ]
        # Both ranks went through 15 updates, then from 13 on: that one again, and then what follows the gap.
        assert windows == [*order[:15], order[12], *order[15 : STEPS + 2]]
        assert 4 < steps[-1]["loss"] < steps[0]["loss"]
        kinds = [r["kind"] for r in tiny.records(run_dir, "rollback")]
        assert kinds == ["rollback"]
        [told] = tiny.records(run_dir, "rollback")
        assert (told["step"], told["skipped_windows"]) == (12, 2 * BATCH)
        assert tiny.status(run_dir)["outcome"] == "finished"
        # The same, bit for bit, when it was stopped and resumed after the rollback.
        stopped = f"{name}-stopped"
        assert [(r[stopped][0], r[stopped][1][0]) for r in ranks] == [(75, 0)] * 2
        assert tiny.records(tmp_path / stopped) == steps
        assert tiny.same(tiny.weights(tmp_path / stopped, prefix=""), tiny.weights(run_dir, prefix=""))
    assert len({r["ddp"][0] for r in ranks}) == 1


def test_it_is_the_run_that_never_saw_them(tmp_path: Path, data: Path) -> None:
    """Bitwise the run that has the gap from its start: nothing of what was rolled back is left in weights or moments."""
    assert tiny.run(config(tmp_path / "rolled", data)) == 0
    [entry] = json.loads((tmp_path / "rolled" / "rollbacks.json").read_text())
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "rollbacks.json").write_text(json.dumps([entry]))
    assert tiny.run(config(clean, data, watch__on_spike="stop")) == 0
    assert tiny.records(clean) == tiny.records(tmp_path / "rolled")
    assert tiny.same(tiny.weights(clean, prefix=""), tiny.weights(tmp_path / "rolled", prefix=""))
    findings = [json.loads(line) for line in (tmp_path / "rolled" / "findings.jsonl").read_text().splitlines()]
    assert [(f["kind"], f["step"]) for f in findings if f["kind"] == "rollback"] == [("rollback", 12)]


def test_the_learning_rate_after_it(tmp_path: Path, data: Path) -> None:
    cfg = config(tmp_path / "a", data, watch__rollback_lr_factor=0.5, watch__rollback_warmup=4)
    assert tiny.run(cfg) == 0
    rates = [r["lr"] for r in tiny.records(tmp_path / "a")]
    assert rates == pytest.approx([0.1] * 12 + [0.0125, 0.025, 0.0375] + [0.05] * (STEPS - 15))


@pytest.mark.slow
def test_killed_between_the_order_and_the_start(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start obeys the same order."""
    assert tiny.run(config(tmp_path / "whole", data)) == 0
    cfg = config(tmp_path / "killed", data)
    order = rollback.order

    def killed(*args: Any) -> Any:
        order(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(rollback, "order", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(cfg)
    monkeypatch.undo()
    assert tiny.run(cfg) == 0
    assert tiny.records(tmp_path / "killed") == tiny.records(tmp_path / "whole")
    assert tiny.same(tiny.weights(tmp_path / "killed", prefix=""), tiny.weights(tmp_path / "whole", prefix=""))
    assert len(json.loads((tmp_path / "killed" / "rollbacks.json").read_text())) == 1
    # And tells of it, once.
    assert tiny.run(config(tmp_path / "killed", data, train__steps=STEPS + 2)) == 0
    [told] = tiny.records(tmp_path / "killed", "rollback")
    assert told == tiny.records(tmp_path / "whole", "rollback")[0]
    findings = [json.loads(line) for line in (tmp_path / "killed" / "findings.jsonl").read_text().splitlines()]
    assert [f["step"] for f in findings if f["kind"] == "rollback"] == [12]


def test_the_start_after_it_says_what_has_changed(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not go on bit by bit from its checkpoint; a resume of what was saved later does."""
    changes: dict[str, Any] = {"watch__rollback_lr_factor": 0.5, "watch__rollback_warmup": 4}
    assert tiny.run(config(tmp_path / "a", data, train__steps=20, **changes)) == 0
    _, second = capsys.readouterr().out.split("rolled back 1 x")
    told = "changed since, by a rollback: windows 208 to 239 of the data order are left out; the learning rate is x 0.5, and comes "
    assert f"{told}back in 4 steps\n" in second
    assert "nothing has changed" not in second
    assert tiny.run(config(tmp_path / "a", data, **changes)) == 0
    out = capsys.readouterr().out
    assert "by a rollback" not in out
    assert "changed since, harmless: train.steps 20 -> 24" in out


def test_what_the_banner_says_of_rollbacks() -> None:
    first = {"gap": [64, 96], "trigger_step": 6, "step": 4, "kind": "spike", "lr_factor": 1.0, "warmup": 0}
    second = first | {"gap": [32, 48], "trigger_step": 3, "step": 2, "lr_factor": 0.5}
    assert rollback.lines([], 0) == []
    whole, *new = rollback.lines([first, second], 0)
    assert whole.endswith("48 windows are left out, and the learning rate is x 0.5")
    assert new == [
        "changed since, by a rollback: windows 64 to 95 of the data order are left out; the learning rate stays",
        "changed since, by a rollback: windows 32 to 47 of the data order are left out; the learning rate is x 0.5",
    ]
    assert rollback.lines([first, second], 1) == [whole, new[1]]
    assert rollback.lines([first, second], 2) == [whole]


def test_later_checkpoints_are_set_aside_and_come_back_for_nobody(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path / "a", data, watch__rollback_steps=6)
    assert tiny.run(cfg) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err, "it is an order, and no damage"
    [note] = [line for line in out.splitlines() if line.startswith("note: step-00000012 was moved to ")]
    assert note.endswith("quarantine/step-00000012 (rolled back: spike at step 15); the run goes on from step 8")
    aside = tmp_path / "a" / "checkpoints" / "quarantine" / "step-00000012"
    assert "rolled back: spike at step 15" in (aside / "reason.txt").read_text()
    assert tiny.steps_saved(tmp_path / "a") == [4, 8, 12, 16, 20, 24]
    # Put back by hand beside the new ones: it was made before the rollback, so it is set aside again.
    (aside / "reason.txt").unlink()
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step-00000012")
    aside.rename(tmp_path / "a" / "checkpoints" / "step-00000012")
    assert rollback.obey(tmp_path / "a")[0]["step"] == 8
    assert tiny.steps_saved(tmp_path / "a") == [4, 8, 16, 20, 24]


@pytest.mark.slow
def test_retention_keeps_what_a_rollback_needs(tmp_path: Path, data: Path) -> None:
    """With the newest checkpoint only and a save in every step, one from before the trouble is still there."""
    changes = {"checkpoint__every": 1, "checkpoint__keep": 1, "watch__divergence_steps": 3}
    assert tiny.run(config(tmp_path / "a", data, **changes)) == 0
    [entry] = json.loads((tmp_path / "a" / "rollbacks.json").read_text())
    assert 4 <= entry["step"] <= 13
    assert len(tiny.steps_saved(tmp_path / "a")) <= 3


def test_what_cannot_be_rolled_back_stops(tmp_path: Path, data: Path) -> None:
    none = config(tmp_path / "none", data, checkpoint__every=1000)
    assert tiny.run(none) == 70
    assert "no checkpoint from before" in tiny.status(tmp_path / "none")["reason"]
    once = config(tmp_path / "once", data, watch__max_rollbacks=0)
    assert tiny.run(once) == 70
    assert "watch.max_rollbacks" in tiny.status(tmp_path / "once")["reason"]
    assert not (tmp_path / "once" / "rollbacks.json").exists()
    assert tiny.status(tmp_path / "once")["step"] == BAD


def test_a_stop_sets_aside_what_was_saved_in_the_trouble(tmp_path: Path) -> None:
    """The same command goes on from before it, and not from the middle."""
    run_dir = tmp_path / "run"
    cfg = config(run_dir, tiny.write_data(tmp_path / "data", windows=512), watch__on_spike="warn")
    assert tiny.run(cfg) == 0
    (run_dir / "checkpoints" / "best.json").write_text('{"step": 16, "val_loss": 1.0}')
    trouble = dataclasses.replace(finding(22, since=15), action="stop")
    rollback.condemn(run_dir, State(), [dataclasses.replace(trouble, kind="slow-rank")])
    assert len(tiny.steps_saved(run_dir)) == STEPS // 4, "a slow rank spoils nothing"
    state = State(best_step=16, best_val_loss=1.0)
    rollback.condemn(run_dir, state, [trouble])
    assert (state.best_step, state.best_val_loss) == (None, None)
    assert not (run_dir / "checkpoints" / "best.json").exists(), "the best is among them"
    assert tiny.steps_saved(run_dir) == [4, 8, 12]
    reason = run_dir / "checkpoints" / "quarantine" / "step-00000016" / "reason.txt"
    assert "saved after the trouble of step 15 had begun" in reason.read_text()
    rollback.condemn(run_dir, State(best_step=16, best_val_loss=1.0), [dataclasses.replace(trouble, since=2)])
    assert tiny.steps_saved(run_dir) == [4, 8, 12], "none is of before: all stay"
    rollback.condemn(run_dir, State(best_step=16, best_val_loss=1.0), [dataclasses.replace(trouble, since=None)])
    assert tiny.steps_saved(run_dir) == [4, 8, 12]


@pytest.mark.slow
def test_a_stop_for_overfitting_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, data = tmp_path / "run", tiny.write_data(tmp_path / "data", windows=48)
    val = tiny.write_data(tmp_path / "val", windows=16, seed=1)
    cfg = tiny.config(
        run_dir, data, train__steps=400, data__val_path=str(val), eval__every=4, checkpoint__every=4, watch__on_overfitting="stop",
        watch__on_spike="off", optim__name="adamw", optim__lr=0.01,
    )  # fmt: skip
    assert tiny.run(cfg) == 70
    best = min((r["val_loss"], r["step"]) for r in tiny.records(run_dir, "eval"))
    step = tiny.status(run_dir)["step"]
    assert best[1] < step
    assert tiny.steps_saved(run_dir)[-1] == best[1], "those after it are set aside"
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text()) == {"step": best[1], "val_loss": best[0]}
    assert f"best validation loss {best[0]:.4f} at step {best[1]}" in capsys.readouterr().out.splitlines()[-1]
    # The same if that validation is made up for after a stop request.
    later = cfg.model_copy(deep=True)
    later.run.dir = str(tmp_path / "later")
    code, _ = tiny.run_and_trace(later, tiny.signalling(step, signal.SIGTERM))
    assert (code, tiny.status(tmp_path / "later")["step"]) == (75, step)
    assert tiny.run(later) == 70
    assert tiny.status(tmp_path / "later")["reason"] == tiny.status(run_dir)["reason"] == "watch: overfitting"
    assert tiny.steps_saved(tmp_path / "later")[-1] == best[1]


@pytest.mark.slow
def test_the_checkpoint_knows_it_without_the_file(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "a"
    cfg = config(run_dir, data, watch__rollback_lr_factor=0.5)
    assert tiny.run(cfg) == 0
    before = (run_dir / "rollbacks.json").read_text()
    (run_dir / "rollbacks.json").unlink()
    capsys.readouterr()
    longer = config(run_dir, data, watch__rollback_lr_factor=0.5, train__steps=STEPS + 2)
    assert tiny.run(longer) == 0
    told = "rolled back 1 x, the last time from step 15 to 12 (spike): 32 windows are left out, and the learning rate is x 0.5"
    assert told in capsys.readouterr().out
    assert json.loads((run_dir / "rollbacks.json").read_text()) == json.loads(before)
    assert tiny.records(run_dir)[-1]["lr"] == 0.05


def test_skip_leaves_out_the_update_alone(tmp_path: Path, data: Path) -> None:
    assert tiny.run(config(tmp_path / "a", data, watch__on_spike="skip")) == 0
    steps = tiny.records(tmp_path / "a")
    assert [r["step"] for r in steps if r["skipped"]] == [r["step"] for r in steps if r["spike"]] == [BAD]
    assert max(r["loss"] for r in steps if not r["spike"]) < 5
    assert steps[BAD - 1]["grad_norm_pre_clip"] > 10
    assert steps[BAD - 1]["grad_norm_post_clip"] is None


def test_epochs_are_as_many_windows_as_ever(tmp_path: Path) -> None:
    """The windows that were left out are replaced by those that follow."""
    plain = tiny.write_data(tmp_path / "plain", windows=200)
    poisoned = tiny.write_data(tmp_path / "poisoned", windows=200, sentinels=(tiny.window_of(plain, 10, 5),))
    cfg = config(tmp_path / "a", poisoned, train__epochs=1, train__steps=None)
    code, seen = tiny.run_and_trace(cfg)
    assert code == 0
    steps = tiny.records(tmp_path / "a")
    assert [r["step"] for r in steps] == list(range(1, 14))
    assert [r["tokens"] for r in steps][-1] == 200 * tiny.T
    assert all(r["loss"] is not None for r in steps)
    assert len(seen[-1]) == 200 - 12 * 16


def test_inspect_data_knows_of_it(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.run(config(tmp_path / "a", data, model__vocab_size=65)) == 0
    capsys.readouterr()
    for step, position in ((13, 12 * BATCH), (14, 15 * BATCH)):
        assert cli.main(["inspect", "data", str(tmp_path / "a"), "--step", str(step)]) == 0
        first = capsys.readouterr().out.splitlines()[1]
        window = int(global_batch(TokenDataset(data), position, 1, tiny.T, 7)[0])
        assert f"window {window}," in first


@pytest.mark.slow
def test_a_run_that_diverges_is_rescued(tmp_path: Path) -> None:
    """Real text, in which the windows of updates 120 to 164 are random bytes: the loss diverges, the run goes back, and ends
    within 2 % of the validation loss of the run on the text as it was."""
    clean = failing.config("healthy", tmp_path / "clean")
    run = {"train__steps": 300, "eval__every": 100, "checkpoint__every": 50, "optim__lr": 3e-3}
    healthy = _changed(clean, tmp_path / "healthy", clean.data.path, run)
    assert tiny.run(healthy) == 0
    good = TokenDataset(Path(str(clean.data.path)))
    tokens = good.read(np.arange(good.windows(failing.LENGTH)), failing.LENGTH, 256)[:, :-1]
    order = global_batch(good, 119 * 16, 45 * 16, failing.LENGTH, 7)
    tokens[order] = np.random.default_rng(0).integers(0, 256, (len(order), failing.LENGTH))
    bad = failing.write_text(tmp_path / "bad", tokens.astype(np.uint8).tobytes() + b" ")
    rescue = run | {"watch__on_divergence": "rollback", "watch__rollback_steps": 10}
    assert tiny.run(_changed(clean, tmp_path / "rescued", str(bad), rescue)) == 0
    [entry] = json.loads((tmp_path / "rescued" / "rollbacks.json").read_text())
    assert entry["kind"] == "divergence"
    assert 165 <= entry["trigger_step"] <= 180
    steps = tiny.records(tmp_path / "rescued")
    assert [r["step"] for r in steps] == list(range(1, 301)), "the curve has every step once"
    losses = [tiny.records(tmp_path / name, "eval")[-1]["val_loss"] for name in ("healthy", "rescued")]
    assert losses[1] < 1.02 * losses[0], losses
    print(f"validation loss {losses[0]:.4f} undisturbed, {losses[1]:.4f} rescued")


def _changed(cfg: Any, run_dir: Path, data: Any, changes: dict[str, Any]) -> Any:
    values = cfg.model_dump()
    for key, value in ({"run__dir": str(run_dir), "data__path": data} | changes).items():
        section, name = key.split("__")
        values[section][name] = value
    return type(cfg).model_validate(values)


# ---- pure


def test_positions_and_counts() -> None:
    gaps = [(3, 5), (6, 10)]
    assert positions_of(np.arange(6), gaps).tolist() == [0, 1, 2, 5, 10, 11]
    assert positions_of(np.arange(4), ()).tolist() == [0, 1, 2, 3]
    assert positions_of(3, gaps) == 5
    out = rollback.gaps([{"gap": [6, 8]}, {"gap": [3, 5]}, {"gap": [7, 10]}])
    assert out == gaps


def test_counts_by_source_leave_out_the_gap(tmp_path: Path) -> None:
    streams = [TokenDataset(tiny.write_data(tmp_path / name, windows=50, seed=i)) for i, name in enumerate("ab")]
    data = TrainingData(list(streams), ["a", "b"], [3.0, 1.0], tiny.T)
    gaps = [(3, 5), (6, 10), (40, 60)]
    for samples in (0, 1, 3, 4, 5, 20, 34, 35, 90):
        sources, _ = data.place(positions_of(np.arange(samples), gaps), 7)
        assert data.seen(samples, gaps) == {"a": int((sources == 0).sum()), "b": int((sources == 1).sum())}


def test_a_second_rollback_further_back() -> None:
    """Positions, not samples: the first gap stays where it was."""
    first = {"gap": [64, 96], "step": 4, "lr_factor": 0.5, "warmup": 0}
    second = {"gap": [32, 48], "step": 2, "lr_factor": 0.5, "warmup": 2}
    held = rollback.gaps([first, second])
    assert held == [(32, 48), (64, 96)]
    assert positions_of(np.array([31, 32, 47, 48]), held).tolist() == [31, 48, 63, 96]
    assert [rollback.lr_scale(n, [first, second]) for n in (2, 3, 9)] == [0.125, 0.25, 0.25]
    assert rollback.lr_scale(5, []) == 1.0


def finding(step: int, since: int | None = None) -> Finding:
    return Finding("divergence", step, "m.", "c.", "a.", "rollback", since)


def test_which_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from `rollback_steps` before the trouble began; else the newest from before it was seen; else none."""
    run_dir = tmp_path
    (run_dir / "checkpoints").mkdir()
    cfg = Watch(rollback_steps=100)

    def go(steps: list[int], at: Finding) -> rollback.Rollback | None:
        monkeypatch.setattr(checkpoint, "step_directories", lambda _: [(s, run_dir / str(s)) for s in steps])
        return rollback.order(run_dir, cfg, State(step=at.step, samples=at.step * 10), 10, [at])[0]

    ordered = go([100, 500, 600, 700], finding(750, 700))
    assert ordered is not None
    assert (ordered.step, ordered.gap) == (600, (6000, 7500))
    ordered = go([100, 550, 700], finding(750, 700))
    assert ordered is not None
    assert (ordered.step, ordered.gap) == (550, (6000, 7500)), "from 550 to 600 the data are trained on again"
    ordered = go([650, 700, 710], finding(750, 700))
    assert ordered is not None
    assert (ordered.step, ordered.gap) == (650, (6500, 7500))
    # Overfitting: the best itself, of the step before it began.
    ordered = go([600, 690, 699, 710], dataclasses.replace(finding(750, 700), kind="overfitting"))
    assert ordered is not None
    assert (ordered.step, ordered.gap) == (699, (6990, 7500))
    assert go([700, 710], finding(750, 700)) is None
    assert go([], finding(750)) is None
    assert distributed.world_size() == 1


def test_the_checkpoint_that_a_rollback_would_want_is_kept() -> None:
    cfg = Watch(on_divergence="rollback", rollback_steps=100, divergence_steps=50)
    assert retention.wanted_by_rollback(cfg, [100, 200, 300, 400]) == {200, 300}
    assert retention.wanted_by_rollback(cfg, [300, 400]) == {300, 400}
    assert retention.wanted_by_rollback(cfg, []) == set()
    assert retention.wanted_by_rollback(Watch(), [100, 200, 300, 400]) == set()


@pytest.mark.parametrize("text", ["{", "{}x", '[{"gap": [3, 2]}]', '[{"gap": 1}]', "[1]", '{"a": 1}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "rollbacks.json").write_text(text)
    with pytest.raises(UserError, match=r"rollbacks.json cannot be used"):
        rollback.obey(tmp_path)


def test_a_state_from_before_there_were_rollbacks() -> None:
    old = {k: v for k, v in State(step=3).to_dict().items() if k != "rollbacks"}
    assert State.from_dict(old) == State(step=3)
    assert dataclasses.asdict(State())["rollbacks"] == []
    assert read_records(Path("none.jsonl")) == []


def test_an_order_back_to_nothing_moves_nothing(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "a"
    cfg = config(run_dir, data, train__steps=12)
    assert tiny.run(cfg) == 0
    r = {"gap": [64, 96], "trigger_step": 11, "step": 3, "kind": "spike", "message": "", "lr_factor": 1.0, "warmup": 0}
    (run_dir / "rollbacks.json").write_text(json.dumps([r | {"step": 8}, r]))
    with pytest.raises(UserError, match=r"rollbacks.json goes back to step 3, .* would set aside 4, 8, 12;"):
        rollback.obey(run_dir)
    assert tiny.steps_saved(run_dir) == [4, 8, 12], "not for the first of the two either"
    (run_dir / "rollbacks.json").write_text(json.dumps([r | {"step": 8}, r | {"step": 4}]))
    (run_dir / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    rollback.obey(run_dir)  # it is there, but damaged: what becomes of it is not for us to judge
    assert tiny.steps_saved(run_dir) == [4]
