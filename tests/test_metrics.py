"""Records, throughput, MFU, TensorBoard: the numbers of published faults, and what a real run leaves behind."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kamui_dist import cli
from kamui_dist.config import Config
from kamui_dist.metrics import PEAK_FLOPS, TAGS, Metrics, forget_after, mfu, peak_flops, peak_of, read_records
from kamui_dist.plan import make_plan
from kamui_dist.state import State
from kamui_dist.validation import Validation
from kamui_dist.watch import Finding

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
FINDING = Finding("spike", 3, "m.", "c.", "a.", "warn")


# ---- throughput and MFU


def test_throughput_counts_accumulation_and_the_world() -> None:
    """F06: micro-batch 2, 16 tokens, accumulation 4, 2 ranks: 256 tokens a step; in 2 s 128 a second."""
    cfg = Config.model_validate({
        "model": {"context_length": 16}, "train": {"steps": 1, "micro_batch": 2, "grad_accum_steps": 4},
    })  # fmt: skip
    assert make_plan(cfg, 2).tokens_per_step == 256
    assert make_plan(cfg, 2).tokens_per_step / 2.0 == 128.0


def test_mfu_counts_all_ranks_on_both_sides() -> None:
    """F08."""
    assert mfu(128.0, 6e6, 1e9, 2) == pytest.approx(0.384)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA H200", 989.4e12), ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA A10G", 70e12),
        ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA H20", 148e12),
        ("NVIDIA GeForce RTX 4090", None), ("NVIDIA L40", None), ("NVIDIA A10", None), ("NVIDIA A1000", None),
        ("NVIDIA GB200", None), ("NVIDIA RTX A4000", None), ("", None), ("AMD Instinct MI300X", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_device_by_its_name(name: str, flops: float | None) -> None:
    """F09: unknown is None and never the number of another device."""
    assert peak_of(name) == flops


def test_without_a_known_peak_there_is_no_mfu() -> None:
    assert peak_flops(CPU, "bf16", None) is None
    assert peak_flops(torch.device("cuda"), "fp32", None) is None, "the table is of bf16 and fp16"
    assert peak_flops(CPU, "fp32", 1e12) == 1e12
    assert mfu(100.0, 6e6, None, 2) is None
    assert all(1e13 < flops < 1e16 for flops in PEAK_FLOPS.values())


def test_an_mfu_above_one_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = board(tmp_path)
    for step in (1, 2, 3):
        metrics.write("step", step=step, mfu=[0.5, 1.5, 1.6][step - 1])
    metrics.close()
    assert len(re.findall("mfu 1.50 .* above 1.*log.peak_flops", capsys.readouterr().out)) == 1
    assert len(read_records(tmp_path / "metrics.jsonl")) == 3


# ---- records


def board(run_dir: Path, enabled: bool = True, resumed: int = 0, tensorboard: bool = False, every: int = 10) -> Metrics:
    return Metrics(run_dir, enabled, every, total_steps=100, tensorboard=tensorboard, resumed=resumed)


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    metrics = board(tmp_path)
    metrics.write("step", step=1, loss=math.nan, lr=0.1, norm=math.inf, mfu=None, skipped=True)
    metrics.evaluations(State(step=1), [Validation("val", math.nan, 0.1, None)], improved=False)
    metrics.evaluations(State(step=1), [Validation("val", 1000.0, 0.1, None)], improved=True)
    metrics.close()
    step, bad, large = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert {k: v for k, v in step.items() if k != "time"} == {
        "kind": "step", "step": 1, "loss": None, "lr": 0.1, "norm": None, "mfu": None, "skipped": True,
    }  # fmt: skip
    assert (bad["val_loss"], bad["val_perplexity"]) == (None, None)
    assert large["val_perplexity"] > 1e300


def test_each_record_is_on_its_way_when_the_call_returns(tmp_path: Path) -> None:
    metrics = board(tmp_path)
    metrics.write("step", step=1)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1, "a killed process has lost nothing"
    metrics.close()


def test_a_line_that_a_crash_cut_is_left_out_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n'
    for cut in ('{"kind": "step", "st', "\0" * 50, "3", '{"a": 1}', "[]", '"\\u'):
        path.write_text(whole + cut)
        assert [r["step"] for r in read_records(path)] == [1, 2]
    path.write_bytes(whole.encode() + b"\xff\xfe\x80")
    assert len(read_records(path)) == 2
    metrics = board(tmp_path, resumed=2)
    metrics.write("step", step=3)
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert read_records(tmp_path / "none.jsonl") == []


def test_what_a_resume_does_again_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records: list[dict[str, Any]] = [
        {"kind": "start", "step": 0}, *({"kind": "step", "step": n} for n in (1, 2, 3, 4)), {"kind": "eval", "step": 2},
        {"kind": "checkpoint", "step": 2}, {"kind": "eval", "step": 4}, {"kind": "checkpoint", "step": 4},
        {"kind": "end", "step": 4}, {"kind": "resume", "step": 4},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    forget_after(path, 2)
    assert read_records(path) == [r for r in records if r["step"] <= 2 or r["kind"] == "resume"]
    forget_after(path, 0)
    assert [r["kind"] for r in read_records(path)] == ["start", "resume"]
    forget_after(tmp_path / "none.jsonl", 0)
    assert not (tmp_path / "none.jsonl").exists()


def test_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = board(tmp_path)
    metrics.findings([])
    assert not (tmp_path / "findings.jsonl").exists()
    metrics.findings([FINDING, FINDING])
    metrics.close()
    assert [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()] == [
        FINDING.record()
    ] * 2
    assert capsys.readouterr().out.count("watch: spike at step 3: m. Likely: c. Do: a.\n") == 2


def test_lines_of_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = board(tmp_path)
    for step in range(1, 101):
        metrics.console(step, 1.5, 1e-3, 0.25, 1234567.0, 0.5 if step == 1 else None)
    metrics.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.findall(r"step +(\d+)/100", line)[0]) for line in lines] == [1, *range(10, 101, 10)]
    assert "loss 1.5000 | lr 1.00e-03 | norm 0.250 | 1,234,567 tok/s | mfu 50.0% | eta " in lines[0]
    assert "mfu" not in lines[1]
    assert lines[-1].endswith("eta 0:00:00")
    assert len({len(line.partition("|")[0]) for line in lines}) == 1


def test_other_ranks_print_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F02."""
    metrics = board(tmp_path, enabled=False, tensorboard=True)
    metrics.write("step", step=1, loss=1.0)
    metrics.console(1, 1.0, 1.0, 1.0, 1.0, 0.5)
    metrics.evaluations(State(step=1), [Validation("val", 1.0, 1.0, None)], True)
    metrics.checkpoint(State(step=1), 1.0)
    metrics.findings([FINDING])
    metrics.say("x")
    metrics.text("config", "x")
    metrics.sync()
    metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# ---- TensorBoard

