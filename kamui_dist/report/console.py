"""Console lines of other trainers, read by regular expressions with named groups, and the dictionaries that some print.

Known are nanoGPT, llm.c, Megatron-LM, torchtitan, litgpt and progress bars (tqdm, Lightning), behind any timestamp or label of
a rank; and dictionaries with a loss (Hugging Face's Trainer, fairseq). Colours do not count.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError
from kamui_dist.report.cells import Row
from kamui_dist.report.lines import colourless, lines
from kamui_dist.report.names import NAMES, number

MATCH_SECONDS = 5.0  # for a thousand lines: a pattern that takes longer backtracks without end
LONGEST = 4096  # characters of a console line that a pattern sees
LOOKED_AT = 20_000  # lines in which a known one has to stand
HINT = r"if it is console lines, give a --pattern for them, such as --pattern 'iter (?P<step>\d+).* loss (?P<loss>\S+)'"


def _somewhere(*patterns: str) -> str:
    """Each of them behind this place, or not there at all."""
    return "".join(f"(?=(?:.*?{pattern})?)" for pattern in patterns)


_START = r"(?:^|(?<=[\s\]:|>]))"  # of a line, or behind what a logger puts before it
_MEGATRON = r"\biteration +(?P<step>\d+)/ *\d+ \|"
_MEGATRONS_REST = _somewhere(
    r"elapsed time per iteration \(ms\): (?P<step_ms>[\d.]+)", r"elapsed time per iteration \(s\): (?P<step_seconds>[\d.]+)",
    r"consumed tokens: +(?P<tokens>\d+)", r"learning rate: (?P<lr>\S+) \|", r"grad norm: (?P<norm>\S+) \|",
)  # fmt: skip
KNOWN = [
    _START + r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<step_ms>[\d.]+)ms(, mfu (?P<mfu>-?[\d.]+%))?",  # nanoGPT
    _START + r"step (?P<step>\d+): train loss \S+, val loss (?P<val_loss>\S+)",
    _START + r"step +(?P<step>\d+)/\d+ \| (train )?loss (?P<loss>\S+).*?\| norm (?P<norm>\S+).*?\| lr (?P<lr>\S+) \| "
    r"(?P<step_ms>[\d.]+) ms( \| (?P<mfu>-?[\d.]+%))?(.*\| (?P<tokens_per_sec>[\d,.]+) tok/s)?",  # llm.c
    r"(?:^|[\]:|>\d-] |\b(?:INFO|DEBUG) )val loss (?P<val_loss>\S+)\s*$",
    _START + r"s:(?P<step>\d+) trl:(?P<loss>\S+) lr:(?P<lr>\S+)",  # llm.c's main.log
    _START + r"s:(?P<step>\d+) tel:(?P<val_loss>\S+)",
    _MEGATRON + r"(?=.*?lm loss: (?P<loss>\S+) \|)" + _MEGATRONS_REST,
    # No update of the interval counts, and so it has no loss.
    _MEGATRON + r"(?!.*?lm loss: )(?=.*?number of (?:skipped|nan) iterations: +(?P<lost>[1-9]\d*) \|)" + _MEGATRONS_REST,
    r"\bvalidation loss at iteration +(?P<step>\d+)( on validation set)? \| lm loss value: (?P<val_loss>\S+)",
    r"(?<!validate )\bstep: +(?P<step>\d+) +loss: +(?P<loss>\S+)" + _somewhere(  # torchtitan
        r"\bgrad_norm: +(?P<norm>\S+)", r"\bmemory: +(?P<memory>[\d.]+)GiB", r"\btps: +(?P<tokens_per_sec>[\d,]+)",
        r"\bmfu: +(?P<mfu>[\d.]+%)",
    ),
    r"\bvalidate step: +(?P<step>\d+) +loss: +(?P<val_loss>\S+)",
    r"\| iter +\d+ step +(?P<step>\d+) \| loss train: +(?P<loss>[^\s,]+),",  # litgpt; the time is that of a part of the step
    _START + r"iter \d+: val loss (?P<val_loss>\S+), val time",
    r"(?:\bEpoch +(?P<epoch>\d+).*)?\| *(?P<step>\d+)/\d+ \[.*[ ,](?:train[_/])?loss(?:_step)?[=:] *(?P<loss>[^\s,\]]+)",  # a bar
]  # fmt: skip
# With double quotes it is JSON, unless something stands before it.
_PRINTED = re.compile(r"(?:\{(?=')|[A-Za-z][^{}]*\{(?=\"))(?=[^{}]*['\"](?:eval_|train_)?loss['\"]: )([^{}]*)\}")
_PAIR = re.compile(r"""['"]([^'"]+)['"]: *(?:'([^']*)'|"([^"]*)"|([^\s,]+))""")
_RANK = re.compile(r"(?:^|[^a-z])rank[ =:_-]?(\d+)|\bdefault(\d+)\]|\[\d+,(\d+)\]<std|^\s*(\d+:) ", re.IGNORECASE)


