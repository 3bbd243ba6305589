"""`kamui-dist diagnose`: over runs of ours what their own watch found, over logs of other trainers what they hold, and one line
for whatever cannot be read."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui_dist import cli, config, knobs, plan
from kamui_dist.commands import diagnose
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.metrics import Metrics
from kamui_dist.report import foreign, found, logs, names, summary
from kamui_dist.shards import TokenDataset
from tests import made_runs, tiny


def read(tmp_path: Path, name: str, text: str, columns: dict[str, str] | None = None, *patterns: str) -> logs.Run:
    (tmp_path / name).write_text(text)
    return logs.read_run(tmp_path / name, columns, list(patterns))


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Of --json: the first run."""
    assert cli.main(["diagnose", *map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out)["runs"][0])


# ---- runs of ours


@pytest.mark.slow
def test_over_a_real_run_it_finds_what_the_run_itself_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch whose loss is NaN is met once; 30 updates, then 20 more after a resume."""
    data = tiny.write_data(tmp_path / "data", windows=320, sentinels=(10,))
    run_dir = tmp_path / "run"
    for steps in (30, 50):
        cfg = tiny.config(
            run_dir, data, train__steps=steps, model__factory="tests.tiny:trap", model__factory_args={"trap": "nan"}
        )
        assert tiny.run(cfg) == 0
    capsys.readouterr()
    recorded = [json.loads(line) for line in (run_dir / "findings.jsonl").read_text().splitlines()]
    replayed = told(capsys, run_dir)["findings"]
    assert "non-finite" in {f["kind"] for f in recorded}
    assert [(f["kind"], f["step"], f["action"]) for f in replayed] == [
        (f["kind"], f["step"], f["action"]) for f in recorded
    ]
    assert not any(f["recorded"] for f in replayed)

    run = logs.read_run(run_dir)
    assert run.config is not None
    expected = plan.make_plan(run.config, 1, TokenDataset(data).windows(tiny.T))
    assert logs.facts(run) == plan.watch_facts(run.config, expected, fresh=True), (
        "the watch is told what it was told then"
    )


def test_what_only_the_run_could_see_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kinds of another judge, and updates that were undone; what the replay finds again is told once."""
    spike = {**made_runs.DISK_FULL, "kind": "spike", "action": "rollback"}
    there, gone = {**spike, "step": 150}, {**spike, "step": 777, "message": "of an update that was undone."}
    path = made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL, there, gone))
    findings = told(capsys, path)["findings"]
    assert [(f["kind"], f["step"]) for f in findings if f["recorded"]] == [("disk-full", 120), ("spike", 777)]
    assert [f["step"] for f in findings if f["kind"] == "spike" and not f["recorded"]] == [150]
    assert [f["step"] for f in findings] == sorted(f["step"] for f in findings)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healthy = made_runs.write(tmp_path / "healthy", made_runs.records(spike_at=None))
    path = made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,))
    assert cli.main(["diagnose", str(healthy), str(path)]) == 0
    out = capsys.readouterr().out
    first, _, second = out.partition("run: ")
    assert "healthy: " in first
    assert "nothing found" in first
    for word in ("spike", "150", "warn", "disk-full", "recorded by the run", "Likely: the file system is full.",
                 "Do: free some of: step-00000050."):  # fmt: skip
        assert word in second, word


