"""Text of which nothing is known: the lines of a file, packed or not, of any length; and what may be shown of it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path


def lines(file: Path, longest: int = 1 << 20) -> Iterator[str]:
    """The lines of a text file or a .gz, however long the file is; a line longer than `longest` is passed over."""
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(file, "rb") if packed else file.open("rb") as stream:
        whole = True
        while part := stream.readline(longest):
            ends = part.endswith(b"\n")
            if whole and (ends or len(part) < longest):
                yield part.decode("utf-8", "replace").rstrip("\r\n")
            whole = ends


def plain(text: str) -> str:
    """Without what a terminal would obey and XML forbids (escape sequences, other control characters): spaces stand for it."""
    return "".join(c if c.isprintable() else " " for c in text)
