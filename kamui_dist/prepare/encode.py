"""From sources to tokens: units of about 1 MiB in the order of the sources, and what a process makes of one. No torch.

What a document becomes depends on that document alone, so the result does not depend on how documents are put into
units, nor on which process encodes which unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kamui_dist.errors import UserError
from kamui_dist.prepare import corpus, records
from kamui_dist.prepare.chat import Chat, Part, Template
from kamui_dist.prepare.corpus import PIECE_BYTES, REPLACE, Digests, Source
from kamui_dist.prepare.records import BadRecord, Block
from kamui_dist.tokenizer import Tokenizer

_UNIT_BYTES, _UNIT_TEXTS = 1 << 20, 1024
EMPTY, BAD, NO_TARGET = "empty", "bad_records", "no_target"  # why a document is left out, as headers name it


class Reading(NamedTuple):
    """How sources become documents."""

    split: str | None = None  # plain text: a document starts at each line in which this is found
    text_field: str = "text"  # of records
    supervised: bool = False  # records are examples: prompt and completion, or messages
    replace_bad_text: bool = False  # else text that is not UTF-8 is an error
    skip_bad: bool = False  # else a record that cannot be used is an error
    separator: bool = True  # a token after each document, if the tokenizer has one
    seed: int = 0  # of the held-out split
    val_fraction: float = 0.0

    @property
    def errors(self) -> str:
        return REPLACE if self.replace_bad_text else "strict"

    @property
    def columns(self) -> list[str]:
        if self.supervised:
            return ["prompt", "completion", "messages", "tools", "documents"]
        return list(dict.fromkeys((self.text_field, self.text_field.split(".")[0])))


class Piece(NamedTuple):
    """A document of a text file, or a part of a large one."""

    source: int
    text: str
    first: bool
    last: bool
    draw: bytes
    key: bytes
    replaced: int


class Unit(NamedTuple):
    pieces: list[Piece]
    source: int  # of the block
    block: Block | None
    read: int  # bytes of all sources that are read with this unit, for the progress


class Row(NamedTuple):
    """What became of a piece or a record, in the order of the source."""

    source: int
    tokens: int = 0
    target_tokens: int = 0
    text_bytes: int = 0
    target_text_bytes: int = 0
    held_out: bool = False
    key: bytes = b""  # equal for equal documents
    first: bool = True
    last: bool = True
    skipped: str = ""  # why it is left out
    replaced: int = 0  # places that were not UTF-8


class Encoded(NamedTuple):
    ids: np.ndarray  # (tokens,)
    mask: np.ndarray | None  # bool (tokens,)
    rows: list[Row]  # whose tokens follow each other in ids
    read: int
    error: str | None  # what stands after the last row


def units(sources: Sequence[Source], reading: Reading) -> Iterator[Unit]:
    """All of the sources, in order. Raises UserError after everything that stands before the fault."""
    split = corpus.compile_split(reading.split)
    waiting: list[Piece] = []
    size = base = read = 0
    try:
        for index, source in enumerate(sources):
            if source.kind == "text":
                for document in corpus.documents(source, split, reading.seed, reading.errors):
                    read = base + document.start
                    texts = corpus.pieces(document, reading.errors) if not document.blank else [""]
                    for number, text in enumerate(texts):
                        waiting.append(Piece(index, text, number == 0, False, document.digest, document.key, 0))
                        length = len(text.encode())
                        size, read = size + length, read + length
                        if size >= _UNIT_BYTES or len(waiting) >= _UNIT_TEXTS:
                            # The last piece waits for the next one, or for the document's end.
                            if waiting[:-1]:
                                yield Unit(waiting[:-1], 0, None, min(read, base + source.bytes))
                            waiting, size = waiting[-1:], length
                    waiting[-1] = waiting[-1]._replace(last=True, replaced=document.replaced)
            else:
                if waiting:
                    yield Unit(waiting, 0, None, base)
                    waiting, size = [], 0
                for block in records.blocks(source, reading.columns):
                    yield Unit([], index, block, base + int(block.done * source.bytes))
            base += source.bytes
    except UserError:
        if waiting:
            yield Unit(waiting, 0, None, base)
        raise
    if waiting:
        yield Unit(waiting, 0, None, base)


def texts(sources: Sequence[Source], reading: Reading) -> Iterator[str]:
    """The documents' text in pieces, for a tokenizer's training. Raises UserError as `units` and for a bad record."""
    for unit in units(sources, reading):
        yield from (piece.text for piece in unit.pieces)
        if unit.block is not None:
            for where, value, _ in records.parse(unit.block, reading.errors):
                try:
                    if isinstance(value, BadRecord):
                        raise value
                    text, _ = records.whole_text(records.field(value, reading.text_field, where), reading.errors, where)
                except BadRecord as error:
                    if not reading.skip_bad:
                        raise UserError(str(error)) from error
                else:
                    yield text


class Encoder:
    """Makes tokens of units. Pickles, so that it can be sent to other processes.

    dtype: of the ids. template: for chats, if the reading is supervised.
    """

    def __init__(self, tokenizer: Tokenizer, reading: Reading, dtype: str, template: Template | None = None) -> None:
        self.tokenizer, self.reading, self.dtype, self.template = tokenizer, reading, dtype, template
        self._chat: Chat | None = None

    def __call__(self, unit: Unit) -> Encoded:
        reading = self.reading
        done: list[tuple[Row, list[Part]]] = []
        error = None
        for piece in unit.pieces:
            held_out = self._held_out(piece.draw)
            row = Row(piece.source, 0, 0, 0, 0, held_out, piece.key, piece.first, piece.last, "", piece.replaced)
            done.append((row, [Part(piece.text, True)]) if piece.text else (row._replace(skipped=EMPTY), []))
        if unit.block is not None:
            try:
                for where, value, replaced in records.parse(unit.block, reading.errors):
                    try:
                        if isinstance(value, BadRecord):
                            raise value
                        if reading.supervised:
                            done.append(self._example(unit.source, value, where, replaced))
                        else:
                            done += self._document(unit.source, value, where, replaced)
                    except BadRecord as bad:
                        if not reading.skip_bad:
                            raise UserError(f"{bad} (--skip-bad leaves such records out)") from bad
                        done.append((Row(unit.source, skipped=BAD, replaced=replaced), []))
            except UserError as fault:
                error = str(fault)
        return self._encoded(done, unit.read, error)

    def _held_out(self, draw: bytes) -> bool:
        # A uniform number in [0, 1) from (seed, content): equal documents never stand on both sides.
        return int.from_bytes(draw, "little") < self.reading.val_fraction * 2.0**64

    def _document(self, source: int, value: dict, where: str, replaced: int) -> list[tuple[Row, list[Part]]]:
        text, more = records.whole_text(
            records.field(value, self.reading.text_field, where), self.reading.errors, where
        )
        row = Row(source, replaced=replaced + more)
        if not text or text.isspace():
            return [(row._replace(skipped=EMPTY), [])]
        data = text.encode()
        row = self._decided(row, data)
        if len(data) <= PIECE_BYTES:
            return [(row, [Part(text, True)])]
        blocks = (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))
        pieces = [p for p in corpus.cut_text(blocks) if p]
        last = len(pieces) - 1
        return [
            (row._replace(first=i == 0, last=i == last, replaced=row.replaced if i == 0 else 0), [Part(p, True)])
            for i, p in enumerate(pieces)
        ]

    def _decided(self, row: Row, content: bytes) -> Row:
        digests = Digests(self.reading.seed)
        digests.update(content)
        return row._replace(held_out=self._held_out(digests.draw()), key=digests.key())

    def _example(self, source: int, value: dict, where: str, replaced: int) -> tuple[Row, list[Part]]:
        separator = self.tokenizer.separator if self.reading.separator else None
        if "messages" in value and value["messages"] is not None:
            if self._chat is None:
                assert self.template is not None
                self._chat = Chat(self.template, self.tokenizer.special_tokens)
            more = {key: value[key] for key in ("tools", "documents") if value.get(key) is not None}
            parts = self._chat.parts(value["messages"], where, more)
            # The template ends the answer; the separator after it belongs to no speaker.
            if separator is not None and not (parts and parts[-1].content == separator):
                parts.append(Part(separator, False))
        elif "prompt" in value or "completion" in value:
            prompt, completion = (records.field(value, name, where) for name in ("prompt", "completion"))
            parts = [Part(prompt, False), Part(completion, True)]
            if separator is not None:
                parts.append(Part(separator, True))
        else:
            raise BadRecord(f"{where} has neither messages nor prompt and completion; it has {', '.join(value)}")
        for i, part in enumerate(parts):
            if isinstance(part.content, str):
                text, more_replaced = records.whole_text(part.content, self.reading.errors, where)
                parts[i], replaced = Part(text, part.target), replaced + more_replaced
        row = self._decided(Row(source, replaced=replaced), json.dumps(parts).encode())
        return row, parts

    def _encoded(self, done: list[tuple[Row, list[Part]]], read: int, error: str | None) -> Encoded:
        """Encodes all texts at once, and puts what came out back in order."""
        contents = [part.content for _, parts in done for part in parts]
        batch = iter(self.tokenizer.encode_batch([content for content in contents if isinstance(content, str)]))
        supervised = self.reading.supervised
        separator = self.tokenizer.separator if self.reading.separator and not supervised else None
        rows: list[Row] = []
        runs: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for row, parts in done:
            begin, tokens, targets, text_bytes, target_bytes = len(runs), 0, 0, 0, 0
            for content, target in parts:
                ids = next(batch) if isinstance(content, str) else np.array([content], dtype=np.uint32)
                size = len(content.encode()) if isinstance(content, str) else 0
                runs.append(ids)
                tokens, text_bytes = tokens + len(ids), text_bytes + size
                if target:
                    targets, target_bytes = targets + len(ids), target_bytes + size
                if supervised:
                    masks.append(np.full(len(ids), target))
            if supervised and parts and targets == 0:
                del runs[begin:], masks[begin:]
                rows.append(Row(row.source, skipped=NO_TARGET, replaced=row.replaced))
                continue
            if separator is not None and parts and row.last:
                runs.append(np.array([separator], dtype=np.uint32))
                tokens, targets = tokens + 1, targets + 1
            rows.append(
                row._replace(
                    tokens=tokens, target_tokens=targets, text_bytes=text_bytes, target_text_bytes=target_bytes
                )
            )
        ids = np.concatenate(runs) if runs else np.zeros(0, np.uint32)
        mask = (np.concatenate(masks) if masks else np.zeros(0, np.bool_)) if supervised else None
        return Encoded(ids.astype(self.dtype), mask, rows, read, error)


def check_supervised(sources: Sequence[Source]) -> None:
    """Raises UserError if a source is plain text, which has no examples."""
    text: Path | None = next((source.path for source in sources if source.kind == "text"), None)
    if text is not None:
        raise UserError(f"--supervised takes records ({', '.join(corpus.RECORD_SUFFIXES)}), and {text} is plain text")
