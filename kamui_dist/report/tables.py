"""Rows of CSV, JSONL and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError
from kamui_dist.report.cells import Row
from kamui_dist.report.console import HINT
from kamui_dist.report.lines import TOO_LONG, lines

_DOCUMENT_BYTES = 1 << 28


def first_line(file: Path) -> str:
    """The first that is not empty; "" if all are."""
    first = next((line.lstrip() for line in lines(file) if line.strip()), "")
    if first == TOO_LONG:  # a whole document on one line?
        first = next((line.lstrip() for line in lines(file, _DOCUMENT_BYTES) if line.strip()), "")
    return first


def is_jsonl(first: str) -> bool:
    try:
        return isinstance(json.loads(first), dict) and '"log_history"' not in first
    except (ValueError, RecursionError):
        return False


def objects(file: Path) -> Iterator[Row]:
    """A line each."""
    for at, line in _numbered(file):
        try:
            yield at, _flat(json.loads(line))
        except (ValueError, RecursionError):
            yield at, None


def entries(file: Path) -> Iterator[Row]:
    """Of a list in JSON, or of a log_history. Raises UserError if it is no JSON."""
    try:
        document = json.loads("\n".join(lines(file, _DOCUMENT_BYTES)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}; {HINT}") from None
    history = document.get("log_history", [document]) if isinstance(document, dict) else document
    yield from ((at, _flat(row)) for at, row in enumerate(history if isinstance(history, list) else [], 1))


def delimiter(header: str) -> str:
    return max(",\t;", key=header.count)


def table(file: Path, header: str) -> Iterator[Row]:
    """Raises UserError for what the csv module refuses."""
    at = 0

    def text() -> Iterator[str]:
        nonlocal at
        for at, line in _numbered(file):  # noqa: B007
            yield line

    try:
        for row in csv.DictReader(text(), delimiter=delimiter(header)):
            yield at, {k: v for k, v in row.items() if isinstance(k, str) and isinstance(v, str) and v.strip()}
    except csv.Error as error:
        raise UserError(f"{file} is no table that can be read: {error}; {HINT}") from None


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines(file), 1) if line.strip())


def _flat(row: Any, prefix: str = "", depth: int = 8) -> dict[str, Any] | None:
    """Nested objects by dotted names; None for what is no object."""
    if not isinstance(row, dict):
        return None
    flat: dict[str, Any] = {}
    for key, value in row.items():
        inner = _flat(value, f"{prefix}{key}.", depth - 1) if depth else None
        flat |= {f"{prefix}{key}": value} if inner is None else inner
    return flat
