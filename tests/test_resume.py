"""A run cannot be lost: stopped anywhere, in any way, it goes on as if it had not been."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import distributed
from kamui_dist.data import TokenDataset, global_batch
from kamui_dist.errors import EXIT_FINISHED, EXIT_STOPPED, UserError
from kamui_dist.schedule import lr_at
from kamui_dist.signals import StopRequest
from tests import tiny
from tests.ranks import run_ranks

# 20 windows in batches of 8: 3 epochs are 60 windows, 8 steps, and the borders lie inside steps 3 and 5; the last is half full.
LONG: dict[str, Any] = {
    "train__epochs": 3, "train__micro_batch": 2, "train__global_batch": 8, "model__dropout": 0.2, "optim__name": "adamw",
    "optim__lr": 0.1, "optim__weight_decay": 0.1, "schedule__kind": "cosine", "schedule__warmup": 3, "eval__every": 3,
    "watch__spike_factor": 1.001, "watch__window": 1,
}  # fmt: skip


def limit_at(step: int) -> Any:
    """Update `step` of this process exceeds run.max_minutes, on rank 0 alone."""

    class Limited(tiny.Tracing):
        calls = 0

        def next(self):
            self.calls += 1
            if self.calls == step and distributed.rank() == 0:
                Limited.stop.limit_seconds = 1e-9
            return super().next()

        stop = StopRequest()

    return Limited


def interrupted_runs(base: Path, data: Path, meshes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For each mesh: an uninterrupted run, and others that were stopped in every way; exit codes and windows seen."""
    last = distributed.world_size() - 1
    out: dict[str, Any] = {}
    for name, mesh in meshes.items():

        def cfg(kind: str, name=name, mesh=mesh, **more: Any) -> Any:
            return tiny.config(base / f"{name}-{kind}", data, data__val_path=str(data), **{**LONG, **mesh, **more})

        out[f"{name}-whole"] = [tiny.run_and_trace(cfg("whole"))]
        out[f"{name}-signals"] = [
            tiny.run_and_trace(
                cfg("signals"), tiny.signalling(3, signal.SIGUSR1, only_rank=last)
            ),  # an evaluation is due
            tiny.run_and_trace(cfg("signals"), tiny.signalling(1, signal.SIGTERM, only_rank=0)),
            tiny.run_and_trace(cfg("signals"), tiny.signalling(2, signal.SIGINT)),
            tiny.run_and_trace(cfg("signals")),
        ]
        limited = limit_at(5)
        tiny.Tracing.seen = []
        code = tiny.run(cfg("clock"), limited.stop, limited)
        stop_file = base / f"{name}-clock" / "STOP"
        out[f"{name}-clock"] = [
            (code, tiny.Tracing.seen),
            tiny.run_and_trace(cfg("clock"), tiny.acting(1, stop_file.touch, only_rank=0)),
            tiny.run_and_trace(cfg("clock")),
        ]
    return out


def check_interrupted(base: Path, data: Path, names: list[str], results: list[dict[str, Any]]) -> None:
    for name in names:
        whole = tiny.records(base / f"{name}-whole")
        assert [r["step"] for r in whole] == list(range(1, 9))
        assert [r["epoch"] for r in whole] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.0])
        assert whole[-1]["tokens"] == 60 * tiny.T
        assert any(r["spike"] for r in whole)
        for kind, stops in (("signals", [3, 4, 6]), ("clock", [5, 6])):
            run = base / f"{name}-{kind}"
            assert tiny.records(run) == whole, run
            assert [r["step"] for r in tiny.records(run, "resume")] == stops
            assert tiny.records(run, "eval") == tiny.records(base / f"{name}-whole", "eval")
            assert [r["step"] for r in tiny.records(run, "eval")] == [3, 6, 8]
            # weights, moments and step counts of the optimizer
            assert tiny.same(tiny.weights(run, prefix=""), tiny.weights(base / f"{name}-whole", prefix=""))
            assert tiny.status(run)["outcome"] == "finished"
            assert tiny.status(run)["exit_code"] == 0
            for result in results:
                codes = [code for code, _ in result[f"{name}-{kind}"]]
                assert codes == [EXIT_STOPPED] * len(stops) + [EXIT_FINISHED]
                ((_, all_windows),) = result[f"{name}-whole"]
                assert [w for _, part in result[f"{name}-{kind}"] for w in part] == all_windows
        # every window exactly three times, once in each epoch
        windows = [w for step in range(8) for result in results for w in result[f"{name}-whole"][0][1][step]]
        assert sorted(windows) == sorted(list(range(20)) * 3)
        assert sorted(windows[:16]) == sorted(global_batch(TokenDataset(data), 0, 16, tiny.T, 7).tolist())


