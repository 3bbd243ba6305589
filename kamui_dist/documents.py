"""Where documents end in a stream of tokens, and what that means for a window: attention, positions, targets. No torch.

With `data.document_mask` a token attends only to tokens of its own document, positions restart with each document, and
the first token of a document is nobody's target: the prediction across a border does not count. A document that began
before its window counts from the window's first token, since nothing before that is seen.

Both facts about a token, its document and its position, are in one number: where in the window its document begins.
Two tokens are of one document if that number is equal; the position of token t is t minus it.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist.errors import UserError

_BLOCK = 512  # entries that are read at once when the search has come so close: 4 KiB
_MORE = 64  # and some beyond, which most windows end within


class DocumentEnds:
    """An index on disk of ascending end offsets (in tokens, exclusive), one a document, searched where it lies.

    A window costs O(log documents) positioned reads, in practice one; 4,096 entries at most are kept in memory. name:
    the config key, for errors. count: documents. tokens: of the stream. skip: bytes of the file before the first entry.
    divisor: of an entry, to make bytes of it tokens. shift: 1 if the file holds where documents begin, so that entry
    k + 1 is where document k ends; the last one then ends at `tokens`, and has no entry.
    """

    def __init__(
        self, name: str, path: Path, count: int, tokens: int, *, skip: int = 0, divisor: int = 1, shift: int = 0
    ) -> None:
        self.name, self.path, self.count, self.tokens = name, path, count, tokens
        self._skip, self._divisor, self._shift = skip, divisor, shift
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{name}: cannot open {path}: {error.strerror}") from error
        self._places, self._marks = np.zeros(0, np.int64), None if count else np.zeros(0, np.int64)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, count: int) -> np.ndarray:
        """Entries first .. first + count - 1: int64 (count,)."""
        inside = min(count, self.count - self._shift - first)
        data = os.pread(self._descriptor, 8 * inside, self._skip + 8 * (first + self._shift))
        if len(data) != 8 * inside:
            raise UserError(f"{self.name}: {self.path} has become shorter since it was opened")
        ends = np.frombuffer(data, dtype="<u8").astype(np.int64) // self._divisor
        return ends if inside == count else np.concatenate([ends, np.full(count - inside, self.tokens)])

    def rank(self, position: int) -> int:
        """How many documents end at or before token `position`: the number of the document that this token is of."""
        low, high = self._bracket(position)
        return low + int(np.searchsorted(self.read(low, high - low), position, side="right"))

    def borders(self, firsts: np.ndarray, length: int) -> np.ndarray:
        """Whether a document ends right after each of `length` tokens from each of `firsts` on: bool (n, length)."""
        out = np.zeros((len(firsts), length), dtype=bool)
        for row, first in enumerate(firsts.tolist()):
            low, high = self._bracket(first)
            high = min(high + _MORE, self.count)
            while low < high:
                ends = self.read(low, high - low)
                out[row, ends[slice(*np.searchsorted(ends, (first, first + length), side="right"))] - first - 1] = True
                if ends[-1] > first + length:
                    break
                low, high = high, min(high + _BLOCK, self.count)
        return out

    def _bracket(self, position: int) -> tuple[int, int]:
        """low, high, at most a block apart: `rank(position)` lies in [low, high]."""
        if (
            self._marks is None
        ):  # some entries, evenly spread and never more than 4,096: most of the search without a read
            self._places = np.linspace(0, self.count - 1, min(4096, self.count)).astype(np.int64)
            self._marks = np.array([int(self.read(place, 1)[0]) for place in self._places.tolist()], dtype=np.int64)
        mark = int(np.searchsorted(self._marks, position, side="right"))
        low = int(self._places[mark - 1]) + 1 if mark else 0
        high = int(self._places[mark]) if mark < len(self._places) else self.count
        while high - low > _BLOCK:
            middle = (low + high) // 2
            if int(self.read(middle, 1)[0]) <= position:
                low = middle + 1
            else:
                high = middle
        return low, high


def document_starts(ends_after: np.ndarray) -> np.ndarray:
    """ends_after: bool (n, T), whether a document ends after token t of the window. Returns int64 (n, T + 1): where in
    the window the document of each token begins.
    """
    n, length = ends_after.shape
    starts = np.zeros((n, length + 1), dtype=np.int64)
    np.multiply(ends_after, np.arange(1, length + 1), out=starts[:, 1:])
    return np.maximum.accumulate(starts, axis=1, out=starts)


def open_index(name: str, path: Path, entry: dict[str, Any], documents: int, tokens: int) -> DocumentEnds:
    """documents.bin beside our shards: little-endian uint64. Raises UserError if its size is not that of `documents`."""
    ends = DocumentEnds(name, path, documents, tokens)
    size = path.stat().st_size
    if size != 8 * documents or size != entry["bytes"]:
        raise UserError(
            f"{name}: {path} has {size} bytes, but its header says {documents} documents = {8 * documents} bytes"
            f" ({entry['bytes']} written)"
        )
    last = int(ends.read(documents - 1, 1)[0]) if documents else 0
    if last > tokens:
        raise UserError(f"{name}: {path} ends its last document at token {last}, beyond the {tokens} tokens")
    return ends
