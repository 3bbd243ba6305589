"""The loop: what it does when numbers are not finite, data are few, a rank fails, or a model is somebody else's."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kamui_dist import data as data_module
from kamui_dist import distributed, train
from kamui_dist.data import TokenDataset
from kamui_dist.errors import EXIT_DIVERGED, EXIT_STOPPED
from kamui_dist.mixture import SAMPLED
from kamui_dist.signals import StopRequest
from tests import tiny
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
MESHES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel__shard": 2}}
TRAP: dict[str, Any] = {"model__factory": "tests.tiny:trap", "checkpoint__every": 1}


def digest() -> str:
    """Of the whole weights as this rank has them now."""
    weights = tiny.full_weights(tiny.LAST_MODEL[0])
    return str(
        [float(w.double().sum()) for w in weights.values()] + [bytes(w.numpy()).hex()[:64] for w in weights.values()]
    )


def evaluation_config(run: Path, data: Path, val: Path, **overrides: Any) -> Any:
    args: dict[str, Any] = {"eval__batches": 0, "eval__every": 1, "train__micro_batch": 2, "data__val_path": str(val)}
    return tiny.config(run, data, **{**args, **overrides})


# ---- two ranks, started once: every property under DDP and FSDP


def on_two_ranks(base: Path, data: dict[str, Path]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        for kind in ("nan", "inf"):
            args: dict[str, Any] = {**TRAP, **mesh, "model__factory_args": {"trap": kind}}
            cfg = tiny.config(base / f"{name}-{kind}", data["one"], train__steps=6, **args)
            out[f"{name}-{kind}"] = tiny.run(cfg), digest()
        args = {**TRAP, **mesh, "model__factory_args": {"trap": "nan"}, "watch__max_skipped": 2, "checkpoint__keep": 2}
        cfg = tiny.config(base / f"{name}-diverged", data["many"], train__steps=8, **args)
        out[f"{name}-diverged"] = tiny.run(cfg), digest()
        # fp16: a gradient that overflows on rank 1 only, two micro-batches a step
        args = {
            **TRAP,
            **mesh,
            "model__factory_args": {"trap": "huge"},
            "run__precision": "fp16",
            "optim__grad_clip": 0.1,
        }
        cfg = tiny.config(base / f"{name}-fp16", data["one"], train__steps=6, **args)
        out[f"{name}-fp16"] = tiny.run(cfg), digest()

        cfg = evaluation_config(base / f"{name}-eval", data["one"], data["seven"], train__steps=2, **mesh)
        out[f"{name}-eval"] = tiny.run(cfg), digest()
        cfg = evaluation_config(
            base / f"{name}-patience", data["one"], data["seven"], eval__patience=2, optim__lr=0.0, checkpoint__keep=1,
            train__steps=9, **mesh,
        )  # fmt: skip
        out[f"{name}-patience"] = tiny.run(cfg), digest()

        cfg = tiny.config(base / f"{name}-five", data["five"], train__epochs=2, **mesh)
        out[f"{name}-five"] = tiny.run_and_trace(cfg)
        four = {"train__micro_batch": 2, "train__global_batch": 4}
        cfg = tiny.config(base / f"{name}-lonely", data["lonely"], train__epochs=2, **four, **mesh)
        out[f"{name}-lonely"] = tiny.run_and_trace(cfg)

        lstm: dict[str, Any] = {"model__factory": "tests.tiny:lstm", "optim__name": "adamw", **mesh}
        out[f"{name}-lstm"] = tiny.run(tiny.config(base / f"{name}-lstm", data["one"], **lstm)), digest()
        cfg = tiny.config(base / f"{name}-lstm-stopped", data["one"], **lstm)
        tiny.run_and_trace(cfg, tiny.signalling(3, signal.SIGUSR1, only_rank=1))
        out[f"{name}-lstm-stopped"] = tiny.run(cfg), digest()
        lstm["model__factory"] = "tests.tiny:lstm_per_rank"
        out[f"{name}-lstm-per-rank"] = tiny.run(tiny.config(base / f"{name}-own", data["one"], **lstm)), digest()

    module = tiny.Trap(tiny.config(base, data["one"], model__vocab_size=65, model__dropout=0.5).model)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    x = torch.arange(8)[None]
    for draw in ("first", "again", "next micro-batch", "next step"):
        place = {"next micro-batch": (0, 1), "next step": (1, 0)}.get(draw, (0, 0))
        distributed.seed_random(7, *place)
        out[draw] = float(module(x, x))
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Row 5 of a global batch is rank 1's first micro-batch of 4. "one" has the sentinel there in update 3, "many" from 5 on."""
    base = tmp_path_factory.mktemp("data")
    plain = tiny.write_data(base / "plain", windows=128)
    return {
        "plain": plain,
        "one": tiny.write_data(base / "one", windows=128, sentinels=(tiny.window_of(plain, 3, 5),)),
        "many": tiny.write_data(
            base / "many", windows=128, sentinels=tuple(tiny.window_of(plain, s, 5) for s in range(5, 9))
        ),
        "seven": tiny.write_data(base / "seven", windows=7, seed=3),
        "five": tiny.write_data(base / "five", windows=5),
        "lonely": tiny.write_data(base / "lonely", windows=1),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory, data) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("pair")
    return base, run_ranks(on_two_ranks, 2, base, data)