def compiled(pattern: str) -> re.Pattern[str]:
    """Of --pattern. Raises UserError: its groups are to be fields of ours."""
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"--pattern {pattern!r} is not a regular expression: {error}") from None
    groups = found.groupindex.keys()
    if not groups or groups - NAMES.keys():
        raise UserError(
            f"--pattern {pattern!r}: its named groups (?P<NAME>...) are {', '.join(groups) or 'none'}; it needs some of "
            f"{', '.join(NAMES)}"
        )
    return found


def is_known(file: Path, printed: bool) -> bool:
    """printed: dictionaries count."""
    known = [re.compile(pattern) for pattern in KNOWN]
    some = itertools.islice(lines(file), LOOKED_AT)
    with contextlib.suppress(UserError):  # lines that take too long are none of those
        while chunk := list(itertools.islice(some, 1000)):
            with _limited(MATCH_SECONDS):
                if any(_told(line, known, printed) for line in chunk):
                    return True
    return False


def rows(file: Path, patterns: list[re.Pattern[str]]) -> tuple[list[Row], list[str]]:
    """patterns: none for those that are known. A step counts for the lines that follow it and do not name one; of several ranks
    the first one that has losses is read. Returns also notes."""
    known = patterns or [re.compile(pattern) for pattern in KNOWN]
    told: list[tuple[int, list[tuple[str, dict[str, Any]]]]] = []
    rest = ((at, line) for at, line in enumerate(lines(file), 1) if line.strip())
    while chunk := list(itertools.islice(rest, 1000)):
        with _limited(MATCH_SECONDS):
            told += [(at, _told(line, known, not patterns)) for at, line in chunk]
    rank, count = _one_rank([found for _, some in told for found in some])
    step: Any = None
    found: list[Row] = []
    for at, some in told:
        for label, row in some:
            if label in ("", rank) or not rank:
                step = row.get("step", step)
                found.append((at, row if step is None else {**row, "step": step}))
        if not some:
            found.append((at, None))
    return found, [f"the log has lines of {count} ranks: those of rank {_of_rank(rank)} are read"] if rank else []


def _told(line: str, patterns: list[re.Pattern[str]], printed: bool) -> list[tuple[str, dict[str, Any]]]:
    """What a line tells, each with the rank that it names before. printed: dictionaries too."""
    line = colourless(line[: 2 * LONGEST])[:LONGEST]
    found = []
    for pattern in patterns:
        if match := pattern.search(line):
            row = {name: text for name, text in match.groupdict().items() if text is not None}
            begins = min((match.start(name) for name in row), default=0)
            if row.pop("lost", None):
                row["loss"] = "nan"
            found.append((_rank(line[:begins]), row))
    if printed and not found and (match := _PRINTED.search(line)):
        pairs = {name: one or two or bare for name, one, two, bare in _PAIR.findall(match[1])}
        found.append((_rank(line[: match.start(1)]), pairs))
    return found


def _rank(before: str) -> str:
    """ "" if a line names none; "3:" for a bare number at its beginning (srun --label), which may be something else."""
    found = _RANK.search(before)
    return next((label for label in found.groups() if label), "") if found else ""


def _one_rank(told: list[tuple[str, dict[str, Any]]]) -> tuple[str, int]:
    """The rank that is read, and how many there are; "" if there is nothing to choose. Ranks take turns; numbers that do not, as
    those of epochs, or come once each, are none."""
    labels = [label for label, _ in told if label]
    count = len(set(labels))
    turns = sum(a != b for a, b in pairwise(labels))
    if count < 2 or 2 * count > len(labels) or (turns < 2 * count and any(label.endswith(":") for label in labels)):
        return "", 0
    losses = Counter(label for label, row in told if label and number(row.get("loss")) is not None) or Counter(labels)
    most = max(losses.values())
    return min((label for label, lines_of in losses.items() if 2 * lines_of >= most), key=_of_rank), count


def _of_rank(label: str) -> int:
    return int(label.rstrip(":"))


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
