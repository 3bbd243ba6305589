"""TensorBoard: what lies in the event files, what its own server makes of them, and what a browser shows."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard import plugin_util
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from kamui_dist import board, cli, hparams
from kamui_dist.config import Config
from kamui_dist.evaluate import Validation
from kamui_dist.findings import Finding
from kamui_dist.metrics import Metrics, read_records
from kamui_dist.plan import make_plan
from kamui_dist.state import State
from tests.test_checkpoint_chain import fill, small_disk

ROOT = Path(__file__).parent.parent


# ---- from records to points


def test_every_number_of_a_record_is_a_point() -> None:
    step = {
        "step": 8, "tokens": 80, "epoch": 0.5, "loss": 2.0, "loss_average": 2.5, "spike": False, "lr": 1e-3, "skipped": True,
        "grad_norm_pre_clip": 3.0, "grad_norm_post_clip": 1.0, "loss_scale": None, "targets": 79, "tokens_per_sec": 10.0,
        "mfu": None, "step_seconds": 8.0, "data_seconds": 0.1, "compute_seconds": 5.0, "meet_seconds": 1.0, "update_seconds": 2.0,
        "own_seconds": 5.5, "median_own_seconds": 5.0, "slowest_rank": 3, "peak_memory_gib": 2.0, "memory_gib": 1.0, "time": 1e9,
        "sources": {"web": {"tokens": 60, "loss": 2.1}, "books": {"tokens": 20, "loss": None}},
        "of_the_future": 7, "future_seconds": 0.7,
    }  # fmt: skip
    assert board.points("step", step) == {
        "train/tokens": 80, "train/epoch": 0.5, "train/loss": 2.0, "train/loss_average": 2.5, "train/spike": 0.0, "train/lr": 1e-3,
        "train/skipped": 1.0, "train/grad_norm_pre_clip": 3.0, "train/grad_norm_post_clip": 1.0, "train/targets": 79.0,
        "perf/tokens_per_sec": 10.0, "perf/step_seconds": 8.0, "perf/data_seconds": 0.1, "perf/compute_seconds": 5.0,
        "perf/meet_seconds": 1.0, "perf/update_seconds": 2.0, "perf/own_seconds": 5.5, "perf/median_own_seconds": 5.0,
        "perf/slowest_rank": 3.0, "memory/peak_gib": 2.0, "memory/now_gib": 1.0,
        "data/tokens_web": 60.0, "data/loss_web": 2.1, "data/tokens_books": 20.0,
        "train/of_the_future": 7.0, "perf/future_seconds": 0.7,
    }  # fmt: skip
    first = {"step": 8, "tokens": 80, "set": "news", "val_loss": 1.0, "val_perplexity": math.e, "best": True, "best_val_loss": 0.5,
             "eval_seconds": 3.0}  # fmt: skip
    assert board.points("eval", first) == {
        "val/loss": 1.0, "val/perplexity": math.e, "val/is_best": 1.0, "val/best_loss": 0.5, "perf/eval_seconds": 3.0,
    }  # fmt: skip
    other = {"step": 8, "tokens": 80, "set": "books", "val_loss": 1.5, "val_bits_per_byte": 0.7, "eval_seconds": 3.0}
    assert board.points("eval", other) == {"val_books/loss": 1.5, "val_books/bits_per_byte": 0.7}
    saved = {"step": 8, "tokens": 80, "save_seconds": 2.0, "stall_seconds": 0.1, "write_seconds": 1.0, "check_seconds": 0.5,
             "bytes": 100, "mb_per_second": 5.0, "aside": True}  # fmt: skip
    assert board.points("checkpoint", saved) == {
        "perf/save_seconds": 2.0, "perf/save_stall_seconds": 0.1, "perf/save_write_seconds": 1.0, "perf/save_check_seconds": 0.5,
        "perf/save_bytes": 100.0, "perf/save_mb_per_second": 5.0, "perf/save_aside": 1.0,
    }  # fmt: skip
    detail = {
        "step": 8, "layers": {"blocks.0": {"grad_norm": 1.0, "update_ratio": 1e-3, "attention_logit_max": None}, "head": {}},
        "noise_scale": 5.0, "noise_scale_tokens": 40.0, "causality_gap": 0.0, "detail_seconds": 0.2,
    }  # fmt: skip
    assert board.points("detail", detail) == {
        "layers_grad_norm/blocks.0": 1.0, "layers_update_ratio/blocks.0": 1e-3, "train/noise_scale": 5.0,
        "train/noise_scale_tokens": 40.0, "detail/causality_gap": 0.0, "perf/detail_seconds": 0.2,
    }  # fmt: skip
    resume = {"step": 8, "samples": 10, "tokens": 80, "world_size": 2, "global_batch": 4, "restarts": 1, "changed": ["x"],
              "lost_steps": 3, "lost_seconds": 4.5}  # fmt: skip
    assert board.points("resume", resume) == board.points("start", resume) == {
        "data/samples": 10.0, "perf/world_size": 2.0, "data/global_batch": 4.0, "perf/restarts": 1.0, "perf/lost_steps": 3.0,
        "perf/lost_seconds": 4.5,
    }  # fmt: skip
    assert board.points("sample", {"step": 8, "prompt": "a", "text": "b"}) == {}
    assert board.points("end", {"step": 8, "tokens": 80, "outcome": "finished", "reason": ""}) == {}


def test_every_tag_is_that_of_one_field() -> None:
    assert board.TAGS["start"] == board.TAGS["resume"]
    tags = [tag for kind, of in board.TAGS.items() if kind != "resume" for tag in of.values()]
    assert len(tags) == len(set(tags))
    assert set(hparams.RESULTS) <= set(tags)


def shown(markdown: str) -> str:
    """What the text tab shows: by TensorBoard's own conversion, with spaces as a browser counts them."""
    page = plugin_util.markdown_to_safe_html(markdown)
    lines = re.sub(r"\s*<br\s*/?>\s*", "\n", re.sub(r"\s*</p>\s*<p>\s*", "\n\n", page))
    return html.unescape(re.sub(r"<[^>]+>", "", lines)).replace("\xa0", " ").strip()


