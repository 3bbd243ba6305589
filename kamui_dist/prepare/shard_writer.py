"""Writes token shards: the other side of `shards.py`. No torch.

Beside the shards: `documents.bin`, where each document ends (little-endian uint64, in tokens of the whole stream, the
separator included), and for supervised data `NNNNN.mask`, one byte a token: 1 where the token counts as a target.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import files
from kamui_dist.errors import UserError
from kamui_dist.shards import DTYPES, FORMAT, HEADER, VERSION

DOCUMENTS = "documents.bin"


def dtype_name(vocab_size: int, wanted: str = "auto") -> str:
    """The narrowest type that holds every id below `vocab_size`, or `wanted` if it does.

    Raises UserError beyond 2**32 ids, and if `wanted` is too narrow: an id is never cut to fit.
    """
    if vocab_size > 1 << 32:
        raise UserError(f"a vocabulary of {vocab_size} ids does not fit uint32")
    narrowest = "uint16" if vocab_size <= 1 << 16 else "uint32"
    if wanted == "auto":
        return narrowest
    if vocab_size > 1 << 8 * DTYPES[wanted].itemsize:
        raise UserError(f"a vocabulary of {vocab_size} ids does not fit {wanted} (65536 ids at most); use {narrowest}")
    return wanted


class _HashedFile:
    """A file that knows the sha256 of what was written to it."""

    def __init__(self, path: Path) -> None:
        self.bytes = 0
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        """Flushes it to the disk and closes it. Returns the sha256. Raises OSError."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._sha256.hexdigest()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # of the flush; the descriptor is closed all the same
            self._file.close()


class ShardWriter:
    """Writes one token stream into `directory` as 00000.bin, 00001.bin, ... of `shard_tokens` tokens each.

    loss_mask: each `write` comes with a mask. dtype: "auto", or one of DTYPES. Raises UserError if the dtype is too
    narrow for the vocabulary.
    """

    def __init__(
        self, directory: Path, vocab_size: int, shard_tokens: int, loss_mask: bool = False, dtype: str = "auto"
    ) -> None:
        self.directory, self.vocab_size, self.shard_tokens = directory, vocab_size, shard_tokens
        self.dtype = dtype_name(vocab_size, dtype)
        self.loss_mask = loss_mask
        self.tokens = 0
        self.shards: list[dict[str, Any]] = []
        self._file: _HashedFile | None = None
        self._mask: _HashedFile | None = None
        self._documents: _HashedFile | None = None
        self._room = 0

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None, ends: np.ndarray | None = None) -> None:
        """Appends ids: any integer type, (tokens,). mask: as many, true where a token counts as a target. ends: int64,
        ascending: after how many of these ids a document ends.

        Raises OSError (disk full), UserError for an id beyond the vocabulary.
        """
        assert (mask is not None) == self.loss_mask, "a mask comes with every write or with none"
        assert mask is None or mask.shape == ids.shape, "one mask entry a token"
        if ids.size and (int(ids.max()) >= self.vocab_size or int(ids.min()) < 0):
            raise UserError(f"token id {int(ids.max())} does not fit a vocabulary of {self.vocab_size}")
        if ends is not None and len(ends):
            if self._documents is None:
                self._documents = _HashedFile(self.directory / DOCUMENTS)
            self._documents.write((np.asarray(ends, np.uint64) + np.uint64(self.tokens)).astype("<u8").tobytes())
        ids = ids.astype(DTYPES[self.dtype])
        start = 0
        while start < ids.size:
            if self._room == 0:
                self._begin_shard()
            assert self._file is not None
            end = min(start + self._room, ids.size)
            self._file.write(ids[start:end].tobytes())
            if self._mask is not None and mask is not None:
                self._mask.write(mask[start:end].astype(np.uint8).tobytes())
            self._room -= end - start
            self.shards[-1]["tokens"] += end - start
            self.tokens += end - start
            start = end

    def _begin_shard(self) -> None:
        self._finish_shard()
        name = f"{len(self.shards):05d}"
        self.shards.append({"file": f"{name}.bin", "tokens": 0})
        self._file = _HashedFile(self.directory / f"{name}.bin")
        if self.loss_mask:
            self._mask = _HashedFile(self.directory / f"{name}.mask")
        self._room = self.shard_tokens

    def _finish_shard(self) -> None:
        if self._file is not None:
            self.shards[-1]["sha256"] = self._file.finish()
            self._file = None
        if self._mask is not None:
            self.shards[-1]["mask_sha256"] = self._mask.finish()
            self._mask = None

    def close(self, **header: Any) -> None:
        """Ends the last shard and writes the header, last, with what the caller adds to it. Raises OSError."""
        self._finish_shard()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokens": self.tokens,
            **({"loss_mask": True} if self.loss_mask else {}),
            **header,
        }
        if self._documents is not None:
            sha256 = self._documents.finish()
            content["documents_index"] = {"file": DOCUMENTS, "sha256": sha256, "bytes": self._documents.bytes}
            self._documents = None
        files.write_json(self.directory / HEADER, {**content, "shards": self.shards})

    def abandon(self) -> None:
        """Closes the files that are open, if any: for a writer that failed."""
        for file in (self._file, self._mask, self._documents):
            if file is not None:
                file.abandon()
