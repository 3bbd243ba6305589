"""Records, throughput, MFU, console: the numbers of published faults. TensorBoard is in test_board.py."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kamui_dist import files
from kamui_dist.config import Config
from kamui_dist.metrics import PEAK_FLOPS, Metrics, forget_after, mfu, peak_flops, peak_of, read_records
from kamui_dist.plan import make_plan
from kamui_dist.state import State
from kamui_dist.validation import Validation
from kamui_dist.watch import Finding

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
    assert (bad["best"], large["best"]) == (False, True)


def test_non_finite_numbers_are_null_at_every_depth(tmp_path: Path) -> None:
    """A look into the layers of a model that has diverged."""
    metrics = board(tmp_path, tensorboard=True)
    metrics.write("detail", step=1, layers={"a": {"x": math.inf, "y": 1.0}, "b": {}}, list=[1, math.nan, [-math.inf]])
    metrics.close()
    [record] = read_records(tmp_path / "metrics.jsonl")
    assert record["layers"] == {"a": {"x": None, "y": 1.0}, "b": {}}
    assert record["list"] == [1, None, [None]]


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
        {"kind": "rollback", "step": 4}, {"kind": "end", "step": 4}, {"kind": "resume", "step": 4}, {"kind": "sample", "step": 4},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert forget_after(path, 4) == (0, 0.0)
    assert read_records(path) == records
    assert forget_after(path, 2) == (2, 0.0)
    assert read_records(path) == [r for r in records if r["step"] <= 2 or r["kind"] in ("rollback", "resume")]
    assert forget_after(path, 0) == (2, 0.0)
    assert [r["kind"] for r in read_records(path)] == ["start", "rollback", "resume"]
    assert forget_after(tmp_path / "none.jsonl", 0) == (0, 0.0)
    assert not (tmp_path / "none.jsonl").exists()


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    """Updates, and the seconds that the training thread spent on them: not what a thread wrote aside."""
    first = board(tmp_path)
    assert first.lost == (0, 0.0)
    for step in range(1, 6):
        first.write("step", step=step, step_seconds=None if step == 5 else 2.0**step)
        if step in (2, 4):
            first.write("eval", step=step, val_loss=1.0, eval_seconds=100.0)
            first.checkpoint(State(step=step), 500.0, stall_seconds=1000.0, write_seconds=300.0, check_seconds=0.0, bytes=1,
                             mb_per_second=1.0, aside=False)  # fmt: skip
    first.close()
    second = board(tmp_path, resumed=2)
    assert second.lost == (3, 2.0**3 + 2.0**4 + 100.0 + 1000.0)
    second.close()
    assert board(tmp_path, resumed=2).lost == (0, 0.0)
    assert board(tmp_path, enabled=False, resumed=0).lost == (0, 0.0)


def test_findings_that_led_to_a_rollback_stay(tmp_path: Path) -> None:
    """The others are found again when their updates are done again; the data of these are not seen again."""
    path = tmp_path / "findings.jsonl"
    found = [{"kind": "spike", "step": n, "action": a} for n, a in ((1, "warn"), (5, "warn"), (6, "rollback"))]
    path.write_text("".join(json.dumps(r) + "\n" for r in found))
    board(tmp_path, resumed=3).close()
    assert [r["step"] for r in read_records(path)] == [1, 6]


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


def test_a_sample_is_a_record_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = board(tmp_path)
    metrics.sample(7, "", None)
    metrics.sample(8, "It was\n", " a truth\n\nuniversally " + "long " * 50)
    metrics.close()
    [record] = read_records(tmp_path / "metrics.jsonl")
    assert record == record | {"kind": "sample", "step": 8, "prompt": "It was\n"}
    assert record["text"].startswith(" a truth\n\nuniversally long")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("sample: step 8 | ...It was | a truth universally long long ")
    assert len(line) < 200


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
    metrics.sample(1, "x", "y")
    metrics.sync()
    metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_records_that_somebody_has_spoilt_are_passed_over(tmp_path):
    """A start must not fail for them: they are for people."""
    path = tmp_path / "metrics.jsonl"
    spoilt: list[dict[str, Any]] = [
        {"step": None},
        {"step": "7"},
        {"step": 2.5},
        {"step": 9, "step_seconds": "x"},
        {"step": 8, "step_seconds": 2.0},
        {"step": 3},
    ]
    path.write_text("".join(json.dumps({"kind": "step", **r}) + "\n" for r in spoilt))
    assert forget_after(path, 5) == (2, 2.0)
    assert read_records(path) == [{"kind": "step", "step": 3}]


# ---- somebody changes the file while it is written


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def edited(path: Path) -> None:
    """As sed -i, which reads before the last two records and renames after them."""
    lines = path.read_text().splitlines(keepends=True)[:-2]
    beside = path.with_name("sedX")
    beside.write_text("".join(lines).replace('"loss"', '"LOSS"'))
    beside.rename(path)


def edited_all(path: Path) -> None:
    path.with_name("sedX").write_text(path.read_text().replace('"loss"', '"LOSS"'))
    path.with_name("sedX").rename(path)


def saved_in_place(path: Path) -> None:
    """As an editor that has loaded it before the last two records."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