def test_findings_that_come_again_and_again_are_one_row(tmp_path: Path) -> None:
    """As close as a hundredth of the run, of one kind and action."""
    run = logs.read_run(made_runs.write(tmp_path / "run", [made_runs.step(n, 0.0) for n in range(1, 1002)]))
    some = [Finding("non-finite", n, "m", "c", "a", "skip") for n in (300, 305, 315, 326)]
    other = [Finding("non-finite", 316, "m", "c", "a", "stop"), Finding("spike", 316, "m", "c", "a", "skip")]
    pairs = sorted([(f, False) for f in (*some, *other)], key=lambda pair: pair[0].step)
    rows = found.gather(pairs, run)
    assert [(r.finding.kind, r.finding.action, r.steps, r.count) for r in rows] == [
        ("non-finite", "skip", "300 - 315", 3), ("non-finite", "stop", "316", 1), ("spike", "skip", "316", 1),
        ("non-finite", "skip", "326", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 0), (("--fail-on", "note"), 1), (("--fail-on", "warn"), 1), (("--fail-on", "stop"), 0),
        (("--fail-on", "stop", "watch.on_spike=stop"), 1),
        (("--fail-on", "note", "watch.on_spike=off"), 0),
    ],
)  # fmt: skip
def test_the_exit_code_and_the_thresholds(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records())
    assert cli.main(["diagnose", str(path), *arguments]) == code


def test_the_thresholds_are_the_runs_own_unless_others_are_given(tmp_path: Path) -> None:
    run = logs.read_run(made_runs.write(tmp_path / "run", made_runs.records()))
    assert diagnose.thresholds(run, []).window == 32
    changed = diagnose.thresholds(run, ["watch.spike_z=4", "watch.on_spike=rollback"])
    assert (changed.window, changed.spike_z, changed.on_spike) == (32, 4.0, "rollback")
    (run.path / "config.toml").write_text("[watch]\nof_another_version = 1\n")
    later = logs.read_run(run.path)
    assert later.config is None
    assert "not of this version" in later.notes[0]
    assert diagnose.thresholds(later, []) == knobs.Watch()


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records())
    whole = (path / "metrics.jsonl").read_text().splitlines()
    broken = [
        *whole[:50],
        '{"kind": "step", "step": "x"}',
        whole[50][:30],
        "[" * 100_000,
        "",
        *whole[51:],
        whole[60][:20],
    ]
    (path / "metrics.jsonl").write_text("\n".join(broken))
    run = logs.read_run(path)
    assert len(run.records) == len(whole) - 1
    assert run.notes == ["3 damaged lines of metrics.jsonl are left out"], "the torn last line is what a crash leaves"


