"""Curves, figures, the page and the summary: nothing is lost on the way to a picture, and nothing in a log becomes code."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui_dist import cli, knobs
from kamui_dist.errors import UserError
from kamui_dist.findings import Finding
from kamui_dist.report import axes, charts, found, ledger, logs, page, panels, series, summary
from kamui_dist.report.drawn import Drawn
from tests import made_runs

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path, by: str = "step", first: int = 1) -> Drawn:
    run = logs.read_run(path)
    cfg = run.config.watch if run.config else knobs.Watch()
    return Drawn(run, found.gather(found.diagnose(run, cfg, logs.facts(run)), run), by, cfg.window, 1.0, first)


class Page(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (self.scripts[-1][0], data)
        else:
            self.words.append(data)


# ---- curves


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=3000), st.integers(1, 100))
def test_thinning_keeps_every_extreme(values: list[float], columns: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    tx, ty = series.thin(x, y, columns)
    assert len(tx) <= max(4 * columns, len(x) if len(x) <= 4 * columns else 0)
    assert np.all(np.diff(tx) > 0)
    assert np.array_equal(y[tx.astype(int)], ty, equal_nan=True), "points of the curve, none invented"
    if np.isfinite(y).any():
        assert (np.nanmin(ty), np.nanmax(ty)) == (np.nanmin(y), np.nanmax(y))
        for part in np.array_split(np.arange(len(y)), max(1, columns // 2)):  # parts wider than a column
            if len(x) > 4 * columns and np.isfinite(y[part]).any():
                lowest = part[np.nanargmin(y[part])]
                near = np.abs(tx - lowest) <= len(x) / columns + 1
                assert np.nanmin(ty[near]) <= y[lowest]


def test_the_moving_average_is_that_of_the_last_finite_values() -> None:
    y = np.array([1.0, 3.0, math.nan, 5.0, 7.0])
    assert series.moving_average(y, 2).tolist() == [1.0, 2.0, 2.0, 4.0, 6.0]
    assert np.isnan(series.moving_average(np.array([math.nan, 1.0]), 4)[0])


@given(st.floats(1e-9, 1e12), st.floats(1.0001, 1e6), st.integers(2, 10), st.booleans())
def test_ticks_lie_on_the_axis_and_can_be_told_apart(low: float, ratio: float, count: int, log: bool) -> None:
    scale = axes.Scale(low, low * ratio, 0.0, 100.0, log)
    ticks = scale.ticks(count)
    assert 1 <= len(ticks) <= 3 * count + 3
    assert all(low * (1 - 1e-6) <= t <= low * ratio * (1 + 1e-6) for t in ticks)
    assert ticks == sorted(set(ticks))
    labels = axes.tick_labels(ticks)
    assert len(set(labels)) == len(ticks), labels


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12_345_678, "12.3M"), (1000, "1k"), (999.96, "1k"), (0.0003, "3e-4"), (2.5, "2.5"), (-1500, "-1.5k"), (5e9, "5B"),
     (0.05, "0.05"), (123, "123")],
)  # fmt: skip
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert axes.short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (12, "12 s"),
        (59.96, "60 s"),
        (61, "1 min 1 s"),
        (3599, "1 h 00 min"),
        (3600, "1 h 00 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert axes.duration(seconds) == text


# ---- figures


def test_every_figure_of_a_run_is_a_picture_of_its_own(tmp_path: Path) -> None:
    figures = panels.one(drawn(made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,))))
    assert [f.name for f in figures] == [
        "main", "lr", "throughput", "mfu", "time", "memory", "ranks", "noise", "update-ratio", "activation-rms", "grad-norm",
        "attention-logit-max",
    ]  # fmt: skip
    for figure in figures:
        svg = ET.fromstring(charts.figure(figure, standalone=True))
        assert svg.tag == f"{SVG}svg"
        paths = [p for g in svg.iter(f"{SVG}g") if g.get("class") == "plot" for p in g]
        assert paths, figure.name
        assert all(re.fullmatch(r"[MLHVZhv0-9 .-]*", p.get("d") or "") for p in paths), "numbers, and no nan among them"


def test_the_spike_the_validation_and_the_findings_are_on_the_main_figure(tmp_path: Path) -> None:
    one = drawn(made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,)))
    kinds = {row.finding.kind: n for n, row in enumerate(one.rows, 1)}
    assert {"spike", "disk-full"} <= kinds.keys()
    svg = ET.fromstring(charts.figure(panels.main(one)))
    marks = [g for g in svg.iter(f"{SVG}g") if (g.get("class") or "").startswith("mark ")]
    at = {g.get("data-x"): g for g in marks}
    assert at["150"].find(f".//{SVG}a").get("href") == f"#finding-{kinds['spike']}"  # type: ignore[union-attr]
    assert {"100", "120"} <= at.keys(), "the resume, and what the run itself recorded"
    assert "spike, step 150" in "".join(at["150"].itertext())
    names = ["".join(g.itertext()) for g in svg.iter(f"{SVG}g") if (g.get("class") or "").startswith("key ")]
    assert {"training", "validation", "spike", "before clipping", "after clipping", "optim.grad_clip"} <= set(names)


def test_a_step_time_is_shared_out_completely(tmp_path: Path) -> None:
    [chart] = panels._step_time(drawn(made_runs.write(tmp_path / "run", made_runs.records())))
    total = sum(float(line.y.sum()) for line in chart.lines) * 200 / len(chart.lines[0].y)
    assert total == pytest.approx(200 * 1.0 + 4 * 2.0 + 4 * 0.5, rel=0.02)  # bins of one and of two updates weigh alike


# ---- the page


@pytest.mark.slow
def test_a_page_of_200_000_steps_shows_a_single_outlier(tmp_path: Path) -> None:
    """One loss of 30 among 200,000; the page stays below 3 MB."""
    few = ("loss", "lr", "grad_norm_pre_clip", "step_seconds", "tokens", "tokens_per_sec", "kind", "step", "time")
    alike = {name: value for name, value in made_runs.step(1, 1.0).items() if name in few}
    rng = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write('{"kind": "start", "step": 0, "time": 1.0}\n')
        for number in range(1, 200_001):
            loss = 30.0 if number == 123_456 else 3.0 + 3.0 * math.exp(-number / 40) + 0.02 * rng.gauss(0, 1)
            mine = {"loss": loss, "step": number, "tokens": number * 2048, "time": 1.0 + number}
            file.write(json.dumps(alike | mine) + "\n")
    text = page.page([drawn(tmp_path)])
    assert len(text.encode()) < 3e6
    [main] = [json.loads(data) for attributes, data in Page(text).scripts if '"name":"main"' in data]
    training = main["panels"][0]["lines"][0]
    assert training["y"][training["x"].index(123_456)] == 30.0
    assert len(training["x"]) <= 4 * series.COLUMNS
    [path] = re.findall(r'<path class="line c0 faint" d="([^"]+)"', text)[:1]
    heights = [float(point.split()[1]) for point in re.split("[ML]", path)[1:]]
    below = sorted(heights)[1]
    assert below - min(heights) > 30, "it towers over all others"


def test_a_page_stands_by_itself(tmp_path: Path) -> None:
    text = page.page([drawn(made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,)))])
    there = Page(text)
    ids = {a["id"] for _, a in there.elements if "id" in a}
    for tag, attributes in there.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), "nothing is fetched"
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes), "no code but the one script"
        if "href" in attributes:
            assert (attributes["href"] or "")[1:] in ids
    assert set(re.findall(r"https?://[^\"'<> ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    assert "@import" not in text
    policy = next(a["content"] or "" for tag, a in there.elements if tag == "meta" and a.get("http-equiv"))
    [code] = [data for attributes, data in there.scripts if not attributes]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    words = " ".join(there.words)
    for told in (
        "finished",
        "Findings",
        "disk-full",
        "recorded by the run",
        "goodput",
        "done again",
        "optim.lr = 0.001",
    ):
        assert told in words, told


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m\x00\u2028"\'&amp;{{}}'


def test_nothing_in_a_log_becomes_markup_or_code(tmp_path: Path) -> None:
    made = made_runs.records(names=("blocks.0", HOSTILE))
    for r in made:
        if r["kind"] == "eval":
            r["set"] = HOSTILE
        if r["kind"] in ("rollback", "end"):
            r["message"] = r["reason"] = HOSTILE
        if r["kind"] == "step":
            r["sources"] = {HOSTILE: {"tokens": 5, "loss": 2.0}}
    bad = {**made_runs.DISK_FULL, "message": HOSTILE, "cause": HOSTILE, "advice": HOSTILE, "kind": HOSTILE}
    path = made_runs.write(tmp_path / "a<b onmouseover=alert(3)>", made, (bad,))
    (path / "config.toml").write_text(f"[data]\npath = {json.dumps(HOSTILE)}\n[model]\nvocab_size = 512\n")
    one = drawn(path)
    for text in (page.page([one]), page.page([one, replace(one, first=50)])):
        there = Page(text)
        assert not [tag for tag, _ in there.elements if tag == "img"]
        assert not [name for _, attributes in there.elements for name in attributes if name.startswith("on")]
        assert [a for a, _ in there.scripts if a != {"type": "application/json", "class": "data"}] == [{}]
        for attributes, data in there.scripts:
            if attributes:
                json.loads(data)
        assert "alert(1)" in " ".join(there.words), "it is shown, as text"
        assert "\x1b" not in text
        assert "\x00" not in text
    for figure in panels.one(one):
        ET.fromstring(charts.figure(figure, standalone=True))
    assert "\x1b" not in summary.text(path)
    assert "\n</script>" not in summary.markdown(path)
    assert "<script>" not in re.sub(r"\\<", "", summary.markdown(path))


def test_runs_are_compared_over_steps_or_tokens(tmp_path: Path) -> None:
    a = drawn(made_runs.write(tmp_path / "a", made_runs.records(), lr=1e-3), "tokens")
    b = drawn(
        made_runs.write(tmp_path / "b", made_runs.records(spike_at=None), lr=3e-3), "tokens", first=1 + len(a.rows)
    )
    there = Page(page.page([a, b]))
    data = {d["name"]: d for attributes, text in there.scripts if attributes and (d := json.loads(text))}
    assert list(data) == ["main", "validation", "norm", "lr", "throughput", "mfu", "time", "memory"]
    assert data["lr"]["x"] == [0, 200 * 2048]
    assert [line["name"] for line in data["lr"]["panels"][0]["lines"]] == ["a", "b"]
    words = "|".join(w for w in there.words if w.strip())
    assert "optim.lr|0.001|0.003" in words, "how the configs differ"
    assert "optim.grad_clip" not in words, "and not where they are equal"
    tokenless = made_runs.write(tmp_path / "c", [{**r, "tokens": None} for r in made_runs.records()])
    with pytest.raises(UserError, match="compare by steps"):
        page.page([drawn(tokenless, "tokens")])


@pytest.mark.parametrize("kept", [1, 2, 3], ids=["a start", "a step", "two steps"])
def test_a_run_that_has_hardly_begun(tmp_path: Path, kept: int) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records()[:kept])
    text = page.page([drawn(path)])
    assert "The watch finds nothing wrong" in text
    assert "NaN" not in re.sub(r"<script>.*", "", text, flags=re.DOTALL)
    assert summary.text(path).startswith("run ")


# ---- the summary


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records(), (made_runs.DISK_FULL,))
    for step in (100, 150, 200):
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (path / "checkpoints" / "best.json").write_text('{"step": 200, "val_loss": 3.22}')
    text = summary.text(path)
    assert len(text.splitlines()) <= 20
    for line in (
        f"run         {path}: finished at step 200 of 200",
        "tokens      409,600 (0.03 epochs)",
        "time        4 min 59 s in 2 starts; goodput 56.8%",
        "  went to   training 56.8%, down 13.4%, done again 10.0%",
        "speed       2.05k tokens/s, 1 s a step, mfu 40.0% (median)",
        "validation  3.2202 best at step 200, 3.2202 last",
        "norm        0.5 median, 40 largest at step 150; 0.5% of updates clipped",
        "findings    disk-full: step 120 (warn)",
        "  do        free some of: step-00000050.",
        "checkpoints 3 kept: 100, 150, 200; best 200",
        "restarts    1 restart, 1 rollback (to step 150), 30 updates lost and done again",
        f"next        kamui-dist sample {path}",
    ):
        assert any(told.startswith(line) for told in text.splitlines()), f"{line}\nis not in\n{text}"


@pytest.mark.parametrize(
    ("last", "status", "told", "then"),
    [
        (
            {"kind": "end", "outcome": "failed", "reason": "watch: divergence"},
            {},
            "failed at step 200",
            "kamui-dist diagnose",
        ),
        (
            {"kind": "end", "outcome": "stopped", "reason": "SIGTERM"},
            {"outcome": "running"},
            "stopped at",
            "the same command again",
        ),
        ({"kind": "end", "outcome": "early_stopped", "reason": "x"}, {}, "early stopped at", "kamui-dist sample"),
        (None, {"outcome": "running"}, "running at", "kamui-dist status"),
        (None, {"outcome": "failed", "reason": "rank 1: boom"}, "(rank 1: boom)", "the same command again"),
        (None, {}, "unknown at", "the same command again"),
    ],
)
def test_what_to_do_next(tmp_path: Path, last: Any, status: dict[str, str], told: str, then: str) -> None:
    """The record of the end counts before status.json, which is written last."""
    made = made_runs.records()[:-1] + ([{**last, "step": 200, "time": 9000.0}] if last else [])
    path = made_runs.write(tmp_path / "run", made)
    (path / "checkpoints" / "step-00000200").mkdir(parents=True)
    (path / "status.json").write_text(json.dumps(status))
    text = summary.text(path)
    assert told in text.splitlines()[0]
    assert text.splitlines()[-1].startswith(f"next        {then}")


def test_a_run_that_crashed_names_its_newest_incident(tmp_path: Path) -> None:
    made = [r for r in made_runs.records(steps=20) if r["kind"] in ("start", "step")]
    path = made_runs.write(tmp_path / "run", made)
    (path / "status.json").write_text(json.dumps({"outcome": "failed", "reason": "boom", "step": 20}))
    assert "\nfindings    none\n" in summary.text(path)
    for age, name in ((0, "step-00000009-hang"), (100, "step-00000020-crash"), (50, "step-00000015-spike")):
        (path / "incidents" / name).mkdir(parents=True)
        (path / "incidents" / name / "report.txt").write_text(
            f"{name[14:]} at step {int(name[5:13])}, action stop\n\nmore\n"
        )
        os.utime(path / "incidents" / name, (1e9 + age, 1e9 + age))
    told = summary.text(path).splitlines()
    assert "findings    none by the watch; see the incident" in told
    assert f"incident    {path}/incidents/step-00000020-crash: crash at step 20, action stop" in told
    assert told[-1] == "next        the same command again: it begins again, there is no checkpoint yet"
    (path / "incidents" / "step-00000020-crash" / "report.txt").unlink()
    assert f"incident    {path}/incidents/step-00000020-crash" in summary.text(path).splitlines()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "checkpoint", "step": 20, "time": 1040.0}\n')
    assert "its checkpoints are gone: bring them back" in summary.text(path), "the trainer refuses to begin again"


def test_the_log_of_another_trainer_is_judged_as_diagnose_does(tmp_path: Path) -> None:
    rows = [made_runs.step(n, 0.0) for n in range(1, 301)]
    rows[249] |= {"loss": 40.0, "grad_norm_pre_clip": 50.0}
    rows[299] |= {"loss": math.nan, "grad_norm_pre_clip": math.nan}
    log = tmp_path / "metrics.csv"
    lines = [f"{r['step']},{r['loss']},{r['grad_norm_pre_clip']}" for r in rows]
    log.write_text("\n".join(["step,loss,norm", *lines[:3], "x,y,z", *lines[3:]]) + "\n")
    told = summary.text(log)
    assert "spike: step 250 (warn)" in told
    assert "non-finite: step 300 (skip)" in told
    assert "our watch would have skipped it" in told
    assert "note        1 of 301 lines was not read (the first: line 5)" in told
    assert "not finite  the gradient norm of 1 update (step 300)" in told
    assert "skipped on all ranks" not in told
    for word in ("incident", "next  "):
        assert word not in told


def test_validations_that_are_not_finite_are_told(tmp_path: Path) -> None:
    made = made_runs.records()
    evals = [r for r in made if r["kind"] == "eval"]
    blind = [{**evals[-1], "step": 200 + k, "val_loss": None} for k in (1, 2)]
    assert "last finite (2 after it were not finite)" in summary.text(
        made_runs.write(tmp_path / "run", [*made, *blind])
    )


def test_the_best_validation_is_the_one_that_the_run_names(tmp_path: Path) -> None:
    """With eval.min_improvement a lower loss need not be the best; without the field it is."""
    losses = [(50, 4.0, True), (100, 3.5, True), (150, 3.49, False), (200, 3.6, False)]
    made: list[Any] = [r for r in made_runs.records() if r["kind"] in ("start", "step")]
    evals = [{"kind": "eval", "step": s, "set": "val", "val_loss": v, "best": b, "time": 1e4} for s, v, b in losses]
    other = {"kind": "eval", "step": 200, "set": "code", "val_loss": 1.0, "time": 1e4}
    path = made_runs.write(tmp_path / "run", [*made, *evals, other])
    assert "validation  val: 3.5000 best at step 100, 3.6000 last" in summary.text(path)
    assert dict(page.facts(logs.read_run(path), None))["validation, best"] == "3.5000"
    bare = [{k: v for k, v in r.items() if k != "best"} for r in evals]
    assert "3.4900 best at step 150" in summary.text(made_runs.write(tmp_path / "bare", [*made, *bare]))


def test_the_last_loss_and_what_was_skipped(tmp_path: Path) -> None:
    def told(name: str, bad: list[int]) -> str:
        made = [r for r in made_runs.records(20, None) if r["kind"] in ("start", "step")]
        made = [{**r, "loss": None, "skipped": True} if r["kind"] == "step" and r["step"] in bad else r for r in made]
        path = made_runs.write(tmp_path / name, made)
        run = logs.read_run(path)
        assert ("loss, last finite" in dict(page.facts(run, None))) == (20 in bad)
        return summary.text(path)

    assert " last, " in told("none", [])
    assert "last finite" not in told("within", [9, 10])
    one, three = told("one", [20]), told("three", [18, 19, 20])
    assert f"{made_runs.step(19, 0.0)['loss']:.4f} last finite (1 after it was not finite), " in one
    assert f"{made_runs.step(17, 0.0)['loss']:.4f} last finite (3 after it were not finite), " in three
    assert "skipped     1 update (step 20)" in one
    assert "skipped     3 updates (steps 18 to 20)" in three
    twice = [Finding("spike", 86, "m.", "c.", "a.", "warn")] * 2
    assert summary._findings(twice)[0] == ("findings", "spike: 2 times, step 86 (warn)")


def test_many_kinds_of_findings_are_a_few_lines_and_the_gravest_is_told() -> None:
    kinds = [*(f"kind-{k}" for k in range(9)), "divergence"]
    some = [
        Finding(k, n, f"m{n}.", "c.", f"a{n}.", "stop" if k == "divergence" else "warn")
        for n, k in enumerate(kinds * 2)
    ]
    lines = summary._findings(some)
    assert lines[0] == ("findings", "divergence: 2 times, steps 9 to 19 (stop)")
    assert lines[-3:] == [
        ("", "and 5 other kinds: kamui-dist diagnose shows all"), ("  gravest", "divergence: m9."), ("  do", "a9."),
    ]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records())
    assert cli.main(["report", str(path)]) == 0
    assert capsys.readouterr().out == summary.text(path) + "\n"
    assert cli.main(["report", str(path), "--markdown"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["| | |", "|---|---|"]
    assert all(line.startswith("| ") and line.endswith(" |") for line in out[2:])
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_does_not_fail_for_want_of_its_summary(tmp_path: Path) -> None:
    path = made_runs.write(tmp_path / "run", made_runs.records())
    assert summary.closing(path) == summary.text(path)
    (path / "metrics.jsonl").write_text("")
    assert summary.closing(path).startswith("no summary: ")
    assert "\n" not in summary.closing(path)


def test_every_part_of_the_ledger_has_a_colour() -> None:
    assert page._COLOURS.keys() == ledger.PARTS.keys()