def cut_in_a_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def moved_away(path: Path) -> None:
    path.rename(path.with_name("old"))


def another_file(path: Path) -> None:
    path.unlink()
    path.write_text('{"kind": "step", "step": 1}')  # without an end of line


def emptied(path: Path) -> None:
    path.write_text("")


LEFT: list[tuple[Callable[[Path], None], list[int]]] = [
    (edited, [1, 2, 3, 4, 5, 6]), (edited_all, [1, 2, 3, 4, 5, 6]), (saved_in_place, [1, 2, 3, 4, 5, 6]),
    (moved_away, [3, 4, 5, 6]), (another_file, [1, 3, 4, 5, 6]), (emptied, [3, 4, 5, 6]), (Path.unlink, [3, 4, 5, 6]),
]  # fmt: skip


@pytest.mark.parametrize("end", ["sync", "close"])
@pytest.mark.parametrize(("act", "left"), LEFT, ids=lambda x: getattr(x, "__name__", ""))
def test_no_record_is_lost_or_twice_where_the_file_was_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], act: Callable[[Path], None], left: list[int], end: str
) -> None:
    """Records 1 and 2 were on the disk at the last checkpoint: what becomes of them is up to whoever changed the file."""
    path = tmp_path / "metrics.jsonl"
    metrics = board(tmp_path)
    for step in (1, 2, 3, 4):
        metrics.write("step", step=step, loss=1.0)
        if step == 2:
            metrics.sync()
    act(path)
    metrics.write("step", step=5, loss=1.0)
    if end == "sync":
        metrics.sync()
    metrics.write("step", step=6, loss=1.0)
    metrics.close()
    assert steps(path) == left
    assert (
        capsys.readouterr().err.count(f"warning: {path}: it was replaced, cut or removed while the run wrote it") == 1
    )


def test_a_line_that_was_cut_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = board(tmp_path)
    for step in (1, 2):
        metrics.write("step", step=step)
    cut_in_a_line(path)
    metrics.sync()
    metrics.close()
    assert [r["step"] for r in read_records(path)] == [1, 2]


def test_a_line_that_somebody_adds_is_no_replacement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = board(tmp_path)
    metrics.write("step", step=1)
    with path.open("a") as file:
        file.write('{"kind": "note", "step": 1}\n')
    metrics.write("step", step=2)
    metrics.sync()
    metrics.write("step", step=3)
    metrics.close()
    assert steps(path) == [1, 1, 2, 3]
    assert capsys.readouterr().err == ""


def test_what_cannot_be_written_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory in place of the file, for a while; of the findings too, which have no file before the first."""
    path = tmp_path / "metrics.jsonl"
    metrics = board(tmp_path)
    metrics.write("step", step=1)
    path.unlink()
    for name in ("metrics.jsonl", "findings.jsonl"):
        (tmp_path / name).mkdir()
    metrics.sync()
    metrics.write("step", step=2)
    metrics.findings([FINDING])
    metrics.sync()
    for name in ("metrics.jsonl", "findings.jsonl"):
        (tmp_path / name).rmdir()
    metrics.write("step", step=3)
    metrics.sync()
    metrics.close()
    assert steps(path) == [1, 2, 3]
    assert steps(tmp_path / "findings.jsonl") == [FINDING.step]
    assert capsys.readouterr().err.count("Is a directory") == 2


def test_many_records_without_a_checkpoint_are_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MANY_BYTES", 1000)
    metrics = board(tmp_path)
    for step in range(100):
        metrics.write("step", step=step, loss=1.0)
        assert len(metrics.file._recent) < 1200
    metrics.close()
    assert steps(tmp_path / "metrics.jsonl") == list(range(100))


def test_a_file_that_could_not_be_written_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, 1)
    with monkeypatch.context() as here:
        here.setattr(files.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            files.write_json(path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "1\n"
    (tmp_path / ".b.json.tmp" / "x").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        files.write_json(tmp_path / "b.json", 1)
    assert (tmp_path / ".b.json.tmp" / "x").is_dir(), "it is not ours"