@pytest.mark.slow
def test_one_process_goes_on_bit_by_bit(tmp_path):
    data = tiny.write_data(tmp_path / "data", windows=20)
    results = [interrupted_runs(tmp_path, data, {"single": {}})]
    check_interrupted(tmp_path, data, ["single"], results)


@pytest.mark.slow
def test_two_ranks_go_on_bit_by_bit_whoever_hears_of_the_stop(tmp_path):
    data = tiny.write_data(tmp_path / "data", windows=20)
    meshes: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel__shard": 2}}
    results = run_ranks(interrupted_runs, 2, tmp_path, data, meshes)
    check_interrupted(tmp_path, data, list(meshes), results)


# ---- in one process: what may change between two starts, and what not


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data"), windows=64)


def stopped(run: Path, data: Path, at: int, **overrides: Any) -> None:
    """A run of one process that was stopped after update `at`."""
    code, _ = tiny.run_and_trace(tiny.config(run, data, **overrides), tiny.signalling(at, signal.SIGTERM))
    assert code == EXIT_STOPPED
    assert tiny.status(run) | {"pid": 0} == {
        "outcome": "stopped", "step": at, "reason": "SIGTERM", "requeue": True, "exit_code": EXIT_STOPPED, "pid": 0,
        "restarts": 0,
    }  # fmt: skip


@pytest.mark.slow
def test_learning_rate_after_a_resume_at_any_step(tmp_path, data):
    cosine: dict[str, Any] = {
        "train__steps": 12, "train__micro_batch": 16, "schedule__kind": "cosine", "schedule__warmup": 4,
        "model__n_layers": 1,
    }  # fmt: skip
    expected = [
        lr_at(s, kind="cosine", peak=0.1, floor=0.0, total=12, warmup=4, decay=0, decay_shape="sqrt") for s in range(12)
    ]
    for k in (1, 4, 5, 11):
        stopped(tmp_path / f"{k}", data, k, **cosine)
        assert tiny.run(tiny.config(tmp_path / f"{k}", data, **cosine)) == 0
        assert [r["lr"] for r in tiny.records(tmp_path / f"{k}")] == expected

    wsd: dict[str, Any] = {
        "train__steps": 10, "train__micro_batch": 16, "schedule__kind": "wsd", "schedule__warmup": 2, "schedule__decay": 4,
        "model__n_layers": 1,
    }  # fmt: skip
    for k in (3, 4, 2):  # stops at 3, 7 and 9
        code, _ = tiny.run_and_trace(tiny.config(tmp_path / "wsd", data, **wsd), tiny.signalling(k, signal.SIGTERM))
        assert code == EXIT_STOPPED
    assert tiny.run(tiny.config(tmp_path / "wsd", data, **wsd)) == 0
    assert [r["step"] for r in tiny.records(tmp_path / "wsd", "resume")] == [3, 7, 9]
    assert [r["lr"] for r in tiny.records(tmp_path / "wsd")] == [
        lr_at(s, kind="wsd", peak=0.1, floor=0.0, total=10, warmup=2, decay=4, decay_shape="sqrt") for s in range(10)
    ]


def test_a_longer_run_and_a_new_learning_rate_take_effect_and_are_told(tmp_path, data, capsys):
    changed: dict[str, Any] = {"train__steps": 8, "train__micro_batch": 16, "schedule__kind": "cosine"}
    stopped(tmp_path / "run", data, 4, **changed)
    capsys.readouterr()
    cfg = tiny.config(tmp_path / "run", data, **{**changed, "train__steps": 12}, optim__lr=0.05)
    assert tiny.run(cfg) == 0
    told = capsys.readouterr().out
    assert "train.steps 8 -> 12" in told
    assert "optim.lr 0.1 -> 0.05" in told
    rates = [r["lr"] for r in tiny.records(tmp_path / "run")]
    after = [
        lr_at(s, kind="cosine", peak=0.05, floor=0, total=12, warmup=0, decay=0, decay_shape="sqrt") for s in range(12)
    ]
    assert rates[4:] == after[4:]
    assert rates == sorted(rates, reverse=True)


def test_another_batch_size_goes_on_at_the_next_window(tmp_path, data):
    stopped(tmp_path / "run", data, 2, train__steps=4, train__micro_batch=8, train__global_batch=8)
    cfg = tiny.config(tmp_path / "run", data, train__steps=4, train__micro_batch=4, train__global_batch=4)
    _, seen = tiny.run_and_trace(cfg)
    order = global_batch(TokenDataset(data), 0, 24, tiny.T, 7).tolist()
    assert seen == [order[16:20], order[20:24]]
    assert [r["tokens"] for r in tiny.records(tmp_path / "run")] == [64, 128, 160, 192]


