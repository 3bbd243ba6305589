"""Text as documents: find the files, cut plain text where a pattern says, read documents in bounded pieces. No torch.

A document of a text file is a span of it with a digest of its content. Whoever encodes it reads the span, so that
neither the corpus nor a very large document is ever in memory as a whole. What is in JSON lines and parquet files,
`records.py` reads.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kamui_dist.errors import UserError

SUFFIXES = (".txt", ".md")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
PIECE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
REPLACE = "kamui_dist.replace"  # as the error handler "replace", and counts in `replaced`
replaced = [0]


class Source(NamedTuple):
    path: Path  # absolute
    name: str  # as headers record it: below the input's own name, so that it does not depend on where the input lies
    bytes: int
    kind: str  # "text", or one of RECORD_SUFFIXES
    changed: int = 0  # st_mtime_ns


class Document(NamedTuple):
    source: Source
    start: int  # byte offsets in the file
    end: int
    digest: bytes  # 8 bytes of BLAKE2b over (seed, content)
    blank: bool  # nothing but white space
    key: bytes = b""  # 16 bytes of BLAKE2b over the content: equal for equal documents, whatever the seed
    replaced: int = 0  # places that were not UTF-8


def _count_and_replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    replaced[0] += 1
    return "\N{REPLACEMENT CHARACTER}", error.end


codecs.register_error(REPLACE, _count_and_replace)


def find(inputs: Sequence[str | Path], suffixes: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Source]:
    """The files of `inputs`: each a file, a directory whose files of a known kind are taken, recursively, or a pattern
    of such (`data/**/*.jsonl`); what directories and patterns give is sorted by path.

    suffixes: more names' ends to take as plain text, such as ".py". exclude: patterns of files and directories to leave
    out, by their own name or their path below the input. Inputs keep their order; hidden files and
    directories are left out, and so are other kinds of files in directories and patterns. Raises UserError for an input
    that does not exist, is of another kind, holds no such file, or is given twice.
    """
    text = tuple(s.lower() if s.startswith(".") else f".{s.lower()}" for s in (*SUFFIXES, *suffixes))
    kinds = ", ".join((*text, *RECORD_SUFFIXES))
    sources: list[Source] = []
    for given in inputs:
        path = Path(given).expanduser().absolute()
        if path.is_dir():
            found = _below(path, path.rglob("*"), text, exclude)
            if not found:
                raise UserError(f"no file of a known kind ({kinds}) in {path}")
            sources += found
        elif path.is_file():
            kind = _kind(path, text)
            if kind is None:
                raise UserError(f"{path} is of no known kind ({kinds}); --suffix takes files of other names as text")
            sources.append(_source(path, path.name, kind))
        elif glob.has_magic(str(given)):
            root = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))])
            matches = [Path(m) for m in glob.glob(str(path), recursive=True)]  # noqa: PTH207 - Path.glob has other rules
            found = _below(root, [f for m in matches for f in (m.rglob("*") if m.is_dir() else [m])], text, exclude)
            if not found:
                raise UserError(f"no file of a known kind ({kinds}) matches {path}")
            sources += found
        else:
            raise UserError(f"no such file or directory: {path}")
    seen: set[Path] = set()
    for source in sources:
        real = source.path.resolve()
        if real in seen:
            raise UserError(f"{source.path} is among the inputs twice")
        seen.add(real)
    return sources


def _kind(path: Path, text: tuple[str, ...]) -> str | None:
    name = path.name.lower()
    return "text" if name.endswith(text) else next((s for s in RECORD_SUFFIXES if name.endswith(s)), None)


def _source(path: Path, name: str, kind: str) -> Source:
    status = path.stat()
    return Source(path, name, status.st_size, kind, status.st_mtime_ns)


def _below(root: Path, paths: Iterable[Path], text: tuple[str, ...], exclude: Sequence[str]) -> list[Source]:
    found = []
    for path in sorted(set(paths)):
        kind = _kind(path, text)
        relative = path.relative_to(root)
        names = [relative.as_posix(), *relative.parts]
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or kind is None or any(fnmatch.fnmatch(name, pattern) for name in names for pattern in exclude):
            continue
        if path.is_file():
            found.append(_source(path, (root.name / relative).as_posix(), kind))
    return found


def check_unchanged(source: Source) -> None:
    """Raises UserError if the file is not what it was when it was found."""
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.bytes, source.changed):
        raise UserError(f"{source.path} changed while it was read: {source.bytes} bytes before, {status.st_size} now")


def compile_split(pattern: str | None) -> re.Pattern[str] | None:
    """Raises UserError if `pattern` is not a regular expression."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise UserError(f"--split {pattern!r} is not a regular expression: {error}") from error