def test_records_that_are_not_for_the_report_are_no_damage(tmp_path: Path) -> None:
    """Every kind that the trainer writes, and those that a later version may."""
    path = made_runs.write(tmp_path / "run", made_runs.records())
    metrics = Metrics(path, True, 10, 100, tensorboard=False, resumed=1 << 40)
    metrics.sample(8, "It is", " a truth")
    metrics.write("of-tomorrow", step=9)
    metrics.close()
    run = logs.read_run(path)
    assert run.notes == []
    assert [r["kind"] for r in run.records[-2:]] == ["sample", "of-tomorrow"]
    assert summary.text(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": "x"}\n')
    assert logs.read_run(path).notes == ["1 damaged line of metrics.jsonl is left out"]


def test_pages_and_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,))
    html, svg, all_svg = tmp_path / "x.html", tmp_path / "main.svg", tmp_path / "pictures"
    assert cli.main(["diagnose", str(path), "--html", str(html), "--svg", str(svg)]) == 0
    assert cli.main(["diagnose", str(path), "--svg", str(all_svg), "--by", "tokens"]) == 0
    assert f"written: {html}" in capsys.readouterr().out
    assert html.read_text().startswith("<!doctype html>")
    assert "disk-full, step 120: no checkpoint" in "".join(ET.parse(svg).getroot().itertext())
    assert {p.name for p in all_svg.iterdir()} >= {"main.svg", "lr.svg", "time.svg", "update-ratio.svg"}
    assert cli.main(["diagnose", str(path), "--html", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# ---- logs of other trainers

NANOGPT = """tokens per iteration will be: 491,520
step 0: train loss 10.9886, val loss 10.9898
iter 0: loss 10.9886, time 33442.46ms, mfu -100.00%
iter 10: loss nan, time 334.46ms, mfu 41.20%
"""
LLMC = """val loss 11.009
step    1/19560 | loss 11.0096 (+nanz)| norm 15.3 (+nanz)| lr 8.57e-07 | 3056.36 ms | 42.6% bf16 MFU | 171540 tok/s
val loss 10.5
"""
MEGATRON = (
    " [2024-01-01 10:00:00] iteration       10/     100 | consumed samples:           80 | elapsed time per iteration (ms): 12.5 "
    "| learning rate: 1.000000E-05 | global batch size:     8 | lm loss: 1.042E+01 | loss scale: 1.0 | grad norm: 12.345 | \n"
)
LIGHTNING = """epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss
0,,9,,4.1,
,0.0003,9,,,
0,,19,,3.9,
0,,19,,,4.0
0,,19,4.0,,
"""
TRAINER = json.dumps({"best_metric": None, "log_history": [
    {"epoch": 0.1, "grad_norm": 1.2, "learning_rate": 5e-5, "loss": 2.5, "step": 10},
    {"epoch": 0.1, "eval_loss": 2.4, "step": 10},
    {"epoch": 0.2, "grad_norm": math.nan, "learning_rate": 4e-5, "loss": 0.0, "step": 20},
    {"train_loss": 2.2, "train_runtime": 5, "step": 20},
]}, indent=2)  # fmt: skip
WANDB = """{"_step":0,"train":{"loss":3.2,"lr":1e-3},"trainer/global_step":7}
{"_step":1,"train":{"loss":"NaN"},"trainer/global_step":8}
"""


@pytest.mark.parametrize(
    ("name", "text", "steps", "evals"),
    [
        ("nano.log", NANOGPT, [
            {"step": 0, "loss": 10.9886, "step_seconds": 33.44246, "mfu": None},
            {"step": 10, "loss": None, "step_seconds": 0.33446, "mfu": 0.412},
        ], [(0, 10.9898)]),
        ("llmc.log", LLMC, [
            {"step": 1, "loss": 11.0096, "grad_norm_pre_clip": 15.3, "lr": 8.57e-07, "mfu": 0.426, "step_seconds": 3.05636,
             "tokens_per_sec": 171540.0},
        ], [(1, 10.5)]),
        ("megatron.log", MEGATRON, [{"step": 10, "loss": 10.42, "lr": 1e-5, "grad_norm_pre_clip": 12.345}], []),
        ("metrics.csv", LIGHTNING, [{"step": 9, "loss": 4.1, "lr": 3e-4}, {"step": 19, "loss": 3.9}], [(19, 4.0)]),
        ("trainer_state.json", TRAINER, [
            {"step": 10, "loss": 2.5, "lr": 5e-5, "grad_norm_pre_clip": 1.2},
            {"step": 20, "loss": 0.0, "lr": 4e-5, "grad_norm_pre_clip": None, "skipped": True},
        ], [(10, 2.4)]),
        ("wandb.jsonl", WANDB, [{"step": 7, "loss": 3.2, "lr": 1e-3}, {"step": 8, "loss": None}], []),
        ("list.json", '[{"iter": 1, "loss": 2}]', [{"step": 1, "loss": 2.0}], []),
        ("semicolons.csv", "it;loss\n1;2.5\n", [{"step": 1, "loss": 2.5}], []),
        ("tabs.tsv", "it\tloss\n1\t2.5\n", [{"step": 1, "loss": 2.5}], []),
    ],
)  # fmt: skip
def test_formats(tmp_path: Path, name: str, text: str, steps: list[Any], evals: list[Any]) -> None:
    run = read(tmp_path, name, text)
    assert not run.ours
    assert [{k: v for k, v in r.items() if k != "kind"} for r in run.of("step")] == [pytest.approx(s) for s in steps]
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == evals
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert logs.read_run(packed).records == run.records


def test_columns_of_any_name(tmp_path: Path) -> None:
    text = "n,objective,g,held_out\n5,2.5,0.5,\n6,2.4,inf,2.6\n"
    run = read(tmp_path, "x.csv", text, {"step": "n", "loss": "objective", "norm": "g", "val_loss": "held_out"})
    assert run.records == [
        {"kind": "step", "step": 5, "loss": 2.5, "grad_norm_pre_clip": 0.5},
        {"kind": "step", "step": 6, "loss": 2.4, "grad_norm_pre_clip": None, "skipped": True},
        {"kind": "eval", "step": 6, "val_loss": 2.6, "set": "val"},
    ]
    assert "read with step = n, loss = objective, norm = g, val_loss = held_out" in run.notes


def test_lines_by_patterns_of_which_several_tell_of_one_step(tmp_path: Path) -> None:
    text = "[step=10/100]\n    train/CE loss=7.12\n    grad=1.5\n[step=20/100]\n    train/CE loss=1,006.0\n"
    run = read(tmp_path, "x.log", text, None, r"step=(?P<step>\d+)/", r"CE loss=(?P<loss>\S+)", r"grad=(?P<norm>\S+)")
    assert [(r["step"], r["loss"], r.get("grad_norm_pre_clip")) for r in run.records] == [
        (10, 7.12, 1.5),
        (20, 1006.0, None),
    ]


def test_a_log_that_a_resumed_run_appended_to(tmp_path: Path) -> None:
    rows = [(1, 5.0), (2, 4.0), (3, 9.0), (2, 4.1), (3, 3.0)]
    run = read(tmp_path, "x.csv", "step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    assert [(r["step"], r["loss"]) for r in run.records] == [(1, 5.0), (2, 4.1), (3, 3.0)]
    assert any("go back" in note for note in run.notes)


def test_without_a_step_the_rows_are_counted(tmp_path: Path) -> None:
    run = read(tmp_path, "x.csv", "loss\n5\n4\n")
    assert [r["step"] for r in run.records] == [1, 2]
    assert any("rows are counted" in note for note in run.notes)


def test_the_watch_runs_over_a_foreign_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spike of loss and norm; and with --grad-clip also that nearly every update was clipped."""
    rows = [made_runs.step(n, 0.0) for n in range(1, 301)]
    rows[249] |= {"loss": 40.0, "grad_norm_pre_clip": 50.0}
    log = tmp_path / "metrics.csv"
    log.write_text(
        "iter,train_loss,gnorm\n" + "".join(f"{r['step']},{r['loss']},{r['grad_norm_pre_clip']}\n" for r in rows)
    )
    assert [(f["kind"], f["step"]) for f in told(capsys, log)["findings"]] == [("spike", 250)]
    assert "clipping" in {f["kind"] for f in told(capsys, log, "--grad-clip", "0.1")["findings"]}
    assert cli.main(["diagnose", str(log), "--html", str(tmp_path / "x.html")]) == 0
    assert "training" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("text", "patterns", "note"),
    [
        ("step,loss\n1,5\n\n2,x\n3,3\ny,2\n", (), "2 of 4 lines were not read (the first: line 4)"),
        ('{"step":1,"loss":5}\n{"step":2,"lo\n[1]\n{"step":3,"loss":3}\n', (), "2 of 4 lines were not read (the first: line 2)"),
        ('[{"step":1,"loss":5},7,{"step":2,"loss":4}]', (), "1 of 3 entries was not read (the first: entry 2)"),
        ("hello\nit 1\nloss 5\n\nit 2\nloss ?\n", (r"it (?P<step>\d+)", r"loss (?P<loss>\S+)"),
         "2 of 5 lines were not read (the first: line 1)"),
        ('{"step":1,"loss":5}\n"' + "x" * (2 << 20) + '"\n', (), "1 of 2 lines was not read (the first: line 2)"),
        ("step,loss,lr\n1,5,\n1,,0.1\n", (), None),  # sparse
        ('{"step":1,"loss":5}\n{"step":1,"system":{"gpu":3}}\n{"step":2,"loss":NaN}\n', (), None),
    ],
    ids=["csv", "jsonl", "document", "console", "too long", "sparse", "of something else"],
)  # fmt: skip
def test_what_is_not_read_is_told(tmp_path: Path, text: str, patterns: tuple[str, ...], note: str | None) -> None:
    notes = [n for n in read(tmp_path, "x.log", text, None, *patterns).notes if "not read" in n]
    assert notes == ([note] if note else [])


def test_the_watch_does_not_say_what_another_trainer_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But of a run of ours it does: the words that are exchanged are those of the watch."""
    log = tmp_path / "x.csv"
    log.write_text("step,loss\n1,5\n2,nan\n3,nan\n")
    messages = [f["message"] for f in told(capsys, log)["findings"] if f["kind"] == "non-finite"]
    assert messages == [
        "loss nan: our watch would have skipped it.",
        "loss nan: our watch would have skipped it, 2 in a row.",
    ]
    ours = made_runs.write(
        tmp_path / "run", [*made_runs.records()[:3], made_runs.step(3, 2e3, loss=None, skipped=True)]
    )
    assert found.SKIPPED in str(told(capsys, ours)["findings"])


@pytest.mark.parametrize("ours", names.NAMES)
def test_common_names_are_known(ours: str) -> None:
    for theirs in names.NAMES[ours]:
        column = theirs.replace("*", "AdamW")
        assert names.guess(["something", column]).get(ours) == column
        assert names.guess([column.replace("/", ".")]).get(ours), "a nested object of JSONL has dots"


# ---- what cannot be read


@pytest.mark.parametrize(
    ("text", "arguments", "word"),
    [
        (None, (), "is no file, and no run directory"),
        ("", (), "no line matches, or it is empty"),
        ("step,loss\n", (), "no line matches"),
        ("a,b\n1,2\n", (), "there are a, b"),
        ("step,loss\n1,x\n", (), "no row has a number for loss"),
        ("step,train_loss\n1,2\n", ("--columns", "loss=trainloss"), "did you mean train_loss?"),
        ("step,loss\n1,2\n", ("--columns", "los=loss"), "there is no field los"),
        ("step,loss\n1,2\n", ("--columns", "loss"), "is not OURS=THEIRS"),
        ("iter 1 loss 2\n", ("--pattern", "("), "is not a regular expression"),
        ("iter 1 loss 2\n", ("--pattern", "loss"), "its named groups"),
        ("iter 1 loss 2\n", ("--pattern", "(?P<lose>.)"), "its named groups (?P<NAME>...) are lose"),
        ("iter 1 loss 2\n", ("--pattern", r"los: (?P<loss>\S+)"), "no line matches the pattern"),
        ('{"log_history": 3}', (), "no line matches"),
        ('[{"loss": 1},\n', (), "is not JSON"),
        ("[2026-01-01] it 1 loss 2\n", (), "if it is console lines, give a --pattern"),
        ("PK\x03\x04\x00\x00loss\n", (), "log is a binary file"),
        ("step,loss\n1," + "2" * 200_000 + "\n", (), "field larger than field limit"),
        ("step,loss\n1,2\n", ("watch.spike_y=3",), "unknown key watch.spike_y; did you mean watch.spike_z?"),
        ("step,loss\n1,2\n", ("watch.window=0",), "watch.window = 0"),
        ("step,loss\n1,2\n", ("--html", "x.html", "--by", "tokens"), "compare by steps"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None,
    arguments: tuple[str, ...], word: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("log").write_text(text)
    assert cli.main(["diagnose", "log", *arguments]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_damaged_gzip_directories_and_pipes(tmp_path: Path) -> None:
    packed = gzip.compress(("step,loss\n" + "1,2\n" * 5000).encode())
    for name, data in (("short.gz", packed[:-20]), ("bits.gz", packed[:30] + bytes([packed[30] ^ 255]) + packed[31:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            logs.read_run(tmp_path / name)
    with pytest.raises(UserError, match=r"it has no metrics\.jsonl"):
        logs.read_run(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="it has no"):
        logs.read_run(tmp_path)


def test_a_pattern_that_backtracks_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(a+)+$ takes 2^28 steps for this line."""
    monkeypatch.setattr(foreign, "MATCH_SECONDS", 0.3)
    with pytest.raises(UserError, match="it backtracks"):
        read(tmp_path, "x.log", "iter 3 " + "a" * 4000 + "!\n", None, "(?P<loss>(a+)+)$")
    fine = read(tmp_path, "y.log", "loss 3 " + "a" * 5_000_000 + "\nloss 4\n", None, r"loss (?P<loss>\d)")
    assert [r["loss"] for r in fine.records] == [4.0], "a line of megabytes is passed over"


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    log = tmp_path_factory.mktemp("any") / "log"
    for body in (text, "step,loss\n" + text, '{"loss": 1}\n' + text, '{"kind": "start", "step": 0}\n' + text):
        log.write_text(body, encoding="utf-8", errors="replace")
        with contextlib.suppress(UserError):
            run = logs.read_run(log)
            assert all(r["kind"] in logs.KINDS and type(r["step"]) is int for r in run.records)


def test_facts_come_from_the_config_and_the_records(tmp_path: Path) -> None:
    facts = logs.facts(logs.read_run(made_runs.write(tmp_path / "run", made_runs.records())))
    assert (facts.vocab_size, facts.steps, facts.lr, facts.grad_clip) == (512, 200, 1e-3, 1.0)
    assert (facts.windows, facts.global_batch, facts.fresh) == (100_000, 16, True)
    assert config.load(tmp_path / "run" / "config.toml", [])[0].watch.window == 32


# ---- logs that are not as one would write them


def steps_of(run: logs.Run) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in run.of("step")]


def test_a_document_on_one_long_line(tmp_path: Path) -> None:
    """trainer_state.json without indent: 20,000 entries are more than a line of JSONL may have."""
    history = [{"step": n, "loss": 2.5, "learning_rate": 5e-5, "grad_norm": 1.25} for n in range(1, 20_001)]
    history.append({"step": 20_000, "eval_loss": 2.75})
    text = json.dumps({"best_metric": None, "log_history": history})
    assert len(text) > 1 << 20
    run = read(tmp_path, "trainer_state.json", text)
    assert steps_of(run) == [(n, 2.5) for n in range(1, 20_001)]
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == [(20_000, 2.75)]
    assert len(read(tmp_path, "list.json", json.dumps(history)).records) == 20_001


def test_what_is_told_before_the_loss_of_a_step(tmp_path: Path) -> None:
    """Lightning's metrics.csv: the rate has a row of its own, with a validation between it and the loss."""
    text = (
        "epoch,lr-AdamW,step,train_loss,val_loss,grad_norm\n,0.0003,9,,,\n,,9,,,1.5\n0,,9,4.1,,\n"
        ",0.0002,19,,,\n0,,19,,4.0,\n0,,19,3.9,,\n,0.0001,29,,,\n0,,39,3.8,,\n"
    )
    run = read(tmp_path, "metrics.csv", text)
    assert run.records == [
        {"kind": "step", "step": 9, "lr": 3e-4, "grad_norm_pre_clip": 1.5, "loss": 4.1},
        {"kind": "step", "step": 19, "lr": 2e-4, "loss": 3.9},
        {"kind": "eval", "step": 19, "val_loss": 4.0, "set": "val"},
        {"kind": "step", "step": 39, "loss": 3.8},
    ]


@pytest.mark.parametrize(
    ("order", "note"),
    [(range(50, 0, -1), "newest first"), ([n * 7 % 51 for n in range(1, 51) if n * 7 % 51], "in no order")],
    ids=["newest first", "shuffled"],
)
def test_logs_in_another_order_are_sorted(tmp_path: Path, order: Any, note: str) -> None:
    rows = [f"{n},{n / 4},\n{n},,{n / 2}\n" for n in order]
    run = read(tmp_path, "x.csv", "step,loss,val_loss\n" + "".join(rows))
    assert steps_of(run) == [(n, n / 4) for n in range(1, 51)]
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == [(n, n / 2) for n in range(1, 51)]
    assert any(note in n for n in run.notes)
    assert not any("go back" in n for n in run.notes)


@pytest.mark.parametrize("first", [0, 10])
def test_steps_that_begin_anew_with_every_epoch(tmp_path: Path, first: int) -> None:
    rows = [(epoch, first + 10 * k) for epoch in range(4) for k in range(25)]
    text = "epoch,step,loss,val_loss\n" + "".join(f"{e},{s},{e + s / 1000},\n{e},{s},,{e + 1}\n" for e, s in rows)
    run = read(tmp_path, "x.csv", text)
    assert steps_of(run) == [(first + 10 * k, e + s / 1000) for k, (e, s) in enumerate(rows)]
    assert [r["step"] for r in run.of("eval")][-2:] == [first + 980, first + 990]
    assert any("begin anew with every epoch" in n for n in run.notes)
    # Without the epoch nothing can be said.
    with pytest.raises(UserError) as refused:
        read(tmp_path, "y.csv", "step,loss\n" + "".join(f"{s},{e + 1}\n" for e, s in rows))
    message = str(refused.value)
    for word in ("go back 3 times", "72 of 100 records", "--columns step=NAME", f"{first + 240}, {first}, "):
        assert word in message, message
    assert "\n" not in message


def test_an_epoch_is_no_reason_to_count_on_after_a_resume(tmp_path: Path) -> None:
    rows = [(0, 1), (0, 2), (1, 3), (1, 4), (1, 3), (1, 4), (2, 5)]
    run = read(tmp_path, "x.csv", "epoch,step,loss\n" + "".join(f"{e},{s},{k}\n" for k, (e, s) in enumerate(rows)))
    assert steps_of(run) == [(1, 0), (2, 1), (3, 4), (4, 5), (5, 6)]


def test_ranks_in_one_log(tmp_path: Path) -> None:
    """Rank 1 a step behind; and abreast."""
    rows = [row for n in range(1, 50) for row in ((n + 1, 1.0), (n, 2.0))]
    behind = read(tmp_path, "x.csv", "step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    assert steps_of(behind) == [(n, 2.0) for n in range(1, 50)]
    assert any("go back 49 times, as of several ranks" in n for n in behind.notes)
    abreast = read(tmp_path, "y.csv", "step,loss\n" + "".join(f"{n},1\n{n},2\n" for n in range(1, 50)))
    assert steps_of(abreast) == [(n, 2.0) for n in range(1, 50)]
    assert any("49 records have the step of the one before" in n for n in abreast.notes)


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_no_part_of_a_log(tmp_path: Path, packed: bool) -> None:
    for text in ('"step","loss"\n1,5\n', '{"step":1,"loss":5}\n{"step":2,"loss":4}\n', '[{"step":1,"loss":5}]'):
        data = b"\xef\xbb\xbf" + text.encode()
        (tmp_path / "log").write_bytes(gzip.compress(data) if packed else data)
        run = logs.read_run(tmp_path / "log")
        assert steps_of(run)[0] == (1, 5.0)
        assert len(run.notes) == 1, run.notes
    ours = made_runs.write(tmp_path / "run", made_runs.records()) / "metrics.jsonl"
    ours.write_bytes(b"\xef\xbb\xbf" + ours.read_bytes())
    assert logs.read_run(ours).ours
