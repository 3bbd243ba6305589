"""What stands in the columns of another trainer's log: commas that are decimal signs, and NaN where there is no value.

Both are settled for a whole column, since a single cell (1,234) does not tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from kamui_dist.report.names import COUNTS, GROUPED, number

Row = tuple[int, dict[str, Any] | None]  # the number of its line; None: it could not be read
EPOCH = re.compile(r"(^|[/.])epoch$", re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d*),\d+([eE][-+]?\d+)?( ?[kKMBGT%])?")  # 10,75; 1.234,5; ,5
_DOTTED = re.compile(r"[1-9]\d{0,2}(\.\d{3})+")  # thousands, where the comma is the decimal sign


def settled(rows: list[Row], names: dict[str, str], delimiter: str = "") -> tuple[list[Row], list[str]]:
    """names: field of ours -> column. delimiter: of a table. Returns the rows, and notes on what was taken for what."""
    rows, notes = _with_points(rows, names, delimiter)
    rows, more = _without_fillers(rows, names)
    return rows, notes + more


def _with_points(rows: list[Row], names: dict[str, str], delimiter: str) -> tuple[list[Row], list[str]]:
    """A comma is the decimal sign where a value of the column cannot be thousands; and in a table whose delimiter is another
    sign, or that has such a column, where both can be: but not in what is counted."""
    ours = {theirs: name for name, theirs in names.items()}
    ours |= {column: "epoch" for _, row in rows[:1000] if row for column in row if EPOCH.search(column)}
    commas = {column: found for column in ours if (found := _texts(rows, column, ","))}
    kinds = {column: {_kind(text) for text in texts} for column, texts in commas.items()}
    sure = {column for column, kind in kinds.items() if "decimal" in kind and "grouped" not in kind}
    either = {column for column, kind in kinds.items() if kind <= {"either", ""} and "either" in kind}
    likely = {c for c in either if ours[c] not in COUNTS} if sure or delimiter in (";", "\t") else set()
    decimal = sorted(sure | likely)
    if not decimal:
        return rows, []
    dotted = {
        column for column, name in ours.items()
        if name in COUNTS and column not in decimal and _all(_DOTTED, _texts(rows, column, "."))
    }  # fmt: skip
    change: dict[str, Callable[[str], str]] = dict.fromkeys(decimal, _with_point)
    change |= dict.fromkeys(dotted, lambda text: text.replace(".", ""))
    return [(at, row and _changed(row, change)) for at, row in rows], [
        f"the comma is read as the decimal sign in {', '.join(decimal)}"
    ]


def _texts(rows: Sequence[Row], column: str, sign: str) -> list[str]:
    """The cells of a column that have this sign in them."""
    cells = (row.get(column) for _, row in rows if row)
    return [text for cell in cells if isinstance(cell, str) and sign in (text := cell.strip().rstrip("|;,"))]


def _all(pattern: re.Pattern[str], texts: list[str]) -> bool:
    return bool(texts) and all(pattern.fullmatch(text) for text in texts)


def _kind(text: str) -> str:
    """What its comma can be: "decimal", "grouped" (of thousands), "either"; "" for what is no number."""
    decimal, grouped = _DECIMAL.fullmatch(text), GROUPED.fullmatch(text)
    if decimal and grouped and not text.lstrip("+-").startswith("0"):
        return "either"
    return "decimal" if decimal else "grouped" if grouped else ""


def _with_point(text: str) -> str:
    return text.replace(".", "").replace(",", ".") if "," in text else text


def _changed(row: dict[str, Any], change: dict[str, Callable[[str], str]]) -> dict[str, Any]:
    there = {column: cell.strip().rstrip("|;,") for column in change if isinstance(cell := row.get(column), str)}
    return {**row, **{column: change[column](text) for column, text in there.items()}}


def _without_fillers(rows: list[Row], names: dict[str, str]) -> tuple[list[Row], list[str]]:
    """Where NaN means "no value in this row", it is taken out."""
    found = [names[name] for name in ("loss", "val_loss", "norm") if name in names and _fills(rows, names[name], name)]
    if not found:
        return rows, []
    loss, val_loss = names.get("loss", ""), names.get("val_loss", "")

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        # The same log has a row for a validation, in which the loss is the one that has no value.
        evaluated = val_loss in found and row.get(val_loss) is not None and not _is_nan(row[val_loss])
        gone = [*found, loss] if evaluated else found
        return {column: cell for column, cell in row.items() if column not in gone or not _is_nan(cell)}

    return [(at, row and kept(row)) for at, row in rows], [
        f"NaN is read as no value in {', '.join(found)}: most rows have it"
    ]


def _fills(rows: Sequence[Row], column: str, name: str) -> bool:
    """Most rows have NaN and some a number. Where all NaN stand behind several numbers, something broke, and in a loss or a norm
    also unless every number stands alone, as of a log that has one in every tenth row."""
    cells = [cell for _, row in rows if row and (cell := number(row.get(column))) is not None]
    there = [k for k, cell in enumerate(cells) if not math.isnan(cell)]
    if not there or 2 * (len(cells) - len(there)) <= len(rows):
        return False
    alone = sum(b - a > 1 for a, b in pairwise(there))
    return alone > 0 or len(there) == 1 if name == "val_loss" else len(there) > 2 and alone == len(there) - 1


def _is_nan(value: Any) -> bool:
    found = number(value)
    return found is not None and math.isnan(found)