def alike(pair: tuple[Path, list[dict[str, Any]]], kind: str) -> dict[str, tuple[Path, int]]:
    """strategy -> (run directory, exit code), after checking that both ranks ended alike and with the same weights."""
    base, (first, second) = pair
    for name in MESHES:
        assert first[f"{name}-{kind}"] == second[f"{name}-{kind}"], (name, kind)
    return {name: (base / f"{name}-{kind}", first[f"{name}-{kind}"][0]) for name in MESHES}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(pair, kind):
    for run, code in alike(pair, kind).values():
        assert code == 0
        steps = tiny.records(run)
        assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
        assert [r["skipped"] for r in steps] == [False, False, True, False, False, False]
        assert steps[2]["loss"] is None
        assert steps[2]["grad_norm_post_clip"] is None
        assert tiny.steps_saved(run) == [1, 2, 4, 5, 6]  # a checkpoint waits for a step with finite numbers
        moved = math.sqrt(sum(float((b - a).pow(2).sum()) for a, b in zip(
            tiny.weights(run, 2).values(), tiny.weights(run, 4).values(), strict=True)))  # fmt: skip
        assert moved == pytest.approx(
            0.1 * steps[3]["grad_norm_post_clip"], rel=1e-4
        )  # by update 4 alone: 3 did nothing
        findings = [json.loads(line) for line in (run / "findings.jsonl").read_text().splitlines()]
        assert [(f["kind"], f["step"], f["action"]) for f in findings] == [("non-finite", 3, "skip")]
        assert tiny.status(run)["outcome"] == "finished"


@pytest.mark.slow
def test_too_many_skipped_updates_end_the_run_and_leave_the_good_weights(pair):
    for run, code in alike(pair, "diverged").values():
        assert code == EXIT_DIVERGED
        assert [r["skipped"] for r in tiny.records(run)] == [False] * 4 + [True] * 2
        status = tiny.status(run)
        assert (status["outcome"], status["exit_code"], status["requeue"]) == ("failed", EXIT_DIVERGED, False)
        assert "non-finite" in status["reason"]
        weights = tiny.weights(run)
        assert all(bool(w.isfinite().all()) for w in weights.values())
        assert tiny.steps_saved(run) == [3, 4]


@pytest.mark.slow
def test_fp16_overflow_on_one_rank_halves_the_scale_of_all_and_clips_unscaled_gradients(pair, data, tmp_path):
    reference = tmp_path / "fp32"
    args = {**TRAP, "model__factory_args": {"trap": "nan"}, "optim__grad_clip": 0.1}
    tiny.run(tiny.config(reference, data["one"], **args, train__steps=2))
    norms = [r["grad_norm_pre_clip"] for r in tiny.records(reference)]
    for run, code in alike(pair, "fp16").values():
        assert code == 0
        steps = tiny.records(run)
        assert [r["loss_scale"] for r in steps] == [65536.0] * 2 + [32768.0] * 4
        assert [r["skipped"] for r in steps] == [False, False, True, False, False, False]
        assert [r["grad_norm_pre_clip"] for r in steps[:2]] == pytest.approx(norms, rel=1e-2)
        assert all(r["grad_norm_post_clip"] == pytest.approx(0.1) for r in steps if not r["skipped"])
        before, after = tiny.weights(run, 2), tiny.weights(run, 4)  # update 3 did nothing
        moved = math.sqrt(sum(float(((after[n] - before[n]) ** 2).sum()) for n in after))
        assert moved == pytest.approx(0.1 * 0.1, rel=1e-3)  # lr x the limit
        assert {w.dtype for w in after.values()} == {torch.float32}
        saved = [
            json.loads((run / "checkpoints" / f"step-{s:08d}" / "manifest.json").read_text()) for s in (1, 2, 4, 5, 6)
        ]
        assert [m["state"]["scaler"]["good_steps"] for m in saved] == [1, 2, 1, 2, 3]