@pytest.mark.slow
def test_tokens_and_epochs_left_are_divided_by_the_batch_of_now(tmp_path, data):
    """As after a resume on half as many ranks with the same accumulation: the run must not become longer or shorter."""
    for name, duration in (("epochs", {"train__epochs": 0.5}), ("tokens", {"train__tokens": 32 * tiny.T})):
        for batch, steps in ((4, [1, 2, 3, 4, 5, 6]), (16, [1, 2, 3])):
            run = tmp_path / f"{name}-{batch}"
            stopped(run, data, 2, train__micro_batch=8, train__global_batch=8, **duration)
            cfg = tiny.config(run, data, train__micro_batch=4, train__global_batch=batch, **duration)
            _, seen = tiny.run_and_trace(cfg)
            assert [r["step"] for r in tiny.records(run)] == steps
            assert [r["skipped"] for r in tiny.records(run)] == [False] * len(steps)
            assert tiny.records(run)[-1]["tokens"] == 32 * tiny.T
            assert sum(len(windows) for windows in seen) == 16
            assert tiny.run(cfg) == 0
            assert len(tiny.records(run)) == len(steps)


def test_which_steps_are_saved(tmp_path, data):
    args: dict[str, Any] = {"train__steps": 7, "train__micro_batch": 16, "model__n_layers": 1}
    for every, saved in ((3, [3, 6, 7]), (7, [7])):
        run = tmp_path / f"every-{every}"
        assert tiny.run(tiny.config(run, data, **args, checkpoint__every=every)) == 0
        assert tiny.steps_saved(run) == saved
        assert [r["step"] for r in tiny.records(run, "checkpoint")] == saved


def content(run: Path) -> dict[str, str]:
    """Without what a thread of a run that has ended in this process may still write."""
    files = [
        p for p in sorted(run.rglob("*")) if p.is_file() and p.name != "status.json" and p.parent.name != "heartbeat"
    ]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_finished_run_is_left_as_it_is(tmp_path, data, capsys):
    run = tmp_path / "run"
    args: dict[str, Any] = {"train__micro_batch": 16, "checkpoint__every": 2, "log__tensorboard": True}
    assert tiny.run(tiny.config(run, data, train__steps=4, **args)) == 0
    before = content(run)
    assert any("tensorboard" in name for name in before)
    for steps in (4, 3):
        capsys.readouterr()
        assert tiny.run(tiny.config(run, data, train__steps=steps, **args)) == 0
        assert "nothing left to do" in capsys.readouterr().out
        assert content(run) == before
        assert tiny.status(run)["outcome"] == "finished"


def test_a_stopped_run_whose_end_is_lowered_is_finished(tmp_path, data):
    """status.json must not ask for another start, or the job is requeued for ever."""
    stopped(tmp_path / "run", data, 4, train__micro_batch=16)
    assert tiny.run(tiny.config(tmp_path / "run", data, train__micro_batch=16, train__steps=3)) == 0
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("finished", False, 0)


@pytest.mark.slow
def test_what_must_not_change_is_refused_with_both_values(tmp_path, data):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert tiny.run(tiny.config(whole, data)) == 0
    stopped(run, data, 2)
    before = content(run)

    def refused(**overrides: Any) -> str:
        with pytest.raises(UserError) as caught:
            tiny.run(tiny.config(run, overrides.pop("path", data), **overrides))
        assert content(run) == before
        return str(caught.value)

    assert "model.n_layers is 3, but" in (told := refused(model__n_layers=3))
    assert "has 2" in told
    told = refused(model__context_length=4, model__d_model=32)
    assert "model.context_length is 4, but" in told
    assert "has 8" in told
    assert "model.d_model is 32, but" in told
    assert "optim.name is adamw" in refused(optim__name="adamw")

    # The same model in other words: grouped as many heads, an MLP as wide, a vocabulary padded to the same size.
    same = Path(shutil.copytree(run, tmp_path / "same"))
    words: dict[str, Any] = {"model__n_kv_heads": 2, "model__vocab_multiple": 5, "model__rope_theta": 1.0}
    assert tiny.run(tiny.config(same, data, run__resume_strict=True, **words)) == 0
    assert tiny.records(same)[2:] == tiny.records(whole)[2:]

    other = tiny.write_data(tmp_path / "other", seed=1)
    assert "data.allow_change" in refused(path=other)
    # The header says what it said, the tokens are others.
    in_place = Path(shutil.copytree(data, tmp_path / "in place"))
    shutil.copy(other / "00000.bin", in_place / "00000.bin")
    assert "data.path: files were changed in place" in refused(path=in_place)
    again = Path(shutil.copytree(run, tmp_path / "again"))
    assert tiny.run(tiny.config(again, in_place, train__steps=3, data__allow_change=True)) == 0
    assert any("checksum of some windows" in text for text in tiny.records(again, "resume")[-1]["changed"])
    moved = Path(shutil.copytree(data, tmp_path / "moved" / "elsewhere"))
    assert tiny.run(tiny.config(run, moved, train__steps=3)) == 0  # the same tokens in another place
    assert tiny.run(tiny.config(run, other, train__steps=4, data__allow_change=True)) == 0
    assert [r["step"] for r in tiny.records(run)] == [1, 2, 3, 4]


