"""JSON lines (plain, .gz, .zst) and parquet: cut into blocks by whoever reads the files, parsed by whoever encodes. No torch.

A block is about 1 MiB of whole lines, or some rows; only a line longer than that is in memory as a whole.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from kamui_dist.errors import UserError
from kamui_dist.prepare import corpus
from kamui_dist.prepare.corpus import BLOCK_BYTES, Source

_ROWS = 256


class Block(NamedTuple):
    """Records of one file that follow each other."""

    path: str
    first: int  # number of the first line or row, from 1
    offset: int  # of the first byte, in the file's text (after decompression)
    lines: bytes | None
    rows: list[dict[str, Any]] | None
    done: float  # share of the file that is read with this block


class BadRecord(Exception):
    """One line or row cannot be used; the message says where and why."""


def blocks(source: Source, columns: list[str]) -> Iterator[Block]:
    """The blocks of one file, in order. columns: the fields that are needed (parquet reads no others).

    Raises UserError for a file that is damaged or that changes meanwhile, and if the package for its kind is missing.
    """
    try:
        yield from _parquet(source, columns) if source.kind == ".parquet" else _lines(source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{source.path} is damaged or cut off: {error}") from error
    corpus.check_unchanged(source)


def _lines(source: Source) -> Iterator[Block]:
    first, offset, parts = 1, 0, [b""]
    with source.path.open("rb") as file:
        for chunk in _decompressed(source, file):
            if offset == 0 and parts == [b""] and chunk.startswith(codecs.BOM_UTF8):
                chunk, offset = chunk[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
            cut = chunk.rfind(b"\n") + 1
            parts.append(chunk[:cut] if cut else chunk)
            if cut:
                data = b"".join(parts)
                yield Block(str(source.path), first, offset, data, None, file.tell() / max(source.bytes, 1))
                first, offset, parts = first + data.count(b"\n"), offset + len(data), [chunk[cut:]]
    data = b"".join(parts)
    if data:
        yield Block(str(source.path), first, offset, data, None, 1.0)


def _decompressed(source: Source, file: BinaryIO) -> Iterator[bytes]:
    if source.kind == ".jsonl.gz":
        with gzip.GzipFile(fileobj=file) as inner:
            while chunk := inner.read(BLOCK_BYTES):
                yield chunk
    elif source.kind == ".jsonl.zst":
        yield from _zst(source, file)
    else:
        while chunk := file.read(BLOCK_BYTES):
            yield chunk


def _zst(source: Source, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{source.path}: .zst needs the zstandard package: pip install 'kamui-dist[zst]'") from None
    # Frame by frame, and not through the package's stream reader: that one takes a cut-off file for a whole one.
    frame = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    try:
        while chunk := file.read(BLOCK_BYTES >> 3):
            while chunk:
                begun = True
                if data := frame.decompress(chunk):
                    yield data
                chunk = b""
                if frame.eof:
                    chunk, begun = frame.unused_data, False
                    frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise UserError(f"{source.path} is damaged: {error}") from error
    if begun:
        raise UserError(f"{source.path} is damaged or cut off: its last frame is not complete")


def _parquet(source: Source, columns: list[str]) -> Iterator[Block]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{source.path}: .parquet needs the pyarrow package: pip install 'kamui-dist[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(source.path) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns]
            if not wanted:
                has = ", ".join(file.schema_arrow.names)
                raise UserError(f"{source.path} has no column {' or '.join(columns)}; it has {has}")
            first, total = 1, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
                rows = batch.to_pylist()
                yield Block(str(source.path), first, 0, None, rows, (first - 1 + len(rows)) / total)
                first += len(rows)
    except UnicodeDecodeError as error:
        rows = f"rows {first} to {first + _ROWS - 1}"
        raise UserError(f"{source.path} is not UTF-8: byte {error.object[error.start]:#04x} in {rows}") from error
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{source.path} is not a parquet file that can be read: {_first_line(error)}") from error


def parse(block: Block, errors: str) -> Iterator[tuple[str, dict[str, Any] | BadRecord, int]]:
    """Where each record stands, the record or what is wrong with it, and how many places were not UTF-8.

    errors: "strict" or corpus.REPLACE. Raises UserError for text that is not UTF-8 if errors is "strict".
    """
    if block.rows is not None:
        for number, row in enumerate(block.rows, block.first):
            yield f"{block.path}: row {number}", row, 0
        return
    assert block.lines is not None
    offset = block.offset
    for number, line in enumerate(block.lines.split(b"\n"), block.first):
        where = f"{block.path}: line {number}"
        before = corpus.replaced[0]
        try:
            text = line.decode(errors=errors)
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise UserError(f"{where} is not UTF-8: byte {byte:#04x} at offset {offset + error.start}") from error
        count = corpus.replaced[0] - before
        offset += len(line) + 1
        if not text.strip():
            continue
        value: dict[str, Any] | BadRecord
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                value = BadRecord(f"{where} is not a JSON object")
        except (ValueError, RecursionError) as error:
            value = BadRecord(f"{where} is not JSON: {_first_line(error)}")
        yield where, value, count


def field(record: dict[str, Any], name: str, where: str) -> str:
    """The text at `name`, a key or a path of keys with dots. Raises BadRecord if there is none."""
    if name in record:  # a key that has a dot itself
        value = record[name]
    else:
        value = record
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                has = ", ".join(record) or "nothing"
                raise BadRecord(f"{where} has no field {name!r}; it has {has}")
            value = value[key]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadRecord(f"{where}: the field {name!r} is not text but {kind}")
    return value


def whole_text(text: str, errors: str, where: str) -> tuple[str, int]:
    """`text` without lone surrogates, which a JSON escape can write but UTF-8 cannot, and how many there were.

    Raises UserError if there are and errors is "strict".
    """
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError as error:
        if errors == "strict":
            code = f"U+{ord(text[error.start]):04X}"
            raise UserError(f"{where}: the text has half a character, {code}, at its character {error.start}") from None
    bad = [c for c in text if "\ud800" <= c <= "\udfff"]
    return text.translate(dict.fromkeys(map(ord, bad), "\N{REPLACEMENT CHARACTER}")), len(bad)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