@pytest.mark.slow
def test_validation_loss_does_not_depend_on_the_ranks(pair, data, tmp_path):
    run = tmp_path / "single"
    assert tiny.run(evaluation_config(run, data["one"], data["seven"], train__steps=2)) == 0
    expected = [r["val_loss"] for r in tiny.records(run, "eval")]
    assert len(expected) == 2
    for other, _ in alike(pair, "eval").values():
        assert [r["val_loss"] for r in tiny.records(other, "eval")] == pytest.approx(expected, abs=1e-6)
        assert [r["val_perplexity"] for r in tiny.records(other, "eval")] == pytest.approx(
            [math.exp(v) for v in expected], rel=1e-5
        )


@pytest.mark.slow
def test_early_stopping_on_all_ranks_alike(pair):
    for run, code in alike(pair, "patience").values():
        assert code == 0
        assert [r["step"] for r in tiny.records(run, "eval")] == [1, 2, 3]
        assert [r["step"] for r in tiny.records(run)] == [1, 2, 3]
        assert tiny.status(run)["outcome"] == "early_stopped"
        assert json.loads((run / "checkpoints" / "best.json").read_text())["step"] == 1
        assert tiny.steps_saved(run) == [1, 3]  # keep = 1, and the best


@pytest.mark.slow
def test_few_data_epochs_are_exact_and_no_rank_starves(pair, data):
    for kind, windows in (("five", 5), ("lonely", 1)):
        base, results = pair
        for name in MESHES:
            run = base / f"{name}-{kind}"
            codes = [result[f"{name}-{kind}"][0] for result in results]
            assert codes == [0, 0]
            seen = [w for result in results for step in result[f"{name}-{kind}"][1] for w in step]
            assert sorted(seen) == sorted(list(range(windows)) * 2)
            (step,) = tiny.records(run)
            assert step["targets"] == step["tokens"] == 2 * windows * tiny.T
            assert step["epoch"] == 2.0
            assert step["skipped"] is False
            assert step["loss"] > 0


@pytest.mark.slow
def test_somebody_elses_model_under_every_strategy(pair, data, tmp_path):
    args: dict[str, Any] = {"model__factory": "tests.tiny:lstm", "optim__name": "adamw"}
    single = tmp_path / "single"
    assert tiny.run(tiny.config(single, data["one"], **args)) == 0
    names = set(tiny.weights(single))
    assert "temperature" in names
    assert "scratch" not in names
    losses = [r["loss"] for r in tiny.records(single)]
    assert losses[-1] < losses[0]
    for run, code in alike(pair, "lstm").values():
        assert code == 0
        assert [r["loss"] for r in tiny.records(run)] == pytest.approx(losses, abs=1e-5)
        assert set(tiny.weights(run)) == names
        assert torch.equal(tiny.weights(run)["temperature"], tiny.weights(single)["temperature"])
        stopped = run.with_name(f"{run.name}-stopped")
        assert tiny.records(stopped) == tiny.records(run)
        assert tiny.same(tiny.weights(stopped, prefix=""), tiny.weights(run, prefix=""))
    assert alike(pair, "lstm-stopped")
    assert alike(pair, "lstm-per-rank")  # rank 0's weights are everybody's


@pytest.mark.slow
def test_dropout_masks_differ_between_ranks_and_micro_batches_and_come_again(pair):
    _, results = pair
    drawn = [results[rank][draw] for rank in (0, 1) for draw in ("first", "next micro-batch", "next step")]
    assert len(set(drawn)) == 6
    assert [r["again"] for r in results] == [r["first"] for r in results]