def test_lost_checkpoints_are_no_new_beginning(tmp_path, data):
    run = tmp_path / "run"
    stopped(run, data, 2)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="has trained to step 2"):
        tiny.run(tiny.config(run, data))
    assert len(tiny.records(run)) == 2


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_costs_only_its_steps(tmp_path, data, capfd):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert tiny.run(tiny.config(whole, data, checkpoint__every=2)) == 0
    stopped(run, data, 4, checkpoint__every=2)
    assert tiny.steps_saved(run) == [2, 4]
    newest = run / "checkpoints" / "step-00000004"
    shard = max(newest.rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    assert tiny.run(tiny.config(run, data, checkpoint__every=2)) == 0
    assert "step-00000004 was moved to" in capfd.readouterr().err
    assert (run / "checkpoints" / "quarantine" / "step-00000004" / "reason.txt").exists()
    assert [r["step"] for r in tiny.records(run, "resume")] == [2]
    assert tiny.records(run) == tiny.records(whole)
    assert tiny.same(tiny.weights(run), tiny.weights(whole))


# ---- killed in the middle


def killed_at_7(run: Path, data: Path) -> None:
    cfg = tiny.config(run, data, **KILLED)
    tiny.run(cfg, loader=tiny.acting(8, lambda: os.kill(os.getpid(), signal.SIGKILL)))


KILLED: dict[str, Any] = {
    "train__steps": 10, "checkpoint__every": 4, "checkpoint__best": False, "log__tensorboard": True, "log__every": 1,
    "eval__every": 3,
}  # fmt: skip


@pytest.mark.slow
def test_after_a_kill_each_step_is_told_once_and_the_curve_does_not_zigzag(tmp_path, data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    KILLED["data__val_path"] = str(data)
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(killed_with_validation, 1, run, data)
    assert [r["step"] for r in tiny.records(run)] == [1, 2, 3, 4, 5, 6, 7]
    assert tiny.status(run)["outcome"] == "running"
    while int(time.time()) == int((run / "tensorboard").stat().st_mtime):
        time.sleep(0.05)  # TensorBoard orders files by the second in their name: no real restart is faster
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 8, "lo')  # a line that the crash cut short
    before = {r["step"]: r for r in tiny.records(run, timeless=False)}

    assert tiny.run(tiny.config(run, data, **KILLED)) == 0
    after = {r["step"]: r for r in tiny.records(run, timeless=False)}
    assert [r["step"] for r in tiny.records(run)] == list(range(1, 11))
    assert [r["step"] for r in tiny.records(run, "eval")] == [3, 6, 9, 10]
    assert [r["step"] for r in tiny.records(run, "checkpoint")] == sorted(
        {r["step"] for r in tiny.records(run, "checkpoint")}
    )
    assert all(after[s]["time"] == before[s]["time"] for s in range(1, 5))
    assert all(after[s]["time"] > before[s]["time"] for s in range(5, 8))  # of the second run
    assert all(
        line.startswith('{"kind"') and line.endswith("}") for line in (run / "metrics.jsonl").read_text().splitlines()
    )

    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    for tag in ("train/loss", "train/lr", "train/grad_norm_pre_clip", "perf/step_seconds"):
        points = board.Scalars(tag)
        assert [p.step for p in points] == list(range(1, 11)), tag
    assert [p.value for p in board.Scalars("train/loss")] == pytest.approx([after[s]["loss"] for s in range(1, 11)])
    assert [p.value for p in board.Scalars("perf/step_seconds")] == pytest.approx(
        [after[s]["step_seconds"] for s in range(1, 11)]
    )
    assert [p.step for p in board.Scalars("val/loss")] == [3, 6, 9, 10]


def killed_with_validation(run: Path, data: Path) -> None:
    KILLED["data__val_path"] = str(data)
    killed_at_7(run, data)
