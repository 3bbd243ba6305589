"""Token shards on disk: `dataset.json` (the header) and `*.bin` (raw little-endian uint16 or uint32 ids). No torch.

All shards of a directory are one stream of tokens. Window w of context length T is tokens w*T .. w*T + T of that
stream: T inputs, and T targets one further, so neighbours share one token and a stream of N tokens has (N - 1) // T
windows. What is left at the end of the stream, fewer than T + 1 tokens, is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import files
from kamui_dist.errors import UserError

HEADER = "dataset.json"
FORMAT, VERSION = "kamui_dist tokens", 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OPEN_FILES = 64


class TokenDataset:
    """A prepared directory, opened: its header is checked, each shard's size too; no token is read before `read` asks.

    path: a directory that holds `dataset.json`. name: the config key that gave it, for errors.

    Windows are fetched by positioned reads into a buffer and not through a memory map, because the pages of a map count
    as this process's memory for as long as the map lives, a truncated file is then an error and not a SIGBUS, and one
    read costs less than the page faults of a fresh map. At most 64 files are open at a time, so 10,000 shards are fine.
    Safe to use from several threads.

    Raises UserError, naming the key and the absolute path, if the directory, the header or a shard is missing or wrong.
    """

    def __init__(self, path: str | Path, name: str = "data.path") -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = name
        self.header = header = self._read_header()
        self.dtype = DTYPES[header["dtype"]]
        self.vocab_size: int = header["vocab_size"]
        self.separator: int | None = header["separator"]  # the token after each document; None: there is none
        self.tokens: int = header["tokens"]
        self.documents: int = header["documents"]
        self.text_bytes: int = header["text_bytes"]  # UTF-8 bytes of the text behind the tokens, for bits per byte
        self.tokenizer_name: str = header["tokenizer"]["name"]
        self.tokenizer_fingerprint: str = header["tokenizer"]["fingerprint"]
        self._files = [str(self.path / shard["file"]) for shard in header["shards"]]
        lengths = np.array([shard["tokens"] for shard in header["shards"]], dtype=np.int64)
        # Where in the stream each shard starts, and the end.
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._check_files(lengths)
        identity = {
            "dtype": header["dtype"],
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer_fingerprint,
            "shards": [[shard["tokens"], shard["sha256"]] for shard in header["shards"]],
        }
        # sha256 of what the tokens are, not of where they lie: a moved or renamed directory is the same data set.
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, int] = OrderedDict()  # shard -> descriptor, least recently used first
        self._close = weakref.finalize(self, _close_all, self._open)

    @property
    def tokenizer(self) -> str:
        """What `tokenizer.load` takes: "bytes", or the absolute path of the tokenizer.json beside the split's
        directory.
        """
        return "bytes" if self.tokenizer_name == "bytes" else str(self.path.parent / "tokenizer.json")

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
        window_ids = np.asarray(window_ids, dtype=np.int64)
        width = context_length + 1
        bound = self.vocab_size if vocab_size is None else min(vocab_size, self.vocab_size)
        firsts = window_ids * context_length  # 64-bit: positions beyond 2**32 are ordinary
        if window_ids.size == 0:
            return np.empty((0, width), dtype=self.dtype)
        assert firsts.min() >= 0, "a window id is negative"
        assert firsts.max() + width <= self.tokens, "a window id is beyond the data set"
        itemsize = self.dtype.itemsize
        shards = np.searchsorted(self._starts, firsts, side="right") - 1
        offsets = (firsts - self._starts[shards]) * itemsize
        whole = firsts + width <= self._starts[shards + 1]  # most windows lie within one shard
        row_bytes = width * itemsize
        data = np.empty(len(window_ids) * row_bytes, dtype=np.uint8)
        view = data.data
        with self._lock:
            places = zip(shards.tolist(), offsets.tolist(), whole.tolist(), strict=True)
            for row, (shard, offset, is_whole) in enumerate(places):
                target = view[row * row_bytes : (row + 1) * row_bytes]
                while not is_whole:  # the part in this shard, then on in the next one
                    part = min(len(target), self._bytes_of(shard) - offset)
                    self._read_into(shard, offset, target[:part])
                    target, shard, offset = target[part:], shard + 1, 0
                    is_whole = len(target) <= self._bytes_of(shard)
                self._read_into(shard, offset, target)
        tokens = data.view(self.dtype).reshape(-1, width)
        if int(tokens.max()) >= bound:
            self._raise_beyond_vocabulary(tokens, firsts, bound)
        return tokens

    def _bytes_of(self, shard: int) -> int:
        return int(self._starts[shard + 1] - self._starts[shard]) * self.dtype.itemsize

    def _read_into(self, shard: int, offset: int, target: memoryview) -> None:
        descriptor = self._descriptor(shard)
        while len(target):
            try:
                count = os.preadv(descriptor, [target], offset)
            except OSError as error:
                raise UserError(f"{self.name}: cannot read {self._files[shard]}: {error.strerror}") from error
            if count == 0:
                raise UserError(
                    f"{self.name}: {self._files[shard]} ends at byte {offset}, before the"
                    f" {self._bytes_of(shard)} bytes that {HEADER} says; it changed after it was opened"
                )
            target, offset = target[count:], offset + count

    def _descriptor(self, shard: int) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        try:
            descriptor = os.open(self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{self.name}: cannot open {self._files[shard]}: {error.strerror}") from error
        self._open[shard] = descriptor
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _raise_beyond_vocabulary(self, tokens: np.ndarray, firsts: np.ndarray, bound: int) -> None:
        row, column = (int(i) for i in np.argwhere(tokens >= bound)[0])
        position = int(firsts[row]) + column
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        offset = (position - int(self._starts[shard])) * self.dtype.itemsize
        raise UserError(
            f"{self.name}: {self._files[shard]} holds token id {int(tokens[row, column])} at byte {offset}, but"
            f" the vocabulary has {bound} ids (0 to {bound - 1}); is model.vocab_size ({bound}) that of the tokenizer?"
        )

    def _fault(self, text: str) -> UserError:
        return UserError(f"{self.name}: {text}")

    def _read_header(self) -> dict[str, Any]:
        file = self.path / HEADER
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            if (self.path / "train" / HEADER).is_file():
                raise self._fault(f"{self.path} has no {HEADER}; its splits do: {self.path}/train") from None
            missing = f"no {HEADER} in {self.path}" if self.path.is_dir() else f"no such directory: {self.path}"
            raise self._fault(f"{missing}; make it with `kamui-dist prepare`") from None
        except OSError as error:
            raise self._fault(f"cannot read {file}: {error.strerror}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._fault(f"{file} is not JSON: {error}") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._fault(f'{file} is not a header of token shards: it lacks "format": "{FORMAT}"')
        if header.get("version") != VERSION:
            raise self._fault(f"{file} has version {header.get('version')!r}; this program reads version {VERSION}")
        faults = [text for ok, text in _header_checks(header) if not ok]
        if faults:
            raise self._fault(f"{file}: {'; '.join(faults)}")
        return header

    def _check_files(self, lengths: np.ndarray) -> None:
        for path, length in zip(self._files, lengths.tolist(), strict=True):
            try:
                size = os.stat(path).st_size  # noqa: PTH116 - 10,000 shards: Path objects would double the time
            except OSError as error:
                raise self._fault(f"cannot open the shard {path}: {error.strerror}") from error
            if size != length * self.dtype.itemsize:
                raise self._fault(
                    f"{path} has {size} bytes, but {HEADER} says {length} tokens of {self.header['dtype']} ="
                    f" {length * self.dtype.itemsize} bytes; prepare it again"
                )


def _header_checks(header: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold of a header, and what to say if it does not."""
    shards, tokenizer = header.get("shards"), header.get("tokenizer")
    shards_ok = isinstance(shards, list) and all(
        isinstance(s, dict)
        and isinstance(s.get("file"), str)
        and "/" not in s["file"]  # a header never leads out of its directory
        and _is_count(s.get("tokens"))
        and isinstance(s.get("sha256"), str)
        for s in shards
    )
    checks = [
        (header.get("dtype") in DTYPES, f"dtype {header.get('dtype')!r} is not one of {', '.join(DTYPES)}"),
        (header.get("separator") is None or _is_count(header["separator"]), "separator is neither an id nor null"),
        (
            isinstance(tokenizer, dict) and all(isinstance(tokenizer.get(k), str) for k in ("name", "fingerprint")),
            "tokenizer has no name and fingerprint",
        ),
        (shards_ok, "shards is not a list of {file, tokens, sha256}"),
    ]
    checks += [
        (_is_count(header.get(key)), f"{key} {header.get(key)!r} is not a whole number of 0 or more")
        for key in ("vocab_size", "tokens", "documents", "text_bytes")
    ]
    if all(ok for ok, _ in checks):
        total, vocab_size = sum(s["tokens"] for s in header["shards"]), header["vocab_size"]
        checks += [
            (total == header["tokens"], f"tokens is {header['tokens']}, but the shards have {total}"),
            (vocab_size >= 1, "vocab_size is 0"),
        ]
    return checks


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