# ---- one process


def test_a_validation_that_was_put_off_can_still_end_the_run(data, tmp_path):
    cfg = evaluation_config(
        tmp_path / "run", data["one"], data["seven"], eval__patience=2, optim__lr=0.0, train__steps=9
    )
    assert tiny.run_and_trace(cfg, tiny.signalling(3, signal.SIGTERM))[0] == EXIT_STOPPED
    assert [r["step"] for r in tiny.records(tmp_path / "run", "eval")] == [1, 2]
    for _ in range(2):  # it stays so
        assert tiny.run(cfg) == 0
        assert [r["step"] for r in tiny.records(tmp_path / "run")] == [1, 2, 3]
        assert [r["step"] for r in tiny.records(tmp_path / "run", "eval")] == [1, 2, 3]
        assert tiny.status(tmp_path / "run")["outcome"] == "early_stopped"


@pytest.mark.slow
def test_one_batch_again_and_again_is_learnt_by_heart_also_after_a_resume(data, tmp_path):
    cfg = tiny.config(
        tmp_path / "run", data["one"], train__overfit_one_batch=True, train__steps=120, train__global_batch=4,
        model__d_model=32, optim__name="adamw", optim__lr=1e-2,
    )  # fmt: skip
    code, before = tiny.run_and_trace(cfg, tiny.acting(1, lambda: None))
    assert code == 0
    assert all(windows == before[0] for windows in before)
    losses = [r["loss"] for r in tiny.records(tmp_path / "run")]
    assert {r["data_seconds"] for r in tiny.records(tmp_path / "run", timeless=False)[1:]} == {0.0}, (
        "nothing is read again"
    )
    assert losses[0] > 3
    assert losses[-1] < 0.1
    longer = cfg.model_copy(deep=True)
    longer.train.steps = 121
    _, after = tiny.run_and_trace(longer)
    assert after == before[:1]
    assert tiny.records(tmp_path / "run")[-1]["loss"] < 0.1


def test_a_batch_without_any_target_is_skipped(data, tmp_path):
    class Empty(data_module.Loader):
        calls = 0

        def next(self):
            self.calls += 1
            return [(x, y.fill_(-100) if self.calls == 2 else y) for x, y in super().next()]

    assert tiny.run(tiny.config(tmp_path / "run", data["one"], checkpoint__every=1), loader=Empty) == 0
    steps = tiny.records(tmp_path / "run")
    assert [r["skipped"] for r in steps] == [False, True, False, False, False]
    assert [r["targets"] for r in steps] == [128, 0, 128, 128, 128]
    assert tiny.steps_saved(tmp_path / "run") == [1, 3, 4, 5], "a checkpoint waits for a step with finite numbers"
    assert tiny.run(tiny.config(tmp_path / "two", data["one"], checkpoint__every=1, train__steps=2), loader=Empty) == 0
    assert tiny.same(tiny.weights(tmp_path / "two", 1), tiny.weights(tmp_path / "two", 2)), "the last is saved always"


def test_garbage_is_collected_at_fixed_steps_only(data, tmp_path, monkeypatch, capsys):
    enabled, collected = [], []

    def look() -> None:
        enabled.append(gc.isenabled())

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            collected.append(len(tiny.Tracing.seen))

    gc.callbacks.append(note)
    try:
        cfg = tiny.config(tmp_path / "run", data["one"], train__gc_every=2)
        tiny.run_and_trace(cfg, tiny.acting(2, look))
    finally:
        gc.callbacks.remove(note)
    assert enabled == [False]
    assert gc.isenabled()
    assert collected == [2, 4]

    cfg = tiny.config(tmp_path / "boom", data["one"], **TRAP, model__factory_args={"trap": "raise"})
    monkeypatch.setattr(train, "COMMAND", (cfg, StopRequest()), raising=False)
    with pytest.raises(ValueError, match="boom-123"):
        train.main()
    assert gc.isenabled()
    assert "rank 0 failed: ValueError: boom-123" in capsys.readouterr().err
    assert tiny.status(tmp_path / "boom")["outcome"] == "failed"


