"""Writes token shards: the other side of `shards.py`. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import files
from kamui_dist.errors import UserError
from kamui_dist.shards import DTYPES, FORMAT, HEADER

VERSION = 1


def dtype_name(vocab_size: int) -> str:
    """The narrowest type that holds every id below `vocab_size`. Raises UserError beyond 2**32 ids."""
    if vocab_size > 1 << 32:
        raise UserError(f"a vocabulary of {vocab_size} ids does not fit uint32")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes one token stream into `directory` as 00000.bin, 00001.bin, ... of `shard_tokens` tokens each."""

    def __init__(self, directory: Path, vocab_size: int, shard_tokens: int) -> None:
        self.directory, self.vocab_size, self.shard_tokens = directory, vocab_size, shard_tokens
        self.dtype = dtype_name(vocab_size)
        self.tokens = 0
        self.shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._room = 0
        self._sha256 = hashlib.sha256()

    def write(self, ids: np.ndarray) -> None:
        """Appends ids (any integer type, (tokens,)). Raises OSError (disk full), UserError for an id beyond the
        vocabulary.
        """
        if ids.size and (int(ids.max()) >= self.vocab_size or int(ids.min()) < 0):
            raise UserError(f"token id {int(ids.max())} does not fit a vocabulary of {self.vocab_size}")
        ids = ids.astype(DTYPES[self.dtype])
        while ids.size:
            if self._room == 0:
                self._finish_shard()
                self.shards.append({"file": f"{len(self.shards):05d}.bin", "tokens": 0})
                self._file = (self.directory / self.shards[-1]["file"]).open("wb")
                self._room, self._sha256 = self.shard_tokens, hashlib.sha256()
            part, ids = ids[: self._room], ids[self._room :]
            data = part.tobytes()
            self._file.write(data)
            self._sha256.update(data)
            self._room -= part.size
            self.shards[-1]["tokens"] += part.size
            self.tokens += part.size

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self.shards[-1]["sha256"] = self._sha256.hexdigest()
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file = None

    def close(self, **header: Any) -> None:
        """Ends the last shard and writes the header, last, with what the caller adds to it. Raises OSError."""
        self._finish_shard()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokens": self.tokens,
            **header,
            "shards": self.shards,
        }
        files.write_json(self.directory / HEADER, content)

    def abandon(self) -> None:
        """Closes the file that is open, if any: for a writer that failed."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of the flush; the descriptor is closed all the same
                self._file.close()