NASTY = [
    "plain", "*a* __b__ _c_ `d` **e**", "# no heading\n## nor this\nnor\n===\nthis\n---", "- no\n- list\n+ none\n1. at\n2) all",
    "    no code\n\tnor this", "<script>alert(1)</script><b>x</b> &amp; &lt; AT&T", "[a](http://b) ![c](d) <http://e>",
    "~~~\nx\n~~~\n```\ny\n```", "| a | b |\n|---|---|\n| 1 | 2 |", "> quote\n>> deeper",
    "a\\*b \\", ":: x\n: y\n[1]: http://z", "1984. was",
]  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_text_is_shown_as_it_is(text: str) -> None:
    assert shown(board.verbatim(text)) == text.replace("\t", "    ").strip()


@given(st.text("ab12 *_`#-+=.:>|<&\\~[]()!\n", max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_becomes_markup(text: str) -> None:
    assert "".join(shown(board.verbatim(text)).split()) == "".join(text.split())


# ---- event files


def events(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in events(directory).Scalars(tag)]


def layouts(directory: Path) -> list[layout_pb2.Layout]:
    points = events(directory).Tensors("custom_scalars__config__")
    return [layout_pb2.Layout.FromString(p.tensor_proto.string_val[0]) for p in points]


def texts(directory: Path, tag: str) -> list[tuple[int, str]]:
    """As the server reads them: the accumulator that scripts use forgets no texts after a restart."""
    found = plugin_event_accumulator.EventAccumulator(str(directory), tensor_size_guidance={"text": 0})
    found.Reload()
    return [(p.step, p.tensor_proto.string_val[0].decode()) for p in found.Tensors(tag)]


def config(run_dir: Path, **optim: Any) -> Config:
    return Config.model_validate({"run": {"dir": str(run_dir)}, "optim": optim, "train": {"steps": 100}})


def attempt(
    run_dir: Path, resumed: int, to: int, shift: float, outcome: str = "", lr: float = 1e-3, tensorboard: bool = True
) -> Metrics:
    """Updates resumed + 1 to `to` of 1000 tokens, losses shifted by `shift` to be told apart, a validation and a sample at every
    fifth, a finding at the last. No outcome: it is killed."""
    cfg = config(run_dir, lr=lr)
    run_dir.mkdir(parents=True, exist_ok=True)
    told = hparams.settings(cfg, make_plan(cfg, 1))
    metrics = Metrics(run_dir, True, 1, 100, tensorboard=tensorboard, resumed=resumed, hparams=told)
    metrics.write(
        "resume" if resumed else "start", step=resumed, tokens=1000 * resumed, samples=8 * resumed, world_size=1
    )
    metrics.text("config", f"    lr = {lr}")
    state = State()
    for step in range(resumed + 1, to + 1):
        state.step, state.tokens = step, 1000 * step
        metrics.write(
            "step", step=step, tokens=1000 * step, loss=step + shift, loss_average=step + shift, step_seconds=1.0
        )
        if step % 5 == 0:
            improved = state.judge(step + shift, 0.0)
            metrics.evaluations(state, [Validation("val", step + shift, 0.5, None)], improved)
            metrics.sample(step, "It was", f" the text of {shift}")
    metrics.findings([Finding("spike", to, f"of {shift}", "c.", "a.", "warn")])
    if outcome:
        metrics.write("end", step=to, tokens=1000 * to, outcome=outcome, reason="")
        metrics.close()
    return metrics


def test_files_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "tensorboard"
    place.mkdir()
    for name in (
        "events.out.tfevents.bak",
        "events.out.tfevents.",
        "events.out.tfevents.x.y.1",
        "events.out.tfevents.٣.a.1",
    ):
        (place / name).touch()
    (place / "events.out.tfevents.4000000000.host.1").touch()
    attempt(tmp_path, 0, 2, 0.0, "finished")
    assert sorted(int(p.name.split(".")[3]) for p in place.glob("events*.about")) == [4000000001, 4000000003]
    assert (place / f"events.out.tfevents.4000000002.{platform.node()}.{os.getpid()}").is_file()


def three_resumes(run_dir: Path) -> None:
    """All within a second, and in one process, as rollbacks are. Lost: 13 to 17, then 8 to 14, then 11 to 12."""
    for resumed, to, shift in ((0, 17, 0.0), (12, 14, 0.25), (7, 12, 0.5)):
        attempt(run_dir, resumed, to, shift)
    attempt(run_dir, 10, 20, 0.75, "finished")


def check_three_resumes(run_dir: Path) -> None:
    place = run_dir / "tensorboard"
    expected = [(n, n + (0.0 if n <= 7 else 0.5 if n <= 10 else 0.75)) for n in range(1, 21)]
    assert curve(place, "train/loss") == expected
    assert curve(place, "val/loss") == [(5, 5.0), (10, 10.5), (15, 15.75), (20, 20.75)]
    assert curve(place / "by_tokens", "by_tokens/train_loss") == [(1000 * n, loss) for n, loss in expected]
    assert [n for n, _ in curve(place / "by_tokens", "by_tokens/val_loss")] == [5000, 10000, 15000, 20000]
    assert [text for _, text in texts(place, "samples")] == [
        f"It was**&#124;** the text of {shift}" for shift in ("0.0", "0.5", "0.75", "0.75")
    ]
    [(step, finding)] = texts(place, "findings")
    assert (step, "of 0.75" in finding) == (20, True)
    assert [step for step, _ in texts(place, "config")] == [0, 7, 10], "one of each attempt that is still to be seen"
    assert len(layouts(place)) == 1
    assert [r["step"] for r in read_records(run_dir / "metrics.jsonl") if r["kind"] == "step"] == list(range(1, 21))


def test_after_three_resumes_everything_is_there_once(tmp_path: Path) -> None:
    """F01."""
    three_resumes(tmp_path)
    check_three_resumes(tmp_path)
    lost = [(0, 0.0), (5, 5.5), (7, 7.5), (2, 2.0)]
    assert [attempt(tmp_path / "again", *a).lost for a in ((0, 17, 0), (12, 14, 0), (7, 12, 0), (10, 20, 0))] == lost


def test_a_clock_that_is_behind_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart on another node: the server reads files in the order of their names, which begin with the time."""
    now = iter([1e9, 1e9 - 3600, 0.0, 5e8])
    for resumed, to, shift in ((0, 17, 0.0), (12, 14, 0.25), (7, 12, 0.5)):
        clock = next(now)
        monkeypatch.setattr(board, "time", types.SimpleNamespace(time=lambda clock=clock: clock))
        attempt(tmp_path, resumed, to, shift)
    attempt(tmp_path, 10, 20, 0.75, "finished")
    check_three_resumes(tmp_path)
    names = [path.name.split(".")[3] for path in (tmp_path / "tensorboard").glob("events.*")]
    assert len(set(names)) == len(names)
    assert all(0 <= int(name) - 10**9 < 60 for name in names)


def test_the_charts_have_what_the_records_have(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 5, 0.0)
    [layout] = layouts(tmp_path / "tensorboard")
    charts = {c.title: list(c.multiline.tag) for category in layout.category for c in category.chart}
    assert [c.title for c in layout.category] == ["training", "speed", "layers"]
    tags = {tag for kind in board.TAGS.values() for tag in kind.values()} | {"val_books/loss", "val_books/perplexity"}
    tags |= {
        f"layers_{what}/blocks.0" for what in ("update_ratio", "grad_norm", "activation_rms", "attention_logit_max")
    }
    matching = {title: {t for t in tags for p in patterns if re.match(p, t)} for title, patterns in charts.items()}
    assert matching["loss"] == {"train/loss", "train/loss_average", "val/loss", "val_books/loss"}
    assert matching["learning rate"] == {"train/lr"}
    assert matching["gradient norm"] == {"train/grad_norm_pre_clip", "train/grad_norm_post_clip"}
    assert matching["throughput"] == {"perf/tokens_per_sec"}
    assert matching["memory"] == {"memory/peak_gib", "memory/now_gib"}
    assert matching["update ratio by layer"] == {"layers_update_ratio/blocks.0"}
    assert all(matching.values())


def session(directory: Path) -> dict[str, Any]:
    found = events(directory).PluginTagToContent(metadata.PLUGIN_NAME)
    out = {"start": metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])}
    if metadata.SESSION_END_INFO_TAG in found:
        out["end"] = metadata.parse_session_end_info_plugin_data(found[metadata.SESSION_END_INFO_TAG]).status
    return out


def test_hparams_are_those_of_the_last_start(tmp_path: Path) -> None:
    """There from the start on; a run that stopped or crashed has no end; the one of an earlier attempt is forgotten."""
    place = tmp_path / "tensorboard"
    attempt(tmp_path, 0, 3, 0.0, lr=1e-3)
    assert session(place)["start"].hparams["optim.lr"].number_value == 1e-3
    assert "end" not in session(place)
    attempt(tmp_path, 2, 4, 0.0, "failed", lr=2e-3)
    assert (session(place)["end"], session(place)["start"].hparams["optim.lr"].number_value) == (2, 2e-3)
    attempt(tmp_path, 4, 5, 0.0, "stopped", lr=3e-3)
    assert "end" not in session(place)
    attempt(tmp_path, 5, 6, 0.0, "early_stopped", lr=4e-3)
    assert (session(place)["end"], session(place)["start"].hparams["optim.lr"].number_value) == (1, 4e-3)


def test_hparams_of_a_config() -> None:
    cfg = Config.model_validate({
        "model": {"n_heads": 4, "d_model": 64, "mlp": "swiglu"}, "optim": {"lr": 0.5}, "schedule": {"warmup": 0.1},
        "train": {"steps": 50, "micro_batch": 2, "grad_accum_steps": 3}, "run": {"seed": 7},
    })  # fmt: skip
    found = hparams.settings(cfg, make_plan(cfg, 4))
    assert found == found | {
        "optim.lr": 0.5, "optim.name": "adamw", "schedule.warmup": 5, "train.global_batch": 24, "train.micro_batch": 2,
        "train.steps": 50, "train.tokens": 50 * 24 * 256, "model.n_kv_heads": 4, "model.d_ff": 192, "run.seed": 7,
        "world_size": 4, "strategy": "DDP 4", "model.tie_embeddings": True,
    }  # fmt: skip
    assert all(isinstance(value, bool | int | float | str) for value in found.values())
    assert set(found) >= hparams.FIRST


def test_a_run_without_tensorboard_has_no_event_files(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 5, 0.0, "finished", tensorboard=False)
    assert not (tmp_path / "tensorboard").exists()


def test_events_of_a_killed_process_are_there(tmp_path: Path) -> None:
    """Nothing is closed or flushed by the test: what was written is in the file when the call returns."""
    metrics = attempt(tmp_path, 0, 3, 0.0)
    metrics.write("step", step=4, tokens=4000, loss=9.0)
    assert curve(tmp_path / "tensorboard", "train/loss")[-1] == (4, 9.0)


def test_a_disk_that_fills_ends_the_points_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = attempt(tmp_path, 0, 3, 0.0)
    assert metrics.board is not None
    metrics.board._steps._records = RecordWriter(Path("/dev/full").open("wb"))  # noqa: SIM115 - the board's to close
    for step in (4, 5):
        metrics.write("step", step=step, tokens=1000 * step, loss=1.0)
        metrics.text("config", "x")
    metrics.write("end", step=5, tokens=5000, outcome="finished", reason="")
    metrics.close()
    assert capsys.readouterr().out.count("TensorBoard's file cannot be written ([Errno 28]") == 1
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "step"] == [1, 2, 3, 4, 5]
    attempt(tmp_path, 3, 6, 0.5, "finished")
    assert [n for n, _ in curve(tmp_path / "tensorboard", "train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_start_on_a_full_disk_goes_on_without_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk("size=256k") as disk:
        (disk / "run").mkdir()
        fill(disk)
        metrics = Metrics(disk / "run", True, 1, 10, tensorboard=True, resumed=0)
        metrics.write("step", step=1, loss=1.0)
        metrics.close()
        assert metrics.board is None
    assert "TensorBoard's file cannot be written" in capsys.readouterr().out


# ---- a real run

DESIGN_TAGS = {
    "train/loss", "train/lr", "train/grad_norm_pre_clip", "train/grad_norm_post_clip", "train/spike", "val/loss", "val/perplexity",
    "perf/tokens_per_sec", "perf/mfu", "perf/step_seconds", "perf/data_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """real: a run on bytes of a real text, by the commands that a user types. resumed, other: made by `attempt`."""
    place = tmp_path_factory.mktemp("board")
    text = (ROOT / "data" / "austen" / "persuasion.txt").read_text(encoding="utf-8")[:30_000]
    (place / "text.txt").write_text(text, encoding="utf-8")
    assert cli.main(["prepare", str(place / "text.txt"), "--tokenizer", "bytes", "--split", "^[A-Z]", "--val-fraction", "0.2",
                     "--out", str(place / "data")]) == 0  # fmt: skip
    runs = place / "runs"
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.train", str(ROOT / "configs" / "char_debug.toml"), f"data.path={place}/data/train",
         f"data.val_path={place}/data/val", f"run.dir={runs}/real", "train.steps=10", "eval.every=5", "eval.batches=1",
         "log.every=2", "log.peak_flops=1e12", "run.device=cpu", "run.precision=fp32", "model.context_length=32"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    three_resumes(runs / "resumed")
    attempt(runs / "other", 0, 5, -2.0, lr=2e-3)
    return runs


@pytest.mark.slow
def test_a_real_run_leaves_what_the_design_says(logdir: Path) -> None:
    found = events(logdir / "real" / "tensorboard")
    scalars = set(found.Tags()["scalars"])
    assert scalars >= DESIGN_TAGS
    assert any(tag.startswith("memory/") for tag in scalars)
    known = {tag for kind in board.TAGS.values() for tag in kind.values()}
    assert {t for t in scalars - known if not re.match(r"(layers_\w+|detail|perf)/", t)} == set(), (
        "a field without a tag"
    )
    assert [p.step for p in found.Scalars("train/loss")] == [1, 2, 4, 6, 8, 10]
    assert [p.step for p in found.Scalars("val/loss")] == [5, 10]
    assert "    steps = 10" in texts(logdir / "real" / "tensorboard", "config")[0][1]
    assert curve(logdir / "real" / "tensorboard" / "by_tokens", "by_tokens/val_loss")[-1][0] == 10 * 8 * 32

    records = read_records(logdir / "real" / "metrics.jsonl")
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
    assert {r["kind"] for r in records} >= {"start", "step", "eval", "checkpoint", "end"}
    for r in (r for r in records if r["kind"] == "eval"):
        assert r.keys() >= {"step", "tokens", "val_loss", "val_perplexity"}
        assert r["val_perplexity"] == pytest.approx(math.exp(r["val_loss"]))
    for p, r in zip(found.Scalars("train/loss")[1:], steps[1::2], strict=True):
        assert p.value == pytest.approx(r["loss"], rel=1e-6)


# ---- its server


@contextlib.contextmanager
def serving(logdir: Path, *options: str) -> Iterator[str]:
    """A real TensorBoard on a free port; its address, once it has read the runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--host", "127.0.0.1", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=logdir,
    )  # fmt: skip
    kill = threading.Timer(240, process.kill)
    kill.start()
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"http://\S+:\d+/", line):
                break
        else:
            pytest.fail("TensorBoard did not start:\n" + "".join(lines))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never waits for us to read
        wait_for(lambda: "resumed/tensorboard" in ask(address[0] + "data/runs"))
        wait_for(lambda: "val/loss" in ask(address[0] + "data/plugin/scalars/tags").get("real/tensorboard", {}))
        yield address[0]
    finally:
        kill.cancel()
        process.kill()
        process.wait()


