"""What is wrong with a run, by its records: the watch over any run of ours, or the log of another trainer.

kamui-dist diagnose runs/demo                                          findings, each with its cause and what to do
kamui-dist diagnose runs/demo --html report.html                       and a page of curves that stands by itself
kamui-dist diagnose runs/a runs/b --html both.html --by tokens         several runs over each other
kamui-dist diagnose runs/demo watch.spike_z=4 --fail-on warn           another threshold; exit 1 if there is such a finding
kamui-dist diagnose metrics.csv --columns loss=train_loss,norm=gnorm   Lightning, wandb, trainer_state.json, ...
kamui-dist diagnose train.log --pattern 'it (?P<step>\\d+) loss (?P<loss>\\S+)' --vocab-size 50257
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kamui_dist import config, knobs
from kamui_dist.commands.words import take_anywhere
from kamui_dist.errors import UserError
from kamui_dist.files import write_text
from kamui_dist.findings import ACTIONS, Finding
from kamui_dist.report import found, logs
from kamui_dist.report.drawn import Drawn
from kamui_dist.report.found import Row
from kamui_dist.report.lines import plain
from kamui_dist.report.logs import Run

_STYLES = {"note": "cyan", "warn": "yellow", "bad": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory, its metrics.jsonl, or another trainer's log (CSV, JSONL, "
        "JSON, console lines; .gz); and watch.key=value for other thresholds than the run's own",
    )  # fmt: skip
    take_anywhere(parser, "runs")
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument("--fail-on", choices=ACTIONS[1:], metavar="ACTION", help="exit 1 if a finding asks for this or more: "
                        + ", ".join(ACTIONS[1:]))  # fmt: skip
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with all curves, findings marked on them"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="PATH", help="write pictures: NAME.svg the main one, a directory all"
    )
    parser.add_argument("--by", choices=("step", "tokens"), default="step", help="x axis of the curves (default: step)")
    logs_of_others = parser.add_argument_group("logs of other trainers")
    logs_of_others.add_argument("--columns", metavar="OURS=THEIRS,...", help="names of columns that are not known by themselves: "
                                "step, loss, norm, lr, val_loss, tokens, tokens_per_sec, mfu, ...")  # fmt: skip
    logs_of_others.add_argument("--pattern", action="append", metavar="REGEX", help="for console lines: a regular expression with "
                                "named groups, as in the last example; may be given several times")  # fmt: skip
    facts = parser.add_argument_group("what a log does not say")
    facts.add_argument("--vocab-size", type=_whole, metavar="N", help="tokens that the model tells apart")
    facts.add_argument(
        "--grad-clip", type=_positive, metavar="NORM", help="norm that gradients were clipped to; 0: not clipped"
    )
    facts.add_argument("--lr", type=_positive, metavar="LR", help="highest learning rate")
    facts.add_argument("--steps", type=_whole, metavar="N", help="updates of the whole run")


def run(args: argparse.Namespace) -> int:
    """Raises UserError for files that cannot be read, columns that are not there, and overrides that are none."""
    given = [word for word in args.runs if word.startswith("watch.") and "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in args.runs if word not in given]
    if not paths:
        raise UserError("give a run directory or a log")
    columns = _columns(args.columns)
    runs = logs.named([logs.read_run(path, columns, args.pattern) for path in paths])
    if (columns or args.pattern) and all(one.ours for one in runs):
        what = "--columns" if columns else "--pattern"
        raise UserError(f"{what} is for the log of another trainer, and {plain(str(paths[0]))} is of a run of ours")
    told = {name: getattr(args, name) for name in ("vocab_size", "grad_clip", "lr", "steps")}
    told = {name: value for name, value in told.items() if value is not None}
    drawn: list[Drawn] = []
    findings: list[list[tuple[Finding, bool]]] = []
    for one in runs:
        cfg, facts = thresholds(one, given), replace(logs.facts(one), **told)
        findings.append(found.diagnose(one, cfg, facts))
        rows = found.gather(findings[-1], one)
        first = 1 + sum(len(d.rows) for d in drawn)
        drawn.append(Drawn(one, rows, args.by, cfg.window, facts.grad_clip, first))
    if args.json:
        print(_json(runs, findings))
    else:
        for one, d in zip(runs, drawn, strict=True):
            _print(one, d.rows)
    _write(args, drawn)
    worst = max((ACTIONS.index(f.action) for pairs in findings for f, _ in pairs), default=0)
    return 1 if args.fail_on and worst >= ACTIONS.index(args.fail_on) else 0


def thresholds(run: Run, overrides: Sequence[str]) -> knobs.Watch:
    """[watch] of the run's own config, else the defaults, with the overrides."""
    base = run.config.watch if run.config else knobs.Watch()
    changed = config.load(Path(os.devnull), list(overrides))[
        0
    ].watch  # an empty file: what is set is from the overrides
    return base.model_copy(update={name: getattr(changed, name) for name in changed.model_fields_set})


