"""Puts encoded units, in their order, into the splits of a data set: what is left out, held out, and counted. No torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kamui_dist.errors import UserError
from kamui_dist.prepare.encode import BAD, EMPTY, NO_TARGET, Encoded, Row
from kamui_dist.prepare.shard_writer import ShardWriter

DUPLICATE, REPLACED = "duplicates", "replaced_characters"


class Part:
    """One split in the making."""

    def __init__(self, writer: ShardWriter, sources: int) -> None:
        self.writer = writer
        self.documents = self.text_bytes = self.target_tokens = self.target_text_bytes = 0
        self.source_documents, self.source_tokens = [0] * sources, [0] * sources

    def count(self, row: Row) -> None:
        self.documents += row.last
        self.text_bytes += row.text_bytes
        self.target_tokens += row.target_tokens
        self.target_text_bytes += row.target_text_bytes
        self.source_documents[row.source] += row.last
        self.source_tokens[row.source] += row.tokens


class Assembler:
    """Writes train and, if there is to be one, val.

    dedup: of equal documents the first one stays; takes about 100 bytes of memory a document. max_documents: after how
    many documents of both splits to stop. Use as a context manager: it closes what is open if the body fails.
    """

    def __init__(
        self, writers: dict[str, ShardWriter], sources: int, dedup: bool = False, max_documents: int | None = None
    ) -> None:
        self.parts = {name: Part(writer, sources) for name, writer in writers.items()}
        self.skipped: Counter[str] = Counter()
        self.documents = 0
        self._seen: set[bytes] | None = set() if dedup else None
        self._max_documents = max_documents
        self._dropping = False  # the pieces of a document that is a duplicate

    def __enter__(self) -> Assembler:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for part in self.parts.values():
                part.writer.abandon()

    @property
    def tokens(self) -> int:
        return sum(part.writer.tokens for part in self.parts.values())

    @property
    def full(self) -> bool:
        return self.documents == self._max_documents

    def add(self, encoded: Encoded) -> None:
        """The next unit. Raises OSError (disk full), UserError for what is wrong with the unit, at its place."""
        taken: list[str | None] = []  # of each row: the part it belongs to
        for row in encoded.rows:
            taken.append(None if self.full else self._place(row))
        lengths = np.array([row.tokens for row in encoded.rows], dtype=np.int64)
        for name, part in self.parts.items():
            chosen = np.array([place == name for place in taken], dtype=np.bool_)
            if not chosen.any():
                continue
            tokens = np.repeat(chosen, lengths)
            rows = [row for row, place in zip(encoded.rows, taken, strict=True) if place == name]
            last = np.array([row.last for row in rows], dtype=np.bool_)
            ends = np.cumsum(lengths[chosen])[last]
            part.writer.write(encoded.ids[tokens], None if encoded.mask is None else encoded.mask[tokens], ends)
            for row in rows:
                part.count(row)
        if encoded.error is not None and not self.full:
            raise UserError(encoded.error)

    def _place(self, row: Row) -> str | None:
        self.skipped[REPLACED] += row.replaced
        if row.skipped:
            self.skipped[row.skipped] += 1
            return None
        if row.first and self._seen is not None:
            self._dropping = row.key in self._seen
            self._seen.add(row.key)
            self.skipped[DUPLICATE] += self._dropping
        if self._dropping:
            return None
        self.documents += row.last
        return "val" if row.held_out else "train"

    def skipped_counts(self) -> dict[str, int]:
        return {reason: self.skipped[reason] for reason in (EMPTY, BAD, NO_TARGET, DUPLICATE, REPLACED)}

    def check_not_empty(self, recipe: dict[str, Any]) -> None:
        """Raises UserError if a split has no document."""
        if self.documents == 0:
            if self.skipped[NO_TARGET]:
                raise UserError(f"no example has a target: all {self.skipped[NO_TARGET]} are prompt only")
            if self.skipped[BAD]:
                raise UserError(
                    f"no record can be used: {self.skipped[BAD]} are bad; without --skip-bad the first is named"
                )
            raise UserError("the inputs hold nothing but white space")
        for name, part in self.parts.items():
            if part.documents == 0:
                more = "" if recipe["split"] else " cut the text into documents with --split REGEX,"
                raise UserError(
                    f"none of {self.documents} document{'s' * (self.documents > 1)} came into the {name} split"
                    f" (--val-fraction {recipe['val_fraction']}, --seed {recipe['seed']});{more} choose another --seed or"
                    " --val-fraction, or set --val-fraction 0 for no validation split"
                )

    def close(self, recipe: dict[str, Any]) -> None:
        """Writes the headers, train's last: it is what makes a directory look prepared. Raises OSError."""
        for name, part in reversed(self.parts.items()):
            counts = zip(recipe["sources"], part.source_documents, part.source_tokens, strict=True)
            masked = {"target_tokens": part.target_tokens, "target_text_bytes": part.target_text_bytes}
            part.writer.close(
                part=name,
                documents=part.documents,
                text_bytes=part.text_bytes,
                **(masked if part.writer.loss_mask else {}),
                blank_documents=self.skipped[EMPTY],
                skipped=self.skipped_counts(),
                **{
                    **recipe,
                    "sources": [{**source, "documents": docs, "tokens": tokens} for source, docs, tokens in counts],
                },
            )
