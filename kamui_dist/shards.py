"""Token shards on disk: `dataset.json` (the header) and `*.bin` (raw little-endian uint16 or uint32 ids). No torch.

All shards of a directory are one stream of tokens (`stream.py`). Beside them may lie `documents.bin`, where each
document ends (little-endian uint64, in tokens of the whole stream, the separator included), and for supervised data
`NNNNN.mask` beside each shard, one byte a token: 1 where the token counts as a target.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import documents
from kamui_dist.errors import UserError
from kamui_dist.stream import Files, TokenStream

HEADER = "dataset.json"
FORMAT, VERSION = "kamui_dist tokens", 2
READABLE = (1, 2)  # version 1 has neither documents.bin nor masks
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenDataset(TokenStream):
    """A prepared directory, opened: its header is checked, each shard's size too; no token is read before `read` asks.

    path: a directory that holds `dataset.json`. name: the config key that gave it, for errors.

    Raises UserError, naming the key and the absolute path, if the directory, the header or a shard is missing or wrong.
    """

    format = "token shards"

    def __init__(self, path: str | Path, name: str = "data.path") -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = name
        self.header = header = self._read_header()
        self.vocab_size: int = header["vocab_size"]
        self.separator: int | None = header["separator"]
        self.documents: int = header["documents"]
        self.text_bytes: int = header["text_bytes"]  # UTF-8 bytes of the text behind the tokens
        targets, text = header.get("target_tokens", header["tokens"]), header.get("target_text_bytes", self.text_bytes)
        self.bytes_per_target = text / targets if targets and text else None
        self.tokenizer_name: str = header["tokenizer"]["name"]
        self.tokenizer_fingerprint: str = header["tokenizer"]["fingerprint"]
        shards = header["shards"]
        self._files = self._open_files(DTYPES[header["dtype"]], [shard["file"] for shard in shards])
        self.identity = {
            "dtype": header["dtype"],
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer_fingerprint,
        }
        content: dict[str, Any] = {"shards": [[shard["tokens"], shard["sha256"]] for shard in shards]}
        if header.get("loss_mask"):
            if header.get("target_tokens") == 0:
                raise self._fault(f"{self.path}: all {self.tokens} tokens are masked; there is nothing to learn from")
            names = [shard["file"].removesuffix(".bin") + ".mask" for shard in shards]
            self._mask = self._open_files(np.dtype(np.uint8), names)
            content["masks"] = [shard["mask_sha256"] for shard in shards]
        if (index := header.get("documents_index")) is not None:
            self.ends = documents.open_index(name, self.path / index["file"], index, self.documents, self.tokens)
            self.identity["documents"] = index["sha256"]
        # What the tokens are, not where they lie: a moved or renamed directory is the same data set.
        whole = json.dumps({**self.identity, **content}, sort_keys=True)
        self.fingerprint = hashlib.sha256(whole.encode()).hexdigest()
        self.identity |= {"tokens": self.tokens, "shards": len(shards), "loss_mask": self._mask is not None}

    @property
    def tokenizer(self) -> str:  # type: ignore[override]
        """What `tokenizer.load` takes: "bytes", or the absolute path of the tokenizer.json beside the split's
        directory.
        """
        return "bytes" if self.tokenizer_name == "bytes" else str(self.path.parent / "tokenizer.json")

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
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
            raise self._fault(f"{file} is not JSON: {error}") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._fault(f'{file} is not a header of token shards: it lacks "format": "{FORMAT}"')
        if header.get("version") not in READABLE:
            raise self._fault(
                f"{file} has version {header.get('version')!r}; this program reads versions"
                f" {' and '.join(map(str, READABLE))}"
            )
        faults = [text for ok, text in _header_checks(header) if not ok]
        if faults:
            raise self._fault(f"{file}: {'; '.join(faults)}")
        return header

    def _open_files(self, dtype: np.dtype[Any], names: list[str]) -> Files:
        """The shards, or the masks beside them: each must have the size that the header says."""
        paths = [f"{self.path}/{name}" for name in names]
        lengths = [shard["tokens"] for shard in self.header["shards"]]
        kind = "shard" if dtype in DTYPES.values() else "mask"
        for path, length in zip(paths, lengths, strict=True):
            try:
                size = os.stat(path).st_size  # noqa: PTH116 - 10,000 shards: Path objects would double the time
            except OSError as error:
                raise self._fault(f"cannot open the {kind} {path}: {error.strerror}") from error
            if size != length * dtype.itemsize:
                raise self._fault(
                    f"{path} has {size} bytes, but {HEADER} says {length} tokens of {dtype.name} ="
                    f" {length * dtype.itemsize} bytes; prepare it again"
                )
        return Files(self.name, paths, np.array(lengths, dtype=np.int64), dtype)


def _header_checks(header: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold of a header, and what to say if it does not."""
    shards, tokenizer, index = header.get("shards"), header.get("tokenizer"), header.get("documents_index")
    masked = header.get("loss_mask", False)
    shards_ok = isinstance(shards, list) and all(
        isinstance(s, dict)
        and _is_file_name(s.get("file"))
        and _is_count(s.get("tokens"))
        and isinstance(s.get("sha256"), str)
        and (not masked or isinstance(s.get("mask_sha256"), str))
        for s in shards
    )
    index_ok = index is None or (
        isinstance(index, dict)
        and _is_file_name(index.get("file"))
        and _is_count(index.get("bytes"))
        and isinstance(index.get("sha256"), str)
    )
    checks = [
        (header.get("dtype") in DTYPES, f"dtype {header.get('dtype')!r} is not one of {', '.join(DTYPES)}"),
        (header.get("separator") is None or _is_count(header["separator"]), "separator is neither an id nor null"),
        (
            isinstance(tokenizer, dict) and all(isinstance(tokenizer.get(k), str) for k in ("name", "fingerprint")),
            "tokenizer has no name and fingerprint",
        ),
        (shards_ok, f"shards is not a list of {{file, tokens, sha256{', mask_sha256' if masked else ''}}}"),
        (index_ok, "documents_index is not {file, sha256, bytes}"),
        (isinstance(masked, bool), f"loss_mask {masked!r} is neither true nor false"),
    ]
    counts = ["vocab_size", "tokens", "documents", "text_bytes"]
    counts += [key for key in ("target_tokens", "target_text_bytes") if key in header]
    checks += [
        (_is_count(header.get(key)), f"{key} {header.get(key)!r} is not a whole number of 0 or more") for key in counts
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


def _is_file_name(value: Any) -> bool:
    """A header never leads out of its directory."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & set(value)