def wait_for(happened: Callable[[], Any], seconds: float = 90) -> Any:
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.2)
    return found


def ask(url: str, body: dict[str, Any] | None = None, **query: str) -> Any:
    request = urllib.request.Request(f"{url}?{urllib.parse.urlencode(query)}" if query else url)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


@pytest.fixture(scope="module", params=["--load_fast=auto", "--load_fast=false"])
def server(logdir: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Both readers of event files that TensorBoard has: they understand a restart in different ways."""
    with serving(logdir, request.param) as address:
        yield address + "data/"


def scalars(server: str, run: str, tag: str) -> list[tuple[int, float]]:
    return [(step, value) for _, step, value in ask(server + "plugin/scalars/scalars", run=run, tag=tag)]


@pytest.mark.slow
def test_the_server_shows_the_curves(server: str) -> None:
    tags = ask(server + "plugin/scalars/tags")
    assert set(tags["real/tensorboard"]) >= DESIGN_TAGS
    assert [n for n, _ in scalars(server, "real/tensorboard", "train/loss")] == [1, 2, 4, 6, 8, 10]
    expected = [(n, n + (0.0 if n <= 7 else 0.5 if n <= 10 else 0.75)) for n in range(1, 21)]
    assert scalars(server, "resumed/tensorboard", "train/loss") == expected
    assert scalars(server, "resumed/tensorboard", "val/loss") == [(5, 5.0), (10, 10.5), (15, 15.75), (20, 20.75)]
    over = scalars(server, "resumed/tensorboard/by_tokens", "by_tokens/train_loss")
    assert over == [(1000 * n, loss) for n, loss in expected]


@pytest.mark.slow
def test_the_server_shows_the_charts(server: str) -> None:
    layout = ask(server + "plugin/custom_scalars/layout")
    assert {c["title"]: [chart["title"] for chart in c["chart"]] for c in layout["category"]} == {
        category: list(charts) for category, charts in board.CHARTS.items()
    }
    charts = {chart["title"]: chart["multiline"]["tag"] for c in layout["category"] for chart in c["chart"]}

    def drawn(title: str) -> dict[str, Any]:
        answers = [ask(server + "plugin/custom_scalars/scalars", run="real/tensorboard", tag=p) for p in charts[title]]
        assert all(answer["regex_valid"] for answer in answers)
        return {tag: found for answer in answers for tag, found in answer["tag_to_events"].items()}

    loss = drawn("loss")
    assert set(loss) == {"train/loss", "train/loss_average", "val/loss"}
    assert [step for _, step, _ in loss["val/loss"]] == [5, 10]
    assert set(drawn("learning rate")) == {"train/lr"}
    assert set(drawn("gradient norm")) == {"train/grad_norm_pre_clip", "train/grad_norm_post_clip"}
    assert {"perf/step_seconds", "perf/data_seconds"} <= set(drawn("step time"))
    assert drawn("throughput")
    assert drawn("memory")


@pytest.mark.slow
def test_the_server_shows_the_texts(server: str) -> None:
    tags = ask(server + "plugin/text/tags")
    assert "config" in tags["real/tensorboard"]
    assert set(tags["resumed/tensorboard"]) == {"config", "findings", "samples"}
    written = ask(server + "plugin/text/text", run="resumed/tensorboard", tag="samples")
    assert [(t["step"], t["text"]) for t in written] == [
        (step, f"<p>It was<strong>&#124;</strong> the text of {shift}</p>")
        for step, shift in ((5, 0.0), (10, 0.5), (15, 0.75), (20, 0.75))
    ]
    found = ask(server + "plugin/text/text", run="resumed/tensorboard", tag="findings")
    assert found[-1]["step"] == 20
    assert "spike at step 20: of 0.75 Likely: c. Do: a." in found[-1]["text"]


@pytest.mark.slow
def test_the_server_lists_the_runs_with_their_settings_and_results(server: str) -> None:
    """Each run is one row, which is the run that has the curves, also one that was killed."""
    asked = {"experimentName": "", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
             "colParams": [], "startIndex": 0, "sliceSize": 10}  # fmt: skip
    rows = {row["name"]: row for row in ask(server + "plugin/hparams/session_groups", asked)["sessionGroups"]}
    assert set(rows) - {"real/tensorboard"} == {"resumed/tensorboard", "other/tensorboard"}
    told = {}
    for name in ("resumed", "other"):
        row = rows[f"{name}/tensorboard"]
        results = {m["name"]["tag"]: m["value"] for m in row["metricValues"]}
        status = row["sessions"][0]["status"]
        told[name] = (row["hparams"]["optim.lr"], results["val/best_loss"], results["train/loss_average"], status)
    assert told == {
        "resumed": (1e-3, 15.75, 20.75, "STATUS_SUCCESS"), "other": (2e-3, 3.0, 3.0, "STATUS_UNKNOWN"),
    }  # fmt: skip
    columns = ask(server + "plugin/hparams/experiment", {"experimentName": ""})
    assert {m["name"]["tag"] for m in columns["metricInfos"]} == set(hparams.RESULTS)
    assert {h["name"] for h in columns["hparamInfos"][: len(hparams.FIRST)]} == hparams.FIRST


# ---- a browser

Show = Callable[[str, str], bytes]


@pytest.fixture(scope="module")
def show(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Show]:
    """show("#text", "--dump-dom"): what a headless Chromium makes of that page, once its scripts have nothing left to do."""
    browser = shutil.which("chromium")
    if browser is None:
        if os.environ.get("KAMUI_REQUIRE_CHROMIUM") == "1":
            pytest.fail("KAMUI_REQUIRE_CHROMIUM=1, but there is no chromium (Debian: apt-get install chromium)")
        pytest.skip("there is no chromium (Debian: apt-get install chromium)")
    profile = tmp_path_factory.mktemp("chromium")
    with serving(logdir) as address:

        def render(place: str, option: str) -> bytes:
            done = subprocess.run(
                [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars",
                 f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=100000",
                 "--run-all-compositor-stages-before-draw", option, address + place],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=100, check=True,
            )  # fmt: skip
            return done.stdout

        yield render


def cards(page: bytes) -> dict[str, list[np.ndarray]]:
    """Of each chart of the Time Series tab, by its tag, the curves: (points, 2), in pixels. (Without WebGL they are SVG.)"""
    out = {}
    for card in page.decode().split("<scalar-card-component")[1:]:
        title = re.search(r'title="([^"]+)"', card)
        drawn = re.findall(r'<path [^>]*?d="M([-\d.eL,]+)"', card)
        if title:
            out[title[1]] = [np.array([p.split(",") for p in d.split("L")], dtype=float) for d in drawn]
    return out


def assert_drawn(curves: list[np.ndarray], points: list[tuple[int, float]]) -> None:
    """One of the curves is that of these points: through an axis from left to right and one upwards."""
    [pixels] = [c for c in curves if len(c) == len(points)]
    for axis, values in ((0, [n for n, _ in points]), (1, [value for _, value in points])):
        slope, start = np.polyfit(values, pixels[:, axis], 1)
        assert np.abs(np.polyval((slope, start), values) - pixels[:, axis]).max() < 0.01 * np.ptp(pixels[:, axis])
        assert (slope > 0) == (axis == 0)


@pytest.mark.slow
def test_a_browser_shows_the_curves(show: Show, logdir: Path) -> None:
    """Training and validation loss of a real run, and of one with three resumes, whose curve goes one way only."""
    asked = urllib.parse.urlencode({"tagFilter": "^(train|val)/(loss|lr)$", "smoothing": "0"})

    def drawn() -> dict[str, list[np.ndarray]] | None:
        found = cards(show(f"?{asked}#timeseries", "--dump-dom"))
        complete = set(found) == {"train/loss", "val/loss", "train/lr"} and len(found["train/loss"]) >= 3
        return found if complete and len(found["val/loss"]) >= 2 else None

    found = wait_for(drawn)
    records = read_records(logdir / "real" / "metrics.jsonl")
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "step" and r["step"] in (1, 2, 4, 6, 8, 10)]
    assert_drawn(found["train/loss"], losses)
    assert_drawn(found["val/loss"], [(r["step"], r["val_loss"]) for r in records if r["kind"] == "eval"])
    assert_drawn(found["train/loss"], [(n, n + (0.0 if n <= 7 else 0.5 if n <= 10 else 0.75)) for n in range(1, 21)])
    assert_drawn(found["val/loss"], [(5, 5.0), (10, 10.5), (15, 15.75), (20, 20.75)])


@pytest.mark.slow
def test_a_browser_shows_the_charts(show: Show, tmp_path: Path) -> None:
    """The Custom Scalars tab has its curves where --dump-dom does not see them: so by their colour."""
    image = pytest.importorskip("PIL.Image")

    def curves() -> bool:
        show("#custom_scalars", f"--screenshot={tmp_path / 'page.png'}")
        with image.open(tmp_path / "page.png") as page:
            pixels = np.asarray(page.convert("RGB"), dtype=int)[
                110:, 370:
            ]  # without the orange bar, and the list of runs
        red, green, blue = np.moveaxis(pixels, 2, 0)
        return int(((red > green + 80) & (red > blue + 80)).sum()) > 500  # of the first runs, orange and red

    wait_for(curves)
