"""Logs of other trainers, turned into records in the words of our metrics.jsonl.

    CSV                 with a header line (Lightning's metrics.csv; rows may be sparse)
    JSONL               one object a line, nested ones by dotted names (an export of wandb's history)
    JSON                a list of objects, or Hugging Face's trainer_state.json with its log_history
    console lines       by regular expressions with named groups; see console.py for those that are known

A row with a loss is a step, one with a validation loss an evaluation, one with both is both. Where the steps go back (a run
that was resumed and appended to its log), what was done again replaces what was there; a log that is newest first or in no
order is sorted, and one whose steps begin anew with every epoch is counted on.
"""

from __future__ import annotations

import difflib
import itertools
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError
from kamui_dist.report import console, tables
from kamui_dist.report.cells import EPOCH, Row, settled
from kamui_dist.report.lines import is_binary
from kamui_dist.report.names import FIELDS, NAMES, bare, guess, number, whole


def read(file: Path, columns: dict[str, str], patterns: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """columns: field of ours (names.NAMES) -> theirs; what is not named is guessed by common names. patterns: regular expressions
    for the lines of a console log, whose named groups are fields of ours; a line may match several.

    Returns the records, and notes on how they were read. Raises UserError: no such column, no loss, a pattern that does not
    compile or does not end; OSError.
    """
    for ours in columns:
        if ours not in NAMES:
            raise UserError(f"--columns {ours}={columns[ours]}: there is no field {ours}; there are {', '.join(NAMES)}")
    if is_binary(file):
        raise UserError(f"{file} is a binary file; a log is text: CSV, JSONL, JSON or console lines, also as .gz")
    unit, delimiter, numbered, told = _rows(file, patterns)
    there = list(dict.fromkeys(itertools.chain.from_iterable(row for _, row in numbered if row)))
    hint = f"; {console.HINT}" if delimiter else ""
    if not there:
        raise UserError(f"{file}: no line matches" + (" the pattern" if patterns else f", or it is empty{hint}"))
    for theirs in columns.values():
        if theirs not in there:
            near = difflib.get_close_matches(theirs, there, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{file} has no column {theirs}{meant}; there are {_some(there)}")
    names = {**guess(there), **columns}
    if not {"loss", "val_loss"} & names.keys():
        raise UserError(
            f"{file}: no column is known to be the loss; say which with --columns loss=NAME; there are {_some(there)}{hint}"
        )
    numbered, taken = settled(numbered, names, delimiter)
    rows = [row for _, row in numbered if row is not None]
    timed, order = _timed(rows, names)
    records, notes = _records(file, timed, names)
    notes += told + taken + order + _left_out(rows, names, there) + _unread(numbered, names, unit)
    if not records:
        what = (
            f"number for {names.get('loss', names.get('val_loss'))}" if timed else f"whole number for {names['step']}"
        )
        raise UserError(f"{file}: no row has a {what}")
    read_as = ", ".join(f"{ours} = {theirs}" for ours, theirs in names.items() if ours != theirs)
    return records, ([f"read with {read_as}"] if read_as else []) + notes


def _some(there: list[str]) -> str:
    shown = [name if len(name) <= 60 else name[:57] + "..." for name in there[:40]]
    return ", ".join(shown) + (f" and {len(there) - 40} more" if len(there) > 40 else "")


def _rows(file: Path, patterns: list[str]) -> tuple[str, str, list[Row], list[str]]:
    """What is numbered, the delimiter of a table, each row as it stands, and notes."""
    compiled = [console.compiled(pattern) for pattern in patterns]
    first = tables.first_line(file)
    is_json = first.startswith(("{", "["))
    if patterns or console.is_known(file, printed=not is_json):
        return "line", "", *console.rows(file, compiled)
    if not is_json:
        return "line", tables.delimiter(first) if first else "", list(tables.table(file, first)), []
    if tables.is_jsonl(first):
        return "line", "", list(tables.objects(file)), []
    try:
        return "entry", "", list(tables.entries(file)), []
    except UserError:
        if not console.is_known(file, printed=True):
            raise
    return "line", "", *console.rows(file, compiled)


def _timed(rows: list[dict[str, Any]], names: dict[str, str]) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Every row with its step, in the order of the run, as far as the log tells it. Without a column of steps the rows that have a
    loss are counted."""
    loss = names.get("loss", names.get("val_loss", ""))
    if "step" not in names:
        counts = itertools.accumulate(int(number(row.get(loss)) is not None) for row in rows)
        return list(zip(counts, rows, strict=True)), ["no column is known to be the step: rows are counted"]
    timed, notes = [(step, row) for row in rows if (step := whole(row.get(names["step"]))) is not None], []

    def goes_back(share: float) -> bool:
        moves = [b - a for a, b in pairwise(_with(loss, timed)) if a != b]
        back = sum(move < 0 for move in moves)
        return back > 1 and back > share * len(moves)

    if goes_back(0.9):
        timed.reverse()
        notes.append("the log is newest first: it was read from its end")
    timed, anew = _counted_on(timed, loss)
    notes += ["the steps begin anew with every epoch: they were counted on"] if anew else []
    if goes_back(0.1) and len(set(_with(loss, timed))) == len(_with(loss, timed)):
        timed.sort(key=lambda pair: pair[0])
        notes.append("the steps are in no order: the log was sorted by them")
    return timed, notes


def _with(column: str, timed: list[tuple[int, dict[str, Any]]]) -> list[int]:
    return [step for step, row in timed if number(row.get(column)) is not None]


def _counted_on(timed: list[tuple[int, dict[str, Any]]], loss: str) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Where the step of a loss falls as the epoch rises, it is that within the epoch. Whether there was such a place."""
    there = dict.fromkeys(itertools.chain.from_iterable(row for _, row in timed))
    column = next((name for name in there if EPOCH.search(name)), "")
    shifts: dict[float, int] = {}  # epoch -> what is added to its steps
    shift, gap, before, now, counted = 0, 1, -1, -math.inf, []
    for step, row in timed:
        epoch = number(row.get(column))
        if epoch is not None and number(row.get(loss)) is not None:
            if epoch > now and step < before:
                shift += before + gap - step
            elif epoch < now:  # resumed
                shift = shifts.get(epoch, shift)
            elif 0 <= before < step:
                gap = step - before
            shifts.setdefault(epoch, shift)
            now, before = epoch, step
        counted.append((step + shift, row))
    return counted, any(shifts.values())


def _records(
    file: Path, timed: list[tuple[int, dict[str, Any]]], names: dict[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    early: tuple[int, dict[str, Any]] = (-1, {})  # a step, and what was told of it before its loss
    again = repeated = 0
    for step, row in timed:
        values = {ours: value for ours, theirs in names.items() if (value := number(row.get(theirs))) is not None}
        loss, val_loss = values.pop("loss", None), values.pop("val_loss", None)
        values.pop("step", None)
        while steps and steps[-1]["step"] > step and loss is not None:
            steps.pop()
            again += 1
        same = bool(steps) and steps[-1]["step"] == step
        if loss is not None:
            repeated += same
            told = early[1] if early[0] == step else {}
            record = steps.pop() if same else {"kind": "step", "step": step, **told}
            steps.append({**record, **_fields(values), "loss": _finite(loss)})
        elif same and val_loss is None:  # a row of its own for the norm, or the rate
            steps[-1] = {**_fields(values), **steps[-1]}
        elif val_loss is None:
            early = (step, {**(early[1] if early[0] == step else {}), **_fields(values)})
        if val_loss is not None:
            while evals and evals[-1]["step"] >= step:
                evals.pop()
            evals.append({"kind": "eval", "step": step, "val_loss": _finite(val_loss), "set": "val"})
            if "tokens" in values:
                evals[-1]["tokens"] = whole(values["tokens"])
    notes = ["not a run of ours: findings say what our watch would have said and done"]
    notes += _gone_back(file, _with(names.get("loss", ""), timed), again, names) if again else []
    if repeated > len(steps) / 10:
        notes.append(
            f"{repeated:,} records have the step of the one before, as of several ranks: the last of a step counts"
        )
    _unify_mfu(steps)
    return sorted([*steps, *evals], key=lambda r: r["step"]), notes


def _gone_back(file: Path, steps: list[int], again: int, names: dict[str, str]) -> list[str]:
    """`again` of the losses, which have these steps, are left out. Raises UserError if that is most of them and no resume."""
    places = [k for k, (a, b) in enumerate(pairwise(steps), 1) if a > b]
    if len(places) > 1 and again > len(steps) / 2:
        shown = ", ".join(str(step) for step in steps[max(0, places[0] - 3) : places[0] + 3])
        raise UserError(
            f"{file}: the steps ({names['step']}: ... {shown} ...) go back {len(places):,} times, and {again:,} of {len(steps):,} "
            "records would count as done again; name a column that counts all updates with --columns step=NAME, or give the log "
            "of one attempt or rank"
        )
    if len(places) > max(1, len(steps) / 10):
        return [
            f"the steps go back {len(places):,} times, as of several ranks in one log: {again:,} records are left out"
        ]
    return [f"the steps go back: {again} records of updates that were done again are left out"]


def _left_out(rows: list[dict[str, Any]], names: dict[str, str], there: list[str]) -> list[str]:
    """Notes: on columns that hold no numbers, and on those of other runs in an export of several."""
    notes = [
        f"{theirs} is left out: there is no number in it" for ours, theirs in names.items()
        if ours not in ("step", "loss", "val_loss") and all(number(row.get(theirs)) is None for row in rows)
    ]  # fmt: skip
    for name in ("loss", "val_loss"):
        theirs = names.get(name, "")
        if others := [n for n in there if n != theirs and bare(n) == bare(theirs) != n and bare(theirs) != theirs]:
            notes.append(
                f"{theirs} is read; of other runs there are {_some(others)}: --columns {name}=NAME takes one of them"
            )
    return notes


def _unread(numbered: list[Row], names: dict[str, str], unit: str) -> list[str]:
    """None or one note: on rows that are none, and those in which no number stands where the step or a loss should."""
    asked = [
        (names[name], whole if name == "step" else number) for name in ("step", "loss", "val_loss") if name in names
    ]
    wrong = [
        n for n, row in numbered
        if row is None or any(row.get(column) is not None and reads(row[column]) is None for column, reads in asked)
    ]  # fmt: skip
    if not wrong:
        return []
    units = {"line": "lines", "entry": "entries"}[unit]
    count, total = len(set(wrong)), len({n for n, _ in numbered})
    return [
        f"{count:,} of {total:,} {units} {'was' if count == 1 else 'were'} not read (the first: {unit} {wrong[0]:,})"
    ]


def _fields(values: dict[str, float]) -> dict[str, Any]:
    found = {FIELDS.get(name, name): _finite(value) for name, value in values.items() if name != "step_ms"}
    if "step_ms" in values:
        found["step_seconds"] = _finite(values["step_ms"] / 1000)
    found = {name: v for name, v in found.items() if not name.endswith("_seconds") or v is None or 0 <= v < 1e12}
    if "tokens" in found:
        found["tokens"] = whole(values["tokens"])
    if not math.isfinite(values.get("norm", 0.0)):
        found["skipped"] = True  # how a record says that the gradient was not finite, whatever their optimizer then did
    return found


def _unify_mfu(steps: list[dict[str, Any]]) -> None:
    """A share of 1, for a log in per cent too; nanoGPT says -100 % as long as it does not know."""
    known = [r for r in steps if r.get("mfu") is not None]
    percent = max((r["mfu"] for r in known), default=0.0) > 1.5
    for r in known:
        r["mfu"] = None if r["mfu"] < 0 else r["mfu"] / (100 if percent else 1)


def _finite(value: float) -> float | None:
    """As in metrics.jsonl, a number that is not finite is null."""
    return value if math.isfinite(value) else None
