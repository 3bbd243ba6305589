"""`kamui-dist diagnose`: over runs of ours what their own watch found, over logs of other trainers what they hold, and one line
for whatever cannot be read."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import cli, config, knobs, plan, sources
from kamui_dist.commands import diagnose
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.metrics import Metrics
from kamui_dist.report import console, found, logs, names, summary
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
    assert run.notes == [], "every field is of a type that is read"
    there = sources.open_datasets(run.config)[0]
    expected = plan.make_plan(run.config, 1, there.windows)
    of_data = (round(there.repeats, 6), round(there.entropy, 6))
    assert logs.facts(run) == plan.watch_facts(run.config, expected, True, *of_data), "it is told what it was told then"


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
        ("megatron.log", MEGATRON, [
            {"step": 10, "loss": 10.42, "lr": 1e-5, "grad_norm_pre_clip": 12.345, "step_seconds": 0.0125},
        ], []),
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
    monkeypatch.setattr(console, "MATCH_SECONDS", 0.3)
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


# ---- what an outsider's logs looked like

NO_LOSS = (
    " iteration        {n}/    1000 | consumed samples:          512 | elapsed time per iteration (ms): 5012.3 | learning rate: "
    "3.000000E-04 | global batch size:   512 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   {skipped} | "
    "number of nan iterations:   {nan} |\n"
)


def test_a_megatron_interval_without_a_loss_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "megatron.log"
    log.write_text(
        MEGATRON + NO_LOSS.format(n=11, skipped=0, nan=1) + NO_LOSS.format(n=12, skipped=1, nan=0)
        + NO_LOSS.format(n=13, skipped=0, nan=0)
    )  # fmt: skip
    assert [(f["kind"], f["step"]) for f in told(capsys, log)["findings"]] == [("non-finite", 11), ("non-finite", 12)]
    steps = logs.read_run(log).of("step")
    assert [(r["step"], r["loss"], r["step_seconds"]) for r in steps] == [
        (10, 10.42, 0.0125), (11, None, 5.0123), (12, None, 5.0123),
    ]  # fmt: skip


def test_megatron_validations(tmp_path: Path) -> None:
    bar = "-" * 40
    text = (
        MEGATRON
        + f"{bar}\n validation loss at iteration 10 | lm loss value: 4.2E+00 | lm loss PPL: 6.7E+01 | \n{bar}\n"
        " validation loss at iteration 20 on validation set | lm loss value: 4.1E+00 | lm loss PPL: 6.0E+01 | \n"
        " validation loss at iteration 20 on test set | lm loss value: 9.9E+00 | lm loss PPL: 2.0E+04 | \n"
    )
    assert [(r["step"], r["val_loss"]) for r in read(tmp_path, "x.log", text).of("eval")] == [(10, 4.2), (20, 4.1)]


@pytest.mark.parametrize(
    ("text", "steps", "decimal"),
    [
        ("step;loss;lr\n1;10,743;0,003\n2;10,523;0,003\n", [(1, 10.743, 0.003), (2, 10.523, 0.003)], "loss, lr"),
        ("step;loss\n1;10,743\n2;9,5\n3;9.25\n", [(1, 10.743, None), (2, 9.5, None), (3, 9.25, None)], "loss"),
        ("step\tloss\n1\t10,75\n2\t10,1\n", [(1, 10.75, None), (2, 10.1, None)], "loss"),
        ("step;loss\n999;1,5E-3\n1.000;0,25\n", [(999, 1.5e-3, None), (1000, 0.25, None)], "loss"),
        ('step,loss\n"1","10,7421"\n"2","10,523"\n', [(1, 10.7421, None), (2, 10.523, None)], "loss"),
        ('step,loss,lr\n"1,000","10.5","0,003"\n"2,000",9,"0,003"\n', [(1000, 10.5, 0.003), (2000, 9.0, 0.003)], "lr"),
        ("step\tloss\n999\t2.5\n1,000\t2.25\n", [(999, 2.5, None), (1000, 2.25, None)], ""),
        ('step,loss\n"1","1,006.5"\n"2","10,523"\n', [(1, 1006.5, None), (2, 10523.0, None)], ""),
        ('step,loss\n"1,000","10,523,000"\n', [(1000, 10523000.0, None)], ""),
    ],
)  # fmt: skip
def test_a_comma_is_a_decimal_sign_or_thousands(tmp_path: Path, text: str, steps: list[Any], decimal: str) -> None:
    run = read(tmp_path, "x.csv", text)
    assert [(r["step"], r["loss"], r.get("lr")) for r in run.of("step")] == steps
    assert [n for n in run.notes if "decimal sign" in n] == (
        [f"the comma is read as the decimal sign in {decimal}"] if decimal else []
    )


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("\rEpoch 0:   0%|###   | 1/9 [00:10<01:00, 2.3it/s, v_num=0, train_loss=10.9]\rEpoch 0:  9%|#  | 2/9 [00:10<01:00, "
         "2.3it/s, v_num=0, train_loss=nan]", ()),
        ("\r  0%|####| 0/9\riter 1: loss 10.9, time 3.00ms, mfu 38.00%\r\n\r  0%|####| 1/9\riter 2: loss nan, time 3.00ms\n", ()),
        ("it 1 loss 10.9\rit 2 loss nan\r", (r"it (?P<step>\d+) loss (?P<loss>\S+)",)),
        ("step,loss\r1,10.9\r2,nan\r", ()),
        ("step,loss\r\n1,10.9\r\n2,nan\r\n", ()),
    ],
    ids=["bar", "behind a bar", "pattern", "old table", "table"],
)  # fmt: skip
def test_a_carriage_return_ends_a_line(tmp_path: Path, text: str, patterns: tuple[str, ...]) -> None:
    (tmp_path / "x.log").write_bytes(text.encode())
    run = logs.read_run(tmp_path / "x.log", None, list(patterns))
    assert [(r["step"], r["loss"]) for r in run.of("step")] == [(1, 10.9), (2, None)]


def test_a_bar_that_nobody_knows_is_one_line_that_names_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.log").write_bytes(b"\r  0%|###   | 1/9 [00:10<01:00, ce=3]\r 9%|###   | 2/9 [00:10<01:00, ce=2]")
    assert cli.main(["diagnose", str(tmp_path / "x.log")]) == 2
    error = capsys.readouterr().err
    assert "--pattern 'iter (?P<step>" in error
    assert "universal-newline" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_stays_nan_is_two_rows(tmp_path: Path, every: int) -> None:
    """What the watch skips, and that it stops: up to the last time that it is told. One that comes back begins anew."""
    losses = ["2.5"] * 10 + ["nan"] * 200 + ["2.5"] * 50 + ["nan"] * 3
    text = "step,loss\n" + "".join(f"{every * k},{loss}\n" for k, loss in enumerate(losses))
    run = read(tmp_path, "x.csv", text)
    rows = found.gather(found.diagnose(run, knobs.Watch(), logs.facts(run)), run)
    spans = [
        (r.finding.action, r.finding.step // every, r.last // every, r.count)
        for r in rows
        if r.finding.kind == "non-finite"
    ]
    assert spans == [("skip", 10, 25, 5), ("stop", 29, 209, 13), ("skip", 260, 261, 2)]


def test_nan_that_stands_for_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.csv"
    log.write_text(
        "step,loss,val_loss\n" + "".join(f"{n},3.5,{'3.0' if n % 100 == 0 else 'NaN'}\n" for n in range(201))
    )
    run = logs.read_run(log)
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == [(0, 3.0), (100, 3.0), (200, 3.0)]
    assert "NaN is read as no value in val_loss: most rows have it" in run.notes
    assert told(capsys, log)["findings"] == []
    # A row of its own for the validation, with a loss that has no value.
    log.write_text(
        "step,loss,val_loss\n" + "1,3.5,NaN\n2,3.4,NaN\n2,NaN,3.3\n3,3.3,NaN\n4,3.2,NaN\n4,NaN,3.1\n5,3,NaN\n"
    )
    run = logs.read_run(log)
    assert steps_of(run) == [(1, 3.5), (2, 3.4), (3, 3.3), (4, 3.2), (5, 3.0)]
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == [(2, 3.3), (4, 3.1)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("step,loss\n1,3\n2,3\n" + "".join(f"{n},nan\n" for n in range(3, 40)), "step"),
        ("step,loss\n1,3\n" + "".join(f"{n},nan\n" for n in range(2, 40)), "step"),
        ("step,loss,val_loss\n1,3,3\n2,3,3\n" + "".join(f"{n},3,nan\n" for n in range(3, 40)), "eval"),
        ("step,loss,val_loss\n1,3,3\n" + "".join(f"{n},3,{'nan' if n % 5 == 0 else ''}\n" for n in range(2, 40)), "eval"),
    ],
)  # fmt: skip
def test_nan_that_is_what_came_out(tmp_path: Path, text: str, kind: str) -> None:
    run = read(tmp_path, "x.csv", text)
    assert any(r.get({"step": "loss", "eval": "val_loss"}[kind], 0) is None for r in run.of(kind))


def test_fields_of_a_wrong_type_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_runs.records()
    at = {
        kind: next(k for k, r in enumerate(made) if r["kind"] == kind) for kind in ("start", "step", "detail", "eval")
    }
    made[at["step"]] |= {"memory_gib": "x", "own_seconds": [1], "slowest_rank": 10**400, "mfu": True, "sources": 3}
    made[at["detail"]] |= {"layers": 0.5, "causality_gap": "x"}
    made[at["eval"]] |= {"set": {}, "eval_seconds": -1.0, "best": "yes"}
    made[at["start"]] |= {"world_size": 1e99, "global_batch": []}
    made[-3] = {**made[-3], "layers": {"head": 3, "blocks.0": {"grad_norm": "x", "frozen": 0.0}}}
    path = made_runs.write(tmp_path / "run", made)
    run = logs.read_run(path)
    assert run.notes == [
        "13 fields of metrics.jsonl are left out, of a wrong type: best, causality_gap, eval_seconds, global_batch, layers, "
        "memory_gib, mfu, own_seconds, set, slowest_rank, sources, world_size"
    ]
    assert len(run.records) == len(made)
    assert run.records[-3]["layers"] == {"blocks.0": {"frozen": 0.0}}
    for command in (["diagnose"], ["diagnose", "--html", str(tmp_path / "x.html")], ["report"]):
        assert cli.main([command[0], str(path), *command[1:]]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_value_in_any_field_is_no_traceback(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    made = made_runs.records(60, 40)
    value = st.recursive(
        st.none()
        | st.booleans()
        | st.floats()
        | st.integers()
        | st.sampled_from(["x", "\x1b[31m", 10**400, 1e299, 1e-320]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["loss", "grad_norm", "a"]), inner, max_size=2)
        ),
        max_leaves=4,
    )
    for _ in range(data.draw(st.integers(1, 8))):
        record = data.draw(st.sampled_from(made))
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(value)
    path = made_runs.write(tmp_path_factory.mktemp("fuzz") / "run", made)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        assert cli.main(["diagnose", str(path), "--html", str(path / "x.html")]) in (0, 2)
        assert cli.main(["report", str(path)]) in (0, 2)
    assert "\x1b" not in out.getvalue()


TITAN = (
    "[titan] 2025-05-03 12:00:00 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  9.1872  \x1b[38;2;180;60;0mgrad_norm:  1.4694  "
    "\x1b[38;2;54;234;195mmemory: 10.23GiB(10.77%)  \x1b[34mtps: 7,123  \x1b[36mtflops: 43.21  \x1b[35mmfu: 13.86%\x1b[39m\n"
    "[titan] 2025-05-03 12:00:00 - root - INFO - \x1b[33mvalidate step: 10  \x1b[32mloss:  9.2000  \x1b[38;2;54;234;195mmemory: "
    "10.23GiB(10.77%)  \x1b[34mtps: 7,123\x1b[39m\n"
)
LITGPT = (
    "Seed set to 42\n"
    "Epoch 1 | iter 100 step 25 | loss train: 2.345, val: n/a | iter time: 123.45 ms (step) remaining time: 2 days, 3:04:11\n"
    "iter 100: val loss 2.5, val time: 1032.11 ms\n"
    "Epoch 1 | iter 104 step 26 | loss train: 2.325, val: 2.500 | iter time: 123.45 ms (step)\n"
)
PRINTED = (
    "  1%|#  | 10/1000 [00:10<10:00,  2.31it/s]\r   \r{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    "{'eval_loss': '2.4', 'eval_runtime': '12.3', 'epoch': '0.1'}\n"
    "{'loss': 'nan', 'grad_norm': '1.5', 'learning_rate': '4e-05', 'epoch': '0.2'}\n"
    "{'train_runtime': 5.1, 'train_loss': 2.4, 'epoch': 0.2}\n"
)
FAIRSEQ = (
    '2020-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.2, "loss": "5.98", "num_updates": "1,100", '
    '"gnorm": "0.7"}\n'
)


@pytest.mark.parametrize(
    ("text", "steps", "evals", "note"),
    [
        (TITAN, [{"step": 10, "loss": 9.1872, "grad_norm_pre_clip": 1.4694, "memory_gib": 10.23, "tokens_per_sec": 7123.0,
                  "mfu": 0.1386}], [(10, 9.2)], ""),
        (LITGPT, [{"step": 25, "loss": 2.345}, {"step": 26, "loss": 2.325}], [(25, 2.5)], "1 of 4 lines"),
        (PRINTED, [{"step": 1, "loss": 2.5, "grad_norm_pre_clip": 1.25, "lr": 5e-5},
                   {"step": 2, "loss": None, "grad_norm_pre_clip": 1.5, "lr": 4e-5}], [(1, 2.4)], "rows are counted"),
        (FAIRSEQ, [{"step": 1100, "loss": 5.98, "grad_norm_pre_clip": 0.7}], [], "step = num_updates"),
    ],
    ids=["torchtitan", "litgpt", "dictionaries", "fairseq"],
)  # fmt: skip
@pytest.mark.parametrize("label", ["", "[rank0]:", "0: ", "2025-01-01 00:00:00 INFO "])
def test_more_consoles(tmp_path: Path, text: str, steps: list[Any], evals: list[Any], note: str, label: str) -> None:
    run = read(tmp_path, "x.log", "".join(label + line for line in text.splitlines(keepends=True)))
    assert [{k: v for k, v in r.items() if k != "kind"} for r in run.of("step")] == [pytest.approx(s) for s in steps]
    assert [(r["step"], r["val_loss"]) for r in run.of("eval")] == evals
    assert note in " ".join(run.notes)


@pytest.mark.parametrize(
    "label",
    ["[rank{}] ", "[rank{}]:", "{}: ", "2025-01-01 00:00:00 [Rank {}] INFO ", "[1,{}]<stdout>:", "[default{}]:"],
)
@pytest.mark.parametrize("patterns", [(), (r"iter (?P<step>\d+): loss (?P<loss>[^, ]+)",)])
def test_one_rank_of_several_is_read(tmp_path: Path, label: str, patterns: tuple[str, ...]) -> None:
    text = "".join(
        f"{label.format(rank)}iter {n}: loss {5 + rank}, time 300.00ms\n" for n in range(9) for rank in (3, 1, 2)
    )
    run = read(tmp_path, "x.log", text, None, *patterns)
    assert steps_of(run) == [(n, 6.0) for n in range(9)]
    assert "the log has lines of 3 ranks: those of rank 1 are read" in run.notes


def test_numbers_before_a_line_that_are_no_ranks(tmp_path: Path) -> None:
    steps = read(tmp_path, "x.log", "".join(f"{n}: loss {n}\n" for n in range(1, 9)), None, r"loss (?P<loss>\S+)")
    assert len(steps.records) == 8
    epochs = "".join(f"{epoch}: loss {epoch + k}\n" for epoch in range(3) for k in range(5))
    assert len(read(tmp_path, "y.log", epochs, None, r"loss (?P<loss>\S+)").records) == 15


def test_llmc_behind_a_label(tmp_path: Path) -> None:
    run = read(tmp_path, "x.log", "".join(f"0: {line}\n" for line in LLMC.splitlines()))
    assert [(r["step"], r["loss"]) for r in run.of("step")] == [(1, 11.0096)]
    assert [r["val_loss"] for r in run.of("eval")] == [10.5]


def test_exports_of_wandb_charts(tmp_path: Path) -> None:
    header = '"Step","calm-{0} - train/loss","calm-{0} - train/loss__MIN","calm-{0} - train/loss__MAX"'
    run = read(tmp_path, "x.csv", header.format(3) + '\n"0","3.5","1","9"\n"1","3.25","1","9"\n')
    assert steps_of(run) == [(0, 3.5), (1, 3.25)]
    both = header.format(3) + ',"calm-4 - train/loss"\n0,3.5,1,9,7\n'
    assert any("of other runs there are calm-4 - train/loss" in n for n in read(tmp_path, "y.csv", both).notes)


def test_numbers_with_units(tmp_path: Path) -> None:
    run = read(tmp_path, "x.tsv", "step\tloss\ttokens\n0.999k\t5\t0.1M\n1.001k\t4\t3.2k\n1002\t3\t1.5B\n")
    assert [(r["step"], r["tokens"]) for r in run.of("step")] == [(999, 100_000), (1001, 3200), (1002, 1_500_000_000)]
    lost = read(tmp_path, "y.csv", "step,loss,tokens\n1,5,many\n")
    assert "tokens is left out: there is no number in it" in lost.notes


def test_escape_sequences_of_a_log_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, named = tmp_path / "x.log", tmp_path / "\x1b[31mred.log"
    log.write_text("\x1b[31mhello\x1b]0;title\x07,you\n1,2\n")
    named.write_text("step,loss\n1,2\n")
    for arguments in (
        [log],
        [log, "--columns", "loss=x"],
        [named],
        [named, "--html", tmp_path / "x.html", "--by", "tokens"],
    ):
        cli.main(["diagnose", *map(str, arguments)])
        shown = capsys.readouterr()
        assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}


def test_columns_are_not_for_a_run_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(made_runs.write(tmp_path / "run", made_runs.records()))
    for arguments in (["--columns", "nope=loss"], ["--pattern", "(?P<loss>.)"]):
        assert cli.main(["diagnose", path, *arguments]) == 2
        assert f"{arguments[0]} is for the log of another trainer" in capsys.readouterr().err
    (tmp_path / "x.csv").write_text("n,ce\n1,2\n")
    assert cli.main(["diagnose", path, str(tmp_path / "x.csv"), "--columns", "step=n,loss=ce"]) == 0


def test_names_of_runs_that_are_called_the_same(tmp_path: Path) -> None:
    runs = [logs.Run("x", Path(path), []) for path in ("/a/x", "/b/x", "/b/x")]
    assert [run.name for run in logs.named(runs)] == ["/a/x", "/b/x", "/b/x (2)"]
    deep = [logs.Run("x", Path(path), []) for path in ("/q/a/x", "/q/b/x")]
    assert [run.name for run in logs.named(deep)] == ["a/x", "b/x"]