def _columns(text: str | None) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if wrong := next((part for part in pairs if not all(part)), None):
        raise UserError(f"--columns: {''.join(wrong)!r} is not OURS=THEIRS, for example step=iter,loss=train_loss")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _json(runs: Sequence[Run], findings: Sequence[Sequence[tuple[Finding, bool]]]) -> str:
    told = [
        {"run": run.name, "path": str(run.path), "notes": run.notes,
         "findings": [{**f.record(), "recorded": recorded} for f, recorded in pairs]}
        for run, pairs in zip(runs, findings, strict=True)
    ]  # fmt: skip
    return json.dumps({"runs": told}, indent=2)


def _print(run: Run, rows: Sequence[Row]) -> None:
    # Where nobody looks (a pipe, a file) lines are not broken at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False, markup=False)
    steps = run.of("step")
    span = f", steps {steps[0]['step']:,} to {steps[-1]['step']:,}" if steps else ""
    console.print(Text(plain(f"{run.name}: {len(run.records):,} records{span}"), style="bold"))
    for note in run.notes:
        console.print(Text(plain(f"note: {note}")))
    if not rows:
        console.print("nothing found")
        return
    table = Table(show_lines=True, expand=False)
    for name in ("step", "kind", "action", "what, why, and what to do"):
        table.add_column(name, justify="right" if name == "step" else "left", no_wrap=name == "action")
    for row in rows:
        f, style = row.finding, _STYLES[row.level]
        times = f"\n{row.count} times" if row.count > 1 else ""
        words = Text(plain(f.message)) + Text(f"\nLikely: {plain(f.cause)}", "dim") + Text(f"\nDo: {plain(f.advice)}")
        kind = Text(plain(f.kind), style) + Text("\nrecorded by the run" if row.recorded else "", "dim")
        table.add_row(Text(row.steps + times), kind, Text(f.action, style), words)
    console.print(table)


def _write(args: argparse.Namespace, drawn: Sequence[Drawn]) -> None:
    from kamui_dist.report import charts, page, panels  # numpy: not for those who want the table alone

    where = args.html
    try:
        if args.html:
            write_text(args.html, page.page(drawn))
        if args.svg:
            where = args.svg
            figures = panels.one(drawn[0]) if len(drawn) == 1 else panels.several(drawn)
            captions = [
                f"{n}  {row.finding.kind}, step {row.steps}: {row.finding.message}"
                for d in drawn for n, row in enumerate(d.rows[:8], d.first)
            ]  # fmt: skip
            figures[0] = replace(figures[0], caption=[text for one in captions for text in charts.wrapped(one, 128)])
            if args.svg.suffix == ".svg":
                write_text(args.svg, charts.figure(figures[0], standalone=True) + "\n")
            else:
                args.svg.mkdir(parents=True, exist_ok=True)
                for figure in figures:
                    write_text(args.svg / f"{figure.name}.svg", charts.figure(figure, standalone=True) + "\n")
    except OSError as error:
        raise UserError(f"{where} cannot be written: {error.strerror}") from None
    for path in (args.html, args.svg):
        if path and not args.json:
            print(f"written: {path}")


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value
