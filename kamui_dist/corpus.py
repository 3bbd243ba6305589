"""Text files as documents: find the files, cut them where a pattern says, read documents in bounded pieces. No torch.

A document is a span of a file with a digest of its content. Whoever encodes it reads the span, so that neither the
corpus nor a very large document is ever in memory as a whole.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kamui_dist.errors import UserError

SUFFIXES = (".txt", ".md")
PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20


class Source(NamedTuple):
    path: Path  # absolute
    name: str  # as headers record it: below the input's own name, so that it does not depend on where the input lies
    bytes: int


class Document(NamedTuple):
    source: Source
    start: int  # byte offsets in the file
    end: int
    digest: bytes  # 8 bytes of BLAKE2b over (seed, content)
    blank: bool  # nothing but white space


def find(inputs: Sequence[str | Path]) -> list[Source]:
    """The files of `inputs`: each a file, or a directory whose .txt and .md files are taken, recursively, sorted by
    path.

    Inputs keep their order; hidden files and directories are left out. Raises UserError for an input that does not
    exist, is of another kind, holds no text file, or is given twice.
    """
    sources: list[Source] = []
    for given in inputs:
        path = Path(given).expanduser().absolute()
        if path.is_dir():
            files = sorted(
                f
                for f in path.rglob("*")
                if f.suffix.lower() in SUFFIXES
                and f.is_file()
                and not any(part.startswith(".") for part in f.relative_to(path).parts)
            )
            if not files:
                raise UserError(f"no {' or '.join(SUFFIXES)} file in {path}")
            sources += [Source(f, (path.name / f.relative_to(path)).as_posix(), f.stat().st_size) for f in files]
        elif path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise UserError(f"{path} is not a {' or '.join(SUFFIXES)} file, nor a directory of them")
            sources.append(Source(path, path.name, path.stat().st_size))
        else:
            raise UserError(f"no such file or directory: {path}")
    seen: set[Path] = set()
    for source in sources:
        real = source.path.resolve()
        if real in seen:
            raise UserError(f"{source.path} is among the inputs twice")
        seen.add(real)
    return sources


def compile_split(pattern: str | None) -> re.Pattern[str] | None:
    """Raises UserError if `pattern` is not a regular expression."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise UserError(f"--split {pattern!r} is not a regular expression: {error}") from error


def documents(source: Source, split: re.Pattern[str] | None, seed: int) -> Iterator[Document]:
    """The documents of one file, in order: the whole file, or one from each line in which `split` is found (and one for
    what stands before the first). A byte order mark at the start is left out.

    Raises UserError with the byte offset if the file is not UTF-8, and if it changes while it is read.
    """

    def new_digest() -> hashlib.blake2b:
        return hashlib.blake2b(f"{seed}\n".encode(), digest_size=8)

    decoder = codecs.getincrementaldecoder("utf-8")()
    with source.path.open("rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(start)
        position, digest, blank = start, new_digest(), True
        for chunk in file if split is not None else iter(lambda: file.read(_BLOCK_BYTES), b""):
            text = _decode(decoder, chunk, position, source)
            if split is not None and position > start and split.search(text.rstrip("\r\n")):
                yield Document(source, start, position, digest.digest(), blank)
                start, digest, blank = position, new_digest(), True
            digest.update(chunk)
            blank = blank and not chunk.strip()
            position += len(chunk)
        _decode(decoder, b"", position, source, final=True)
    if position != source.bytes:
        raise UserError(f"{source.path} changed while it was read: {source.bytes} bytes before, {position} now")
    if position > start:
        yield Document(source, start, position, digest.digest(), blank)


def _decode(
    decoder: codecs.IncrementalDecoder, chunk: bytes, position: int, source: Source, final: bool = False
) -> str:
    pending = len(decoder.getstate()[0])  # bytes of a character that the chunk before has begun
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        offset, byte = position - pending + error.start, error.object[error.start]
        raise UserError(f"{source.path} is not UTF-8: byte {byte:#04x} at offset {offset}") from error


def pieces(document: Document) -> Iterator[str]:
    """The text of a document in pieces of about PIECE_BYTES or less, cut after a line end where there is one.

    Nearly every document is one piece. A larger one is encoded piece by piece, since encoders need some hundred bytes
    of memory a token: a token cannot span the cut (and a tokenizer that puts a space before a text puts one there).
    """
    with document.source.path.open("rb") as file:
        file.seek(document.start)
        left, rest = document.end - document.start, b""
        while left:
            block = file.read(min(left, PIECE_BYTES))
            if not block:
                raise UserError(f"{document.source.path} became shorter while it was read")
            left -= len(block)
            block = rest + block
            cut = len(block)
            if left:
                cut = block.rfind(b"\n") + 1 or _last_character(block)
            rest = block[cut:]
            yield block[:cut].decode()


def _last_character(block: bytes) -> int:
    """Where the last (maybe incomplete) UTF-8 character of `block` starts."""
    cut = len(block) - 1
    while block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
