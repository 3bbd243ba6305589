"""The report as one HTML page that stands by itself: nothing is fetched, and nothing that comes from a log is markup or code.

The page is whole without its script (page.js), which adds readings under the pointer and zoom. A content security policy allows
that one script, by its hash, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kamui_dist import __version__
from kamui_dist.report import ledger, panels, summary
from kamui_dist.report.axes import counted, duration, short
from kamui_dist.report.charts import clean, data, figure, resource
from kamui_dist.report.drawn import Drawn
from kamui_dist.report.figures import span
from kamui_dist.report.found import Row
from kamui_dist.report.ledger import PARTS, Ledger
from kamui_dist.report.logs import Run
from kamui_dist.report.series import median

_COLOURS = {"productive": "c0", "replayed": "bad", "skipped": "c6", "data": "c1", "meet": "c4", "eval": "c2", "save": "c3",
            "start": "c5", "down": "c7", "other": "muted"}  # fmt: skip
_STATES = {"finished": "good", "early stopped": "good", "failed": "bad", "stopped": "warn", "running": "note"}
_MOST_FINDINGS = 100  # in the page; the command prints all


def page(drawn: Sequence[Drawn]) -> str:
    """`drawn`: one run, or several to compare. Raises UserError if they cannot be laid over each other."""
    runs = [d.run for d in drawn]
    books = [ledger.account(run.records) if run.ours else None for run in runs]
    figures = panels.one(drawn[0]) if len(drawn) == 1 else panels.several(drawn)
    x = span(figures)
    cards = [
        f'<div class="card">{figure(f, x)}<script type="application/json" class="data">{script(data(f, x))}</script></div>'
        for f in figures
    ]
    code = resource("page.js")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    shown = sum(len(d.rows) for d in drawn) > 0
    body = [
        _head(runs), _tiles(runs[0], books[0]) if len(runs) == 1 else _compared(drawn, books),
        f'<div class="top{"" if shown else " alone"}">{cards[0]}{_findings(drawn) if shown else ""}</div>',
        "" if shown else '<p class="none">The watch finds nothing wrong.</p>',
        f'<div class="grid">{"".join(cards[1:])}</div>', _ledgers(runs, books), _configs(runs), _foot(),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">"
        f"<title>{clean(title)} - kamui_dist</title><style>{resource('chart.css')}{resource('page.css')}</style></head>"
        f'<body data-by="{drawn[0].by.removesuffix("s")}"><main>{"".join(body)}</main>'
        f"<script>{code}</script></body></html>\n"
    )


def _head(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f'<h1>{len(runs)} runs</h1><p class="under">{clean(", ".join(run.name for run in runs))}</p>'
    state = summary.state_of(runs[0])[0]
    chip = f'<span class="chip {_STATES.get(state, "note")}">{clean(state)}</span>' if runs[0].ours else ""
    notes = "; ".join([summary.outcome(runs[0]) if runs[0].ours else str(runs[0].path), *runs[0].notes])
    return f'<h1>{clean(runs[0].name)}{chip}</h1><p class="under">{clean(notes)}</p>'


def facts(run: Run, books: Ledger | None) -> list[tuple[str, str]]:
    """(what, number) of the tiles; what is not known is not there."""
    steps, evals = run.of("step"), [r for r in run.of("eval") if r.get("val_loss") is not None]
    evals = [r for r in evals if r.get("set") == evals[0].get("set")]  # the first set decides what is best
    last = "last" if steps and steps[-1].get("loss") is not None else "last finite"
    losses = [r["loss"] for r in steps if r.get("loss") is not None]
    found = [
        ("steps", f"{steps[-1]['step']:,}" if steps else None),
        ("tokens", short(steps[-1]["tokens"]) if steps and steps[-1].get("tokens") else None),
        (f"loss, {last}", f"{losses[-1]:.4f}" if losses else None),
        ("validation, best", f"{summary.best_eval(evals)['val_loss']:.4f}" if evals else None),
        ("tokens / s, median", short(v) if (v := median(steps, "tokens_per_sec")) else None),
        ("mfu, median", f"{v:.1%}" if (v := median(steps, "mfu")) else None),
        ("wall time", duration(books.total / 1e6) if books and books.total else None),
        ("goodput", f"{books.goodput:.1%}" if books and books.goodput is not None else None),
    ]
    return [(what, number) for what, number in found if number is not None]


def _tiles(run: Run, books: Ledger | None) -> str:
    tiles = "".join(f'<div class="tile"><b>{clean(n)}</b><span>{clean(w)}</span></div>' for w, n in facts(run, books))
    return f'<div class="tiles">{tiles}</div>'


def _compared(drawn: Sequence[Drawn], books: Sequence[Ledger | None]) -> str:
    tables = [dict(facts(d.run, account)) for d, account in zip(drawn, books, strict=True)]
    names = list(dict.fromkeys(name for table in tables for name in table))
    head = "".join(f'<th class="n">{clean(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><td><span class="sw c{k % 8}"></span>{clean(d.run.name)}</td>'
        + "".join(f'<td class="n">{clean(table.get(name, ""))}</td>' for name in names)
        + f'<td class="n">{len(d.rows)}</td></tr>'
        for k, (d, table) in enumerate(zip(drawn, tables, strict=True))
    )
    return (
        f'<div class="card" style="margin-bottom:14px"><table><tr><th>run</th>{head}<th class="n">findings</th></tr>'
        f"{rows}</table></div>"
    )


def _findings(drawn: Sequence[Drawn]) -> str:
    numbered = [(n, row, d) for d in drawn for n, row in enumerate(d.rows, d.first)]
    told = [_finding(n, row, d.run.name if len(drawn) > 1 else "") for n, row, d in numbered[:_MOST_FINDINGS]]
    if len(numbered) > _MOST_FINDINGS:
        told.append(f"<p>and {len(numbered) - _MOST_FINDINGS} more: kamui-dist diagnose prints all</p>")
    return f'<div class="card findings"><div class="scroll"><h2>Findings</h2>{"".join(told)}</div></div>'


def _finding(number: int, row: Row, run: str) -> str:
    f = row.finding
    times = f", {row.count} times" if row.count > 1 else ""
    where = f"step {row.steps}{times}, {f.action}" + (", recorded by the run" if row.recorded else "")
    return (
        f'<div class="finding {row.level}" id="finding-{number}"><p class="head"><span class="num">{number}</span>'
        f'{clean(f.kind)} <span class="step">{clean(where)}{clean(f" in {run}") if run else ""}</span></p>'
        f'<p>{clean(f.message)}</p><p class="what">Likely: {clean(f.cause)}</p><p class="what">Do: {clean(f.advice)}</p></div>'
    )


def _ledgers(runs: Sequence[Run], accounts: Sequence[Ledger | None]) -> str:
    """A bar a run, and the numbers in one table."""
    books = [(run, account) for run, account in zip(runs, accounts, strict=True) if account and account.total]
    if not books:
        return ""
    names = [n for n in PARTS if any(account.parts[n] or n in account.unknown for _, account in books)]
    bars = "".join(f"<p>{_ledger_line(run, account, len(runs) > 1)}</p>{_bar(account)}" for run, account in books)
    head = "".join(f'<th class="n">{clean(run.name) if len(runs) > 1 else ""}</th>' for run, _ in books)
    rows = "".join(
        f'<tr><td><span class="sw {_COLOURS[n]}"></span>{PARTS[n][0]}</td>'
        + "".join(f'<td class="n">{_part(account, n)}</td>' for _, account in books)
        + f'<td class="what">{PARTS[n][1]}</td></tr>'
        for n in names
    )
    table = f'<table class="fit"><tr><th>part</th>{head}<th></th></tr>{rows}</table>'
    return f'<div class="card" style="margin-bottom:14px"><h2>Where the time went</h2>{bars}{table}</div>'


def _ledger_line(run: Run, account: Ledger, several: bool) -> str:
    parts = [f"{duration(account.total / 1e6)}", f"goodput {account.goodput:.1%}"]
    counts = [(account.starts, "start"), (account.rollbacks, "rollback"), (account.lost_steps, "lost update")]
    parts += [counted(n, what) for n, what in counts if n]
    return clean((f"{run.name}: " if several else "") + ", ".join(parts))


def _bar(account: Ledger) -> str:
    pieces = "".join(
        f'<i class="{_COLOURS[n]}" style="flex:{v / account.total:.6f}" title="{PARTS[n][0]}: {_part(account, n)}"></i>'
        for n, v in account.parts.items() if v
    )  # fmt: skip
    return f'<div class="bar">{pieces}</div>'


def _part(account: Ledger, name: str) -> str:
    if name in account.unknown:
        return "not recorded"
    return f"{duration(account.parts[name] / 1e6)} ({account.parts[name] / account.total:.1%})"


def _configs(runs: Sequence[Run]) -> str:
    tables = [run.table for run in runs]
    if not any(tables):
        return ""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if len(runs) == 1:
        text = "\n".join(f"{key} = {tables[0][key]}" for key in keys)
        lines = "\n".join(clean(line) for line in text.splitlines())
        return f'<details class="card"><summary>Config</summary><pre>{lines}</pre></details>'
    differ = [key for key in keys if len({table.get(key) for table in tables}) > 1 and key != "run.dir"]
    head = "".join(f'<th><span class="sw c{k % 8}"></span>{clean(run.name)}</th>' for k, run in enumerate(runs))
    values = {key: "".join(f"<td>{clean(t.get(key, 'unset'))}</td>" for t in tables) for key in differ}
    rows = "".join(f"<tr><td>{clean(key)}</td>{cells}</tr>" for key, cells in values.items())
    told = f"<table><tr><th>key</th>{head}</tr>{rows}</table>" if differ else '<p class="none">none</p>'
    return f'<div class="card"><h2>Differences of the configs</h2>{told}</div>'


def _foot() -> str:
    return (
        '<p class="foot">Drag in a figure to look closer, double-click for the whole. Of a long run each figure keeps the first, '
        "lowest, highest and last value of every part as wide as a pixel, so no outlier is lost; what is stacked is averaged. "
        f"kamui_dist {clean(__version__)}.</p>"
    )


def script(value: Any) -> str:
    """JSON that can stand in a <script> element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
