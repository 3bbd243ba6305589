"""How far a long command is: a bar on a terminal, else a line each ten seconds. On stderr: stdout carries the result."""

from __future__ import annotations

import sys
import time
from typing import Any

_LINE_SECONDS = 10.0


class Progress:
    """Documents, tokens, tokens a second, and the time that is left, by the share of the bytes that are read."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = max(total_bytes, 1)
        self._start = self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), TextColumn("{task.percentage:3.0f}% {task.description} ETA"), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=self._total_bytes)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, read: int, documents: int, tokens: int) -> None:
        """read: bytes of the sources so far."""
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        text = f"{documents:,} documents, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(0, completed=read, description=text)
        elif now - self._told >= _LINE_SECONDS:
            self._told = now
            left = round(seconds * (self._total_bytes - read) / max(read, 1))
            eta = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
            print(f"{100 * read / self._total_bytes:.0f}% {text}, ETA {eta}", file=sys.stderr, flush=True)
