"""Logs of other trainers, turned into records in the words of our metrics.jsonl.

    CSV                 with a header line (Lightning's metrics.csv; rows may be sparse)
    JSONL               one object a line, nested ones by dotted names (an export of wandb's history)
    JSON                a list of objects, or Hugging Face's trainer_state.json with its log_history
    console lines       by regular expressions with named groups; those of nanoGPT, llm.c and Megatron-LM are known

A row with a loss is a step, one with a validation loss an evaluation, one with both is both. Where the steps go back (a run
that was resumed and appended to its log), what was done again replaces what was there; a log that is newest first or in no
order is sorted, and one whose steps begin anew with every epoch is counted on.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import itertools
import json
import math
import re
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError
from kamui_dist.report.lines import TOO_LONG, is_binary, lines
from kamui_dist.report.names import FIELDS, NAMES, guess, number, whole

MATCH_SECONDS = 5.0  # for a thousand lines: a pattern that takes longer backtracks without end
LONGEST = 4096  # characters of a console line that a pattern sees
_DOCUMENT_BYTES = 1 << 28
Row = tuple[int, dict[str, Any] | None]  # the number of its line; None: it could not be read
CONSOLE = [
    r"^iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<step_ms>[\d.]+)ms(, mfu (?P<mfu>-?[\d.]+%))?",  # nanoGPT
    r"^step (?P<step>\d+): train loss \S+, val loss (?P<val_loss>\S+)",
    r"^step +(?P<step>\d+)/\d+ \| (train )?loss (?P<loss>\S+).*?\| norm (?P<norm>\S+).*?\| lr (?P<lr>\S+) \| "
    r"(?P<step_ms>[\d.]+) ms( \| (?P<mfu>-?[\d.]+%))?(.*\| (?P<tokens_per_sec>[\d,.]+) tok/s)?",  # llm.c
    r"^val loss (?P<val_loss>\S+)",
    r"^s:(?P<step>\d+) trl:(?P<loss>\S+) lr:(?P<lr>\S+)",  # llm.c's main.log
    r"^s:(?P<step>\d+) tel:(?P<val_loss>\S+)",
    r"iteration +(?P<step>\d+)/ *\d+ \|.*?learning rate: (?P<lr>\S+) \|.*?lm loss: (?P<loss>\S+) \|(.*?grad norm: "
    r"(?P<norm>\S+) \|)?",  # Megatron-LM
]


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
    first = next((line.lstrip() for line in lines(file) if line.strip()), "")
    if first == TOO_LONG:  # a whole document on one line?
        first = next((line.lstrip() for line in lines(file, _DOCUMENT_BYTES) if line.strip()), "")
    unit, found = _rows(file, first, [_compiled(p) for p in patterns])
    numbered = list(found)
    rows = [row for _, row in numbered if row is not None]
    if not rows:
        raise UserError(f"{file}: no line matches" + (" the pattern" if patterns else ", or it is empty"))
    there = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    for theirs in columns.values():
        if theirs not in there:
            near = difflib.get_close_matches(theirs, there, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{file} has no column {theirs}{meant}; there are {_some(there)}")
    names = {**guess(there), **columns}
    if not {"loss", "val_loss"} & names.keys():
        raise UserError(
            f"{file}: no column is known to be the loss; say which with --columns loss=NAME; there are {_some(there)}"
        )
    timed, order = _timed(rows, names)
    records, notes = _records(file, timed, names)
    notes += order
    notes += _unread(numbered, names, unit)
    if not records:
        raise UserError(f"{file}: no row has a number for {names.get('loss', names.get('val_loss'))}")
    read_as = ", ".join(f"{ours} = {theirs}" for ours, theirs in names.items() if ours != theirs)
    return records, ([f"read with {read_as}"] if read_as else []) + notes


def _some(there: list[str]) -> str:
    return ", ".join(there[:40]) + (f" and {len(there) - 40} more" if len(there) > 40 else "")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"--pattern {pattern!r} is not a regular expression: {error}") from None
    groups = compiled.groupindex.keys()
    if not groups or groups - NAMES.keys():
        raise UserError(
            f"--pattern {pattern!r}: its named groups (?P<NAME>...) are {', '.join(groups) or 'none'}; it needs some of "
            f"{', '.join(NAMES)}"
        )
    return compiled


def _rows(file: Path, first: str, patterns: list[re.Pattern[str]]) -> tuple[str, Iterator[Row]]:
    """What is numbered, and each row as it stands, nested objects by dotted names."""
    known = patterns or [re.compile(p) for p in CONSOLE]
    if patterns or any(p.search(line[:LONGEST]) for line in itertools.islice(lines(file), 1000) for p in known):
        return "line", _matches(file, known)
    if not first.startswith(("{", "[")):
        return "line", _table(file, first)
    try:
        a_line_each = isinstance(json.loads(first), dict) and '"log_history"' not in first
    except (ValueError, RecursionError):
        a_line_each = False
    objects = _objects(file) if a_line_each else enumerate(_document(file), 1)
    rows = ((number, _flat(row) if isinstance(row, dict) else None) for number, row in objects)
    return "line" if a_line_each else "entry", rows


def _objects(file: Path) -> Iterator[tuple[int, Any]]:
    for at, line in _numbered(file):
        try:
            yield at, json.loads(line)
        except (ValueError, RecursionError):
            yield at, None


def _document(file: Path) -> list[Any]:
    try:
        document = json.loads("\n".join(lines(file, _DOCUMENT_BYTES)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}; if it is console lines, give a --pattern for them") from None
    history = document.get("log_history", [document]) if isinstance(document, dict) else document
    return history if isinstance(history, list) else []


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines(file), 1) if line.strip())


def _flat(row: dict[str, Any], prefix: str = "", depth: int = 8) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and depth:
            flat |= _flat(value, f"{prefix}{key}.", depth - 1)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _table(file: Path, header: str) -> Iterator[Row]:
    delimiter, at = max(",\t;", key=header.count), 0

    def text() -> Iterator[str]:
        nonlocal at
        for at, line in _numbered(file):  # noqa: B007
            yield line

    try:
        for row in csv.DictReader(text(), delimiter=delimiter):
            yield at, {k: v for k, v in row.items() if isinstance(k, str) and isinstance(v, str) and v.strip()}
    except csv.Error as error:
        raise UserError(f"{file} is no table that can be read: {error}") from None


def _matches(file: Path, patterns: list[re.Pattern[str]]) -> Iterator[Row]:
    """The named groups of every line that matches. A step counts for the lines that follow it and do not name one."""
    step: Any = None
    rest = _numbered(file)
    while chunk := list(itertools.islice(rest, 1000)):
        with _limited(MATCH_SECONDS):
            found = [(n, [m.groupdict() for p in patterns if (m := p.search(line[:LONGEST]))]) for n, line in chunk]
        for at, matches in found:
            for groups in matches:
                row = {name: text for name, text in groups.items() if text is not None}
                step = row.get("step", step)
                yield at, row if step is None else {**row, "step": step}
            if not matches:
                yield at, None


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends a match that backtracks without end: `re` looks for signals while it matches. In the main thread only; elsewhere there
    is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise UserError(f"--pattern takes more than {seconds:g} s for 1,000 lines: it backtracks; make it simpler")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    column = next((name for name in there if re.search(r"(^|[/.])epoch$", name, re.IGNORECASE)), "")
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


def _unread(numbered: list[Row], names: dict[str, str], unit: str) -> list[str]:
    """None or one note: on rows that are none, and those in which no number stands where the step or a loss should."""
    asked = [names[name] for name in ("step", "loss", "val_loss") if name in names]
    wrong = [
        n for n, row in numbered
        if row is None or any(row.get(column) is not None and number(row[column]) is None for column in asked)
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