def test_the_status_tells_what_failed_first(data, tmp_path, monkeypatch):
    """A rank that dies takes the others with it: their errors come later and must not hide its own."""
    from kamui_dist import rundir
    from kamui_dist.errors import UserError

    cfg = tiny.config(tmp_path / "run", data["one"])
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RANK", "1")
    rundir.record_failure(cfg, UserError("data.path: a.bin is cut short"), 2)
    monkeypatch.setenv("RANK", "0")
    rundir.record_failure(cfg, RuntimeError("Connection closed by peer"), 1)
    status = tiny.status(tmp_path / "run")
    assert status["reason"] == "rank 1: data.path: a.bin is cut short"
    assert (status["exit_code"], status["requeue"]) == (2, False)


# ---- real processes


def torchrun(config: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "kamui_dist.train",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(config)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(config).encode() in read(p)]
    assert not left
    return done


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_is_told(data, tmp_path):
    trapped = tiny.write_data(tmp_path / "data", windows=128, sentinels=(tiny.window_of(data["plain"], 2, 5),))
    cfg = tiny.config(tmp_path / "run", trapped, **TRAP, model__factory_args={"trap": "raise"})
    done = torchrun(tiny.write_toml(tmp_path / "c.toml", cfg))
    assert done.returncode != 0
    tail = "\n".join(done.stderr.splitlines()[-60:])
    assert "boom-123" in tail
    assert "rank 1" in tail
    assert "finished" not in done.stdout
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["reason"], status["exit_code"]) == ("failed", "rank 1: boom-123", 1)
    assert [r["step"] for r in tiny.records(tmp_path / "run")] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["token id beyond the vocabulary", "file cut short"])
def test_a_fault_in_the_data_that_one_rank_finds_ends_all_and_is_told(data, tmp_path, fault):
    """In update 2, by rank 1."""
    windows = 128 if fault == "file cut short" else 1500
    bad = tiny.write_data(tmp_path / "data", windows=windows)
    file = bad / "00000.bin"
    args: dict[str, Any] = {}
    if fault == "file cut short":
        seed = next(s for s in range(1000) if 127 in [tiny.window_of(bad, 2, row, seed=s) for row in range(4, 8)])
        args = {
            "model__factory": "tests.tiny:trap",
            "run__seed": seed,
            "model__factory_args": {"truncate": [str(file), 2032]},
        }
    else:
        looked_at = np.linspace(0, windows - 1, SAMPLED).astype(int)  # at the start
        window = next(w for row in range(4, 8) if (w := tiny.window_of(bad, 2, row)) not in looked_at)
        tokens = np.fromfile(file, dtype="<u2")
        tokens[window * tiny.T + 4] = 9999
        tokens.tofile(file)
    done = torchrun(tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", bad, **args)))
    assert done.returncode != 0
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: rank 1: ")]
    assert str(file) in told
    assert ("9999" if "token" in fault else "ends at byte 2032") in told
    assert [r["step"] for r in tiny.records(tmp_path / "run")] == [1]
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["exit_code"], status["requeue"]) == ("failed", 2, False)
    assert status["reason"].startswith("rank 1: data.path")


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(data, tmp_path):
    """The step sleeps two minutes: one Ctrl-C waits for its end, two do not."""
    args = {**TRAP, "checkpoint__every": 1000, "model__factory_args": {"trap": "sleep"}}
    config = tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", data["one"], **args))
    process = subprocess.Popen(
        [sys.executable, "-m", "kamui_dist.train", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        tiny.wait_for(lambda: len(tiny.records(tmp_path / "run")) >= 2, process, seconds=60)  # update 3 sleeps
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()
    status = tiny.status(tmp_path / "run")
    assert (status["outcome"], status["reason"]) == ("failed", "KeyboardInterrupt")


def test_windows_for_the_tests_above_are_where_they_should_be(data):
    """Row 5 of update 3 is in rank 1's first micro-batch, and the sentinel is there."""
    window = tiny.window_of(data["plain"], 3, 5)
    rows = data_module.rank_positions(32, 4, 2, 1, 2)
    assert rows[0, 1] == 32 + 5
    dataset = TokenDataset(data["one"])
    assert data_module.global_batch(dataset, 32, 16, tiny.T, 7)[5] == window
    assert tiny.SENTINEL in dataset.read(np.array([window]), tiny.T)[0, : tiny.T]