class Digests:
    """The two digests of a document, fed with its UTF-8 bytes: `draw` decides on the held-out split, `key` on equality."""

    def __init__(self, seed: int) -> None:
        self._draw = hashlib.blake2b(f"{seed}\n".encode(), digest_size=8)
        self._key = hashlib.blake2b(digest_size=16)

    def update(self, data: bytes) -> None:
        self._draw.update(data)
        self._key.update(data)

    def draw(self) -> bytes:
        return self._draw.digest()

    def key(self) -> bytes:
        return self._key.digest()


def documents(source: Source, split: re.Pattern[str] | None, seed: int, errors: str = "strict") -> Iterator[Document]:
    """The documents of one text file, in order: the whole file, or one from each line in which `split` is found (and
    one for what stands before the first). A byte order mark at the start is left out.

    errors: "strict", or REPLACE; the digests are then of the text with its replacements. A line of more than 1 MiB is
    searched in parts. Raises UserError with the byte offset if the file is not UTF-8, and if it changes while it is
    read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    with source.path.open("rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(start)
        position, digests, blank, count = start, Digests(seed), True, 0
        line_start = True
        while chunk := file.read(BLOCK_BYTES) if split is None else file.readline(PIECE_BYTES):
            before = replaced[0]
            text = _decode(decoder, chunk, position, source)
            if split is not None and position > start and line_start and split.search(text.rstrip("\r\n")):
                yield Document(source, start, position, digests.draw(), blank, digests.key(), count)
                start, digests, blank, count = position, Digests(seed), True, 0
            line_start = chunk.endswith(b"\n")
            digests.update(chunk if errors == "strict" else text.encode())
            blank = blank and (not text or text.isspace())
            count += replaced[0] - before
            position += len(chunk)
        before = replaced[0]
        rest = _decode(decoder, b"", position, source, final=True)
        if rest:
            digests.update(rest.encode())
            blank = False
        count += replaced[0] - before
    check_unchanged(source)
    if position > start:
        yield Document(source, start, position, digests.draw(), blank, digests.key(), count)


def _decode(
    decoder: codecs.IncrementalDecoder, chunk: bytes, position: int, source: Source, final: bool = False
) -> str:
    pending = len(decoder.getstate()[0])  # bytes of a character that the chunk before has begun
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        offset, byte = position - pending + error.start, error.object[error.start]
        raise UserError(f"{source.path} is not UTF-8: byte {byte:#04x} at offset {offset}") from error


def pieces(document: Document, errors: str = "strict") -> Iterator[str]:
    """The text of a document in pieces of about PIECE_BYTES or less, cut after a line end where there is one.

    Nearly every document is one piece. A larger one is encoded piece by piece, since encoders need some hundred bytes
    of memory a token: a token cannot span the cut (and a tokenizer that puts a space before a text puts one there).
    """
    with document.source.path.open("rb") as file:
        file.seek(document.start)

        def blocks() -> Iterator[bytes]:
            left = document.end - document.start
            while left:
                block = file.read(min(left, PIECE_BYTES))
                if not block:
                    raise UserError(f"{document.source.path} became shorter while it was read")
                left -= len(block)
                yield block

        yield from cut_text(blocks(), errors)


def cut_text(blocks: Iterable[bytes], errors: str = "strict") -> Iterator[str]:
    """UTF-8 in blocks, as text cut after the last line end of each block, or after its last whole character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    rest, waiting = "", None
    for block in blocks:
        if waiting is not None:
            text = rest + decoder.decode(waiting)
            cut = text.rfind("\n") + 1 or len(text)
            rest = text[cut:]
            if cut:
                yield text[:cut]
        waiting = block
    if waiting is not None:
        yield rest + decoder.decode(waiting, True)