DESIGN_TAGS = {
    "train/loss", "train/lr", "train/grad_norm_pre_clip", "train/grad_norm_post_clip", "train/spike", "val/loss", "val/perplexity",
    "perf/tokens_per_sec", "perf/mfu", "perf/step_seconds", "perf/data_seconds",
}  # fmt: skip


def points(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def test_points_that_a_resume_makes_again_are_not_there_twice(tmp_path: Path) -> None:
    """F01."""
    first = board(tmp_path, tensorboard=True, every=1)
    for step in range(1, 8):
        first.write("step", step=step, loss=float(step))
    assert first.board is not None
    first.board.flush()  # and then killed: no close
    second = board(tmp_path, tensorboard=True, every=1, resumed=4)
    for step in range(5, 11):
        second.write("step", step=step, loss=100.0 + step)
    second.close()
    curve = points(tmp_path).Scalars("train/loss")
    assert [p.step for p in curve] == list(range(1, 11))
    assert [p.value for p in curve] == [1.0, 2.0, 3.0, 4.0, *(100.0 + n for n in range(5, 11))]
    first.close()


def test_null_is_no_point(tmp_path: Path) -> None:
    metrics = board(tmp_path, tensorboard=True, every=1)
    metrics.write("step", step=1, loss=math.nan, lr=1.0)
    metrics.close()
    assert points(tmp_path).Tags()["scalars"] == ["train/lr"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on bytes of a real text, by the commands that a user types."""
    place = tmp_path_factory.mktemp("real")
    text = (ROOT / "data" / "austen" / "persuasion.txt").read_text(encoding="utf-8")[:30_000]
    (place / "text.txt").write_text(text, encoding="utf-8")
    assert cli.main(["prepare", str(place / "text.txt"), "--tokenizer", "bytes", "--split", "^[A-Z]", "--val-fraction", "0.2",
                     "--out", str(place / "data")]) == 0  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.train", str(ROOT / "configs" / "char_debug.toml"), f"data.path={place}/data/train",
         f"data.val_path={place}/data/val", f"run.dir={place}/run", "train.steps=10", "eval.every=5", "eval.batches=1",
         "log.every=2", "log.peak_flops=1e12", "run.device=cpu", "run.precision=fp32", "model.context_length=32"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return place / "run"


@pytest.mark.slow
def test_a_real_run_leaves_what_the_design_says(run_dir: Path) -> None:
    events = points(run_dir)
    scalars = set(events.Tags()["scalars"])
    assert scalars >= DESIGN_TAGS
    assert any(tag.startswith("memory/") for tag in scalars)
    assert scalars <= set(TAGS.values())
    assert [p.step for p in events.Scalars("train/loss")] == [1, 2, 4, 6, 8, 10]
    assert [p.step for p in events.Scalars("val/loss")] == [5, 10]
    assert "config/text_summary" in events.Tags()["tensors"]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    steps = 10" in text

    records = read_records(run_dir / "metrics.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, 11)), "every step has a record, whatever log.every is"
    for r in steps:
        assert r.keys() >= {
            "kind", "step", "tokens", "epoch", "loss", "loss_average", "spike", "lr", "grad_norm_pre_clip", "grad_norm_post_clip",
            "skipped", "tokens_per_sec", "mfu", "step_seconds", "data_seconds",
        }  # fmt: skip
        assert r["tokens"] == r["step"] * 8 * 32
        assert r["tokens_per_sec"] * r["step_seconds"] == pytest.approx(8 * 32)
        assert 0 < r["grad_norm_post_clip"] <= min(1.0 + 1e-6, r["grad_norm_pre_clip"] + 1e-6)
        assert 0 < r["mfu"] < 1
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {r["kind"] for r in records} == {"start", "step", "eval", "checkpoint", "end"}
    for r in (r for r in records if r["kind"] == "eval"):
        assert r.keys() >= {"step", "tokens", "val_loss", "val_perplexity"}
        assert r["val_perplexity"] == pytest.approx(math.exp(r["val_loss"]))
    for p, r in zip(events.Scalars("train/loss")[1:], steps[1::2], strict=True):
        assert p.value == pytest.approx(r["loss"], rel=1e-6)


@pytest.fixture
def server(run_dir: Path) -> Iterator[str]:
    """A real TensorBoard on a free port; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(run_dir.parent), "--port", "0", "--host", "127.0.0.1",
         "--load_fast=false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=run_dir,
    )  # fmt: skip
    kill = threading.Timer(60, process.kill)
    kill.start()
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+:\d+/", line):
                yield found[0]
                break
        else:
            pytest.fail("TensorBoard did not start:\n" + "".join(lines))
    finally:
        kill.cancel()
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_tensorboard_shows_the_run(server: str) -> None:
    end = time.monotonic() + 45
    shown: dict[str, Any] = {}
    while time.monotonic() < end and not shown:
        with urllib.request.urlopen(f"{server}data/plugin/scalars/tags", timeout=10) as answer:
            shown = json.load(answer)
        time.sleep(0.2)
    [(run, tags)] = shown.items()
    assert run.endswith("run/tensorboard")
    assert set(tags) >= DESIGN_TAGS
    with urllib.request.urlopen(f"{server}data/plugin/scalars/scalars?run={run}&tag=train/loss", timeout=10) as answer:
        assert [step for _, step, _ in json.load(answer)] == [1, 2, 4, 6, 8, 10]
