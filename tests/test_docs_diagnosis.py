"""docs/diagnosis.md: its table, its pictures and what it quotes are those of the code; its commands are run, its keys exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kamui_dist import cli, config, findings, knobs, rules_start
from kamui_dist.findings import Finding
from kamui_dist.report import drawn, found, logs, panels
from tests import made_runs
from tests.failing import RUNS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def images(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)


def one_line(text: str) -> str:
    return " ".join(text.split())


def captions(picture: Path) -> str:
    texts = [t.text or "" for t in ET.parse(picture).getroot().iter(f"{SVG}text") if t.get("class") == "caption"]
    return one_line(" ".join(texts))


def commands() -> list[str]:
    """Every command on the page: lines of its blocks, and what stands in backticks."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    texts = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", PAGE)
    return [text for text in texts if re.match(r"(kamui-dist|python|pytest|docs/|launch/)\b", text)]


def test_the_table_is_that_of_the_code() -> None:
    assert findings.table() in PAGE, "python -m kamui_dist.findings prints what has to stand there"


def test_every_kind_that_can_be_shown_is_shown() -> None:
    sections = dict(re.findall(r"^### ([\w-]+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
    expected = {run.expected for run in RUNS.values() if run.expected}
    assert set(sections) & set(findings.KINDS) == expected
    for kind in expected:
        runs = [Path(image).stem for image in images(sections[kind])]
        assert runs, kind
        assert {RUNS[name].expected for name in runs} == {kind}
    script = (ROOT / "docs" / "images" / "diagnosis.sh").read_text(encoding="utf-8")
    made = re.findall(r"^all=\((.*?)\)$", script, re.MULTILINE | re.DOTALL)[0].split()
    assert {Path(image).stem for image in images(PAGE) if "/diagnosis/" in image} == set(made)


def test_the_pictures_are_there_small_and_by_themselves() -> None:
    for directory, text in ((ROOT / "docs", PAGE), (ROOT, README)):
        for image in images(text):
            path = directory / image
            assert path.is_file(), image
            assert path.stat().st_size < (60_000 if path.suffix == ".svg" else 250_000), image
            if path.suffix == ".svg":
                svg = path.read_text(encoding="utf-8")
                assert ET.fromstring(svg).tag == f"{SVG}svg"
                assert "prefers-color-scheme: dark" in svg
                assert not re.search(r"<script|<image|@import|@font-face|url\((?!#)", svg), image
                assert set(re.findall(r"https?://[^\"'<> ]*", svg)) == {SVG.strip("{}")}


def test_what_is_said_on_the_page_is_what_the_pictures_say() -> None:
    told = re.findall(
        r"\((images/diagnosis/[\w-]+\.svg)\)\n\n\*\*Broken\*\*: .*?\*\*Said\*\*: \"(.*?)\"", PAGE, re.DOTALL
    )
    assert len(told) == sum("/diagnosis/" in image for image in images(PAGE)) - 1, "all but that of the rollback"
    for image, said in told:
        run = RUNS[Path(image).stem]
        assert re.search(
            rf"\d {run.expected}, step [\d, -]+: {re.escape(one_line(said))}", captions(ROOT / "docs" / image)
        )
    [line] = re.findall(r"^watch: (.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    [(step, message)] = re.findall(
        r"divergence, step (\d+): (.*?) 3 clipping", captions(ROOT / "docs/images/diagnosis/lr-x100.svg")
    )
    kind = findings.KINDS["divergence"]
    assert one_line(line) == str(Finding("divergence", int(step), message, kind.cause, kind.advice, "warn"))


def test_the_line_of_the_readme_and_the_number_of_kinds() -> None:
    sign = rules_start.gap({"causality_gap": 0.015})
    assert sign is not None
    [line] = re.findall(r"^watch: (.*?), \.\.\.\n```", README, re.MULTILINE | re.DOTALL)
    assert str(Finding("leak", 1, sign.message, sign.cause, sign.advice, "warn")).startswith(one_line(line))
    kinds = [name for name in knobs.Watch.model_fields if name.startswith("on_")]
    assert f"It knows {len(kinds)} such things" in README
    assert [f"on_{kind.replace('-', '_')}" in kinds for kind in findings.KINDS] == [True] * 16 + [False] * 8
    assert "the first sixteen" in PAGE


def test_the_keys_and_their_defaults() -> None:
    sections = "|".join(config.Config.model_fields)
    for text in (PAGE, README):
        for key in re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z][a-z_]*[a-z])(?![\w(])", text):
            assert key in config.KEYS or key == "watch.observe", key
    for key, default in re.findall(r"`(?:watch|log)\.(\w+)` \(([\d.]+)\)", PAGE):
        fields = knobs.Watch.model_fields if key in knobs.Watch.model_fields else knobs.Log.model_fields
        assert float(default) == fields[key].default, key
    for action in findings.ACTIONS:
        assert f"`{action}`" in PAGE


def test_the_commands_exist() -> None:
    seen = commands()
    assert len(seen) > 20
    for command in seen:
        words = shlex.split(command, comments=True)
        if words[0] == "kamui-dist":
            assert words[1] in cli.COMMANDS, command
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), command
            if words[2] == "kamui_dist.train":
                config.load(ROOT / "configs" / "austen_tiny.toml", [w for w in words[4:] if not w.startswith("-")])
        elif words[0] == "pytest":
            [file] = [w for w in words if w.endswith(".py")]
            assert words[words.index("-k") + 1] in (ROOT / file).read_text(encoding="utf-8"), command
        else:
            assert (ROOT / words[0]).is_file(), command


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lr in (("demo", 1e-3), ("a", 1e-3), ("b", 2e-3)):
        spike = {**made_runs.DISK_FULL, "kind": "spike", "step": 150}
        made_runs.write(tmp_path / "runs" / name, made_runs.records(), (spike,), lr=lr)
    steps = [r for r in made_runs.records() if r["kind"] == "step"]
    rows = [(r["step"], r["loss"], r["grad_norm_pre_clip"]) for r in steps]
    write = {
        "metrics.csv": ["epoch,step,train_loss_step,val_loss", *(f"0,{n},{loss}," for n, loss, _ in rows)],
        "mine.csv": ["n,ce,gn", *(f"{n},{loss},{norm}" for n, loss, norm in rows)],
        "mine.log": [f"it {n} loss {loss}" for n, loss, _ in rows],
        "nanogpt.log": [f"iter {n}: loss {loss:.4f}, time 310.21ms, mfu 30.12%" for n, loss, _ in rows],
        "trainer_state.json": [json.dumps({"log_history": [{"step": n, "loss": v, "grad_norm": g} for n, v, g in rows]})],
    }  # fmt: skip
    for name, lines in write.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    blocks = re.findall(r"^<!-- run -->\n```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    asked = [line for block in blocks for line in block.splitlines()]
    assert len(asked) == 13
    for line in asked:
        _, *words = shlex.split(line, comments=True)
        assert cli.main(words) == 0, line
        told = capsys.readouterr().out
        assert "spike" in told, line  # each of these runs has one
    assert {p.name for p in tmp_path.iterdir()} == {"runs", *write, "report.html", "curves.svg", "both.html"}


# ---- what the pictures show


def test_a_finding_on_time_or_memory_brings_its_curve(tmp_path: Path) -> None:
    run = logs.read_run(made_runs.write(tmp_path / "run", made_runs.records(spike_at=None)))
    titles = {
        "data-starvation": "where a step's time goes", "slow-rank": "own time of ranks", "throughput-drop": "throughput",
        "memory-growth": "memory", "spike": None,
    }  # fmt: skip
    for kind, title in titles.items():
        rows = found.gather([(Finding(kind, 60, "m.", "c.", "a.", "warn"), False)], run)
        charts = [chart.title for chart in panels.main(drawn.Drawn(run, rows)).charts]
        assert charts == ["loss", "gradient norm", *([title] if title else [])]


def test_the_finding_that_a_rollback_followed_is_told_although_its_step_came_again(tmp_path: Path) -> None:
    """And once, where the replay finds it too: a rollback that could not be."""
    spike = {**made_runs.DISK_FULL, "kind": "spike", "action": "rollback"}
    undone, seen = {**spike, "kind": "divergence", "step": 120}, {**spike, "step": 150}
    run = logs.read_run(made_runs.write(tmp_path / "run", made_runs.records(), (undone, seen)))
    assert run.config is not None
    told = found.diagnose(run, run.config.watch, logs.facts(run))
    assert [(f.kind, f.step, recorded) for f, recorded in told] == [("divergence", 120, True), ("spike", 150, False)]
