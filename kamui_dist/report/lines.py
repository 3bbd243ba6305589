"""Text of which nothing is known: the lines of a file, packed or not, of any length; and what may be shown of it."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

TOO_LONG = "\ufffd"  # stands for a line that is passed over: it is counted, and means nothing to any reader
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")  # colours, movements, titles


def lines(file: Path, longest: int = 1 << 20) -> Iterator[str]:
    """The lines of a text file or a .gz, however long the file is; of a line longer than `longest` there is TOO_LONG. A carriage
    return ends a line too: a progress bar writes itself anew behind one. A byte order mark is no part of the first."""
    with io.TextIOWrapper(_unpacked(file), encoding="utf-8-sig", errors="replace") as stream:
        whole = True
        while part := stream.readline(longest):
            ends = part.endswith("\n")
            if whole and (ends or len(part) < longest):
                yield part.removesuffix("\n")
            elif ends or len(part) < longest:
                yield TOO_LONG
            whole = ends


def is_binary(file: Path) -> bool:
    """Text has no zero bytes; what is packed, or made of numbers, has one within 4 KiB."""
    with _unpacked(file) as stream:
        return b"\0" in stream.read(4096)


def _unpacked(file: Path) -> BinaryIO:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(file, "rb")) if packed else file.open("rb")


def plain(text: str) -> str:
    """Without what a terminal would obey and XML forbids (escape sequences, other control characters): spaces stand for it."""
    return "".join(c if c.isprintable() else " " for c in text)


def colourless(text: str) -> str:
    """Without escape sequences."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text
