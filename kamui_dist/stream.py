"""A stream of tokens in files, and the windows of it: what every format of training data is opened as. No torch.

Window w of context length T is tokens w*T .. w*T + T of the stream: T inputs, and T targets one further, so neighbours
share one token and a stream of N tokens has (N - 1) // T windows. What is left at the end of the stream, fewer than
T + 1 tokens, is not used.

Windows are fetched by positioned reads into a buffer and not through a memory map, because the pages of a map count as
this process's memory for as long as the map lives, a truncated file is then an error and not a SIGBUS, and one read
costs less than the page faults of a fresh map. At most 64 files are open at a time, so 10,000 shards are fine.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist.documents import DocumentEnds, document_starts
from kamui_dist.errors import UserError

_OPEN_FILES = 64
CHECKED = 32  # windows, in `content`


class Files:
    """The data of some files, end to end, in items of `dtype`. Safe to use from several threads.

    name: the config key that gave them, for errors. paths: absolute. lengths: items in each file. skip: bytes before
    the data in each file.
    """

    def __init__(
        self, name: str, paths: list[str], lengths: np.ndarray, dtype: np.dtype[Any], skip: list[int] | None = None
    ) -> None:
        self.name, self.paths, self.dtype, self.skip = name, paths, dtype, skip
        # Where in the stream each file starts, and the end: int64 (files + 1,).
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self._lock = threading.Lock()
        self._open: OrderedDict[int, int] = OrderedDict()  # file -> descriptor, least recently used first
        self._close = weakref.finalize(self, _close_all, self._open)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, position: int) -> tuple[str, int]:
        """The file that holds item `position`, and the byte in it where the item begins."""
        file = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.paths[file], (position - int(self.starts[file])) * self.dtype.itemsize + self._skip(file)

    def read(self, firsts: np.ndarray, width: int) -> np.ndarray:
        """`width` items from each of `firsts` on: int64 (n,) -> (n, width), in the type of the files.

        Raises UserError naming the file for one that is missing or has become shorter.
        """
        if firsts.size == 0:
            return np.empty((0, width), dtype=self.dtype)
        assert firsts.min() >= 0, "a window id is negative"
        assert firsts.max() + width <= len(self), "a window id is beyond the data set"
        itemsize = self.dtype.itemsize
        files = np.searchsorted(self.starts, firsts, side="right") - 1
        offsets = (firsts - self.starts[files]) * itemsize
        whole = firsts + width <= self.starts[files + 1]  # most windows lie within one file
        row_bytes = width * itemsize
        data = np.empty(len(firsts) * row_bytes, dtype=np.uint8)
        view = data.data
        with self._lock:
            places = zip(files.tolist(), offsets.tolist(), whole.tolist(), strict=True)
            for row, (file, offset, is_whole) in enumerate(places):
                target = view[row * row_bytes : (row + 1) * row_bytes]
                while not is_whole:  # the part in this file, then on in the next one
                    part = min(len(target), self._bytes_of(file) - offset)
                    self._read_into(file, offset, target[:part])
                    target, file, offset = target[part:], file + 1, 0
                    is_whole = len(target) <= self._bytes_of(file)
                self._read_into(file, offset, target)
        return data.view(self.dtype).reshape(-1, width)

    def _skip(self, file: int) -> int:
        return 0 if self.skip is None else self.skip[file]

    def _bytes_of(self, file: int) -> int:
        return int(self.starts[file + 1] - self.starts[file]) * self.dtype.itemsize

    def _read_into(self, file: int, offset: int, target: memoryview) -> None:
        descriptor = self._descriptor(file)
        offset += self._skip(file)
        while len(target):
            try:
                count = os.preadv(descriptor, [target], offset)
            except OSError as error:
                raise UserError(f"{self.name}: cannot read {self.paths[file]}: {error.strerror}") from error
            if count == 0:
                raise UserError(
                    f"{self.name}: {self.paths[file]} ends at byte {offset}, before the"
                    f" {self._bytes_of(file) + self._skip(file)} bytes that it had; it changed after it was opened"
                )
            target, offset = target[count:], offset + count

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        try:
            descriptor = os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{self.name}: cannot open {self.paths[file]}: {error.strerror}") from error
        self._open[file] = descriptor
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


@dataclass(frozen=True)
class Sample:
    digest: str  # SHA-256 of the windows
    repeats: float  # share of the targets that are the same token as their input
    tokens: np.ndarray  # that are targets: int64, in order
    counts: np.ndarray  # how often each of them is one: int64


class TokenStream:
    """One stream of tokens to train on or to validate with. Subclasses fill in what they know of it and `_files`."""

    path: Path  # absolute, for messages
    name: str  # the config key that gave it, for errors
    format: str
    vocab_size: int | None = None  # None: the files do not say; the model's bounds the ids
    separator: int | None = None  # the token after each document; None: there is none, or none is known
    documents: int | None = None
    bytes_per_target: float | None = None  # UTF-8 bytes of text behind one target, for bits per byte
    tokenizer_name: str = "unknown"
    tokenizer_fingerprint: str | None = None  # None: the files do not say
    tokenizer: str | None = None  # what `tokenizer.load` takes
    fingerprint: str  # sha256 of what the tokens are, not of where they lie
    identity: dict[str, Any]  # what went into it, but for long lists: to say what has changed
    ends: DocumentEnds | None = None  # where documents end, if there is an index
    _files: Files
    _mask: Files | None = None  # uint8, 1 where a token counts as a target; None: all do

    @property
    def tokens(self) -> int:
        return len(self._files)

    @property
    def has_mask(self) -> bool:
        return self._mask is not None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._files.dtype

    def windows(self, context_length: int) -> int:
        """The number of windows, at least 1. Raises UserError if the tokens do not fill one."""
        windows = max(self.tokens - 1, 0) // context_length
        if windows == 0:
            raise UserError(
                f"{self.name}: {self.path} holds {self.tokens} tokens, but one window takes model.context_length + 1 ="
                f" {context_length + 1}; prepare more text, or lower model.context_length"
            )
        return windows

    def read(self, window_ids: np.ndarray, context_length: int, vocab_size: int | None = None) -> np.ndarray:
        """The windows' tokens: int64 (len(window_ids), context_length + 1). Arguments and errors as `read_raw`."""
        return self.read_raw(window_ids, context_length, vocab_size).astype(np.int64)

    def read_raw(self, window_ids: np.ndarray, context_length: int, vocab_size: int | None = None) -> np.ndarray:
        """`read`, in the type of the files. window_ids: int64 (windows,). vocab_size: the model's, if smaller.

        Raises UserError naming the file for a file that is missing or has become shorter, and with offset and id for a
        token id that is not below the vocabulary size.
        """
        firsts = np.asarray(window_ids, dtype=np.int64) * context_length  # 64-bit: positions beyond 2**32 are ordinary
        tokens = self._files.read(firsts, context_length + 1)
        known = [size for size in (vocab_size, self.vocab_size) if size is not None]
        if known and tokens.size and int(tokens.max()) >= min(known):
            self._raise_beyond_vocabulary(tokens, firsts, min(known))
        return tokens

    def read_mask(self, window_ids: np.ndarray, context_length: int) -> np.ndarray | None:
        """Which targets of the windows count, by the data's own mask: bool (len(window_ids), T); None: all do."""
        if self._mask is None:
            return None
        firsts = np.asarray(window_ids, dtype=np.int64) * context_length + 1
        return self._mask.read(firsts, context_length) != 0

    def read_documents(self, window_ids: np.ndarray, context_length: int, rows: np.ndarray) -> np.ndarray:
        """For every token of the windows, where in the window its document begins: int64 (len(window_ids), T + 1).

        rows: the windows' tokens, as read. A document that began before its window counts from the window's start.
        Raises UserError if the data do not say where documents end.
        """
        self.check_documents()
        if self.ends is None:
            assert self.separator is not None
            return document_starts(rows[:, :-1] == self.separator)
        firsts = np.asarray(window_ids, dtype=np.int64) * context_length
        return document_starts(self.ends.borders(firsts, context_length))

    def check_documents(self) -> None:
        """Raises UserError if the data do not say where documents end."""
        if self.ends is None and self.separator is None:
            raise UserError(
                f"{self.name}: data.document_mask needs to know where documents end, and {self.path} has neither an index"
                " of them nor a separator token; name the token that ends one with `separator`, or prepare the text again"
            )

    def sample(self, context_length: int, windows: int) -> Sample:
        """So many windows, spread evenly over the stream: what the files hold now, whatever is said of them.

        Raises UserError as `read_raw`.
        """
        ids = np.unique(np.linspace(0, self.windows(context_length) - 1, windows).astype(np.int64))
        rows, mask = self.read_raw(ids, context_length), self.read_mask(ids, context_length)
        digest = hashlib.sha256(rows.tobytes())
        targets, same = rows[:, 1:], rows[:, 1:] == rows[:, :-1]
        if mask is not None:
            digest.update(mask.tobytes())
            targets, same = targets[mask], same[mask]
        tokens, counts = np.unique(
            targets, return_counts=True
        )  # not by id: one that is no token may be beyond all memory
        return Sample(digest.hexdigest(), float(same.mean()) if same.size else 0.0, tokens.astype(np.int64), counts)

    def content(self, context_length: int) -> str:
        """What the files say that the tokens are, and what CHECKED windows of them are now, in one checksum: a file may have been
        changed in place. Raises UserError as `read_raw`."""
        return f"{self.fingerprint[:20]}{self.sample(context_length, CHECKED).digest[:20]}"

    def locate(self, position: int) -> tuple[str, int]:
        """The file that holds token `position` of the stream, and the byte in it."""
        return self._files.place(position)

    def _raise_beyond_vocabulary(self, tokens: np.ndarray, firsts: np.ndarray, bound: int) -> None:
        row, column = (int(i) for i in np.argwhere(tokens >= bound)[0])
        path, offset = self._files.place(int(firsts[row]) + column)
        raise UserError(
            f"{self.name}: {path} holds token id {int(tokens[row, column])} at byte {offset}, but"
            f" the vocabulary has {bound} ids (0 to {bound - 1}); is model.vocab_size ({bound}) that of the tokenizer?"
        )
