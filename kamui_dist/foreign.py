"""Training data that other programs wrote, read where it lies: nanoGPT, llm.c, Megatron, NumPy. No torch.

    nanoGPT    .bin         raw little-endian ids, uint16 unless `dtype` says otherwise; no header
    llm.c      .bin         256 int32: 20240520, version 1, number of tokens -> uint16; 20240801, version 7 -> uint32
    Megatron   .idx + .bin  "MMIDIDX" header, version 1: type, length and place of every sequence, document borders
    NumPy      .npy         one-dimensional integers; never a pickle

A file, a directory, or a glob; several files of one format are one stream in the order of their names. None of these has a
vocabulary, so `model.vocab_size` must be given, and ids are checked when they are read. The fingerprint is taken of
samples, so that opening a terabyte takes no time: the sizes, the first and the last 4 KiB of each file, and 64 blocks
of 64 KiB spread evenly over the stream. A change between those goes unseen.

Sources: karpathy/nanoGPT data/*/prepare.py; karpathy/llm.c dev/data/data_common.py; Megatron-LM
megatron/core/datasets/indexed_dataset.py (`_IndexWriter`).
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kamui_dist.documents import DocumentEnds
from kamui_dist.errors import UserError
from kamui_dist.shards import DTYPES, HEADER, TokenDataset
from kamui_dist.stream import Files, TokenStream

LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> version, type
LLMC_HEADER = 1024
# Megatron's type codes, read as unsigned: a negative id becomes a huge one, which no vocabulary has.
MEGATRON_DTYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
MEGATRON_MAGIC, MEGATRON_HEADER = b"MMIDIDX\x00\x00", 34
_EDGE, _BLOCK, _BLOCKS = 4096, 1 << 16, 64


class _Part(NamedTuple):
    """One file of a stream."""

    format: str
    path: Path
    dtype: np.dtype[Any]
    skip: int  # bytes before the tokens
    tokens: int
    ends: DocumentEnds | None = None


def open_stream(
    path: str | Path, name: str = "data.path", dtype: str | None = None, separator: int | None = None
) -> TokenStream:
    """Whatever `path` holds: a directory of ours, or files of another format, told apart by content and name.

    name: the config key, for errors. dtype: "uint16" or "uint32", of files without a header. separator: the token that
    ends a document, where the files do not say.

    Raises UserError, one line, naming the key, the absolute path, and both numbers where two do not fit together.
    """
    files = _files(Path(path).expanduser().absolute(), name)
    if files is None:
        dataset = TokenDataset(path, name)
        for what, given, there in (
            ("dtype", dtype, dataset.header["dtype"]),
            ("separator", separator, dataset.separator),
        ):
            if given is not None and given != there:
                raise UserError(
                    f"{name}: {what} = {given}, but {dataset.path / HEADER} says {there}; leave {what} unset"
                )
        return dataset
    return ForeignStream(Path(path).expanduser().absolute(), name, files, dtype, separator)


def _files(path: Path, name: str) -> list[Path] | None:
    """The files that are meant, in name order; None: a directory of ours, or something that opening it as one explains."""
    if glob.has_magic(str(path)) and not path.exists():
        found = sorted(Path(p) for p in glob.glob(str(path)))  # noqa: PTH207 - the pattern is absolute
        if not found:
            raise UserError(f"{name}: no file matches {path}")
    elif path.is_dir() and not (path / HEADER).exists():
        found = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy"))
        if any(
            re.fullmatch(r"\d{5}\.bin", p.name) for p in found
        ):  # ours, which say neither type nor vocabulary themselves
            return None
        held_out = [p.name for p in found if {"val", "valid", "validation", "test"} & set(re.split(r"[^a-z]+", p.name))]
        if held_out and len(held_out) < len(found):
            raise UserError(
                f"{name}: {path} also holds {held_out[0]}, which looks held out; name the files to read, for example"
                f" {path}/*train*.bin"
            )
    elif path.is_file() and path.name != HEADER:
        found = [path]
    elif not path.exists() and path.with_name(path.name + ".idx").exists():
        found = [path.with_name(path.name + ".bin")]  # Megatron's tools take the prefix of both files
    else:
        return None
    chosen = [p.with_suffix(".bin") if p.suffix == ".idx" else p for p in found]
    return list(dict.fromkeys(chosen)) or None


class ForeignStream(TokenStream):
    """Files of one of the formats above. See `open_stream`."""

    def __init__(self, path: Path, name: str, files: list[Path], dtype: str | None, separator: int | None) -> None:
        self.path, self.name, self.separator = path, name, separator
        try:
            parts = [_open_part(file, name, dtype) for file in files]
        except OSError as error:
            raise UserError(f"{name}: cannot read {error.filename}: {error.strerror}") from None
        for part in parts:
            for what, one, other in (("format", part.format, parts[0].format), ("type", part.dtype, parts[0].dtype)):
                if one != other:
                    raise UserError(
                        f"{name}: {part.path} and {parts[0].path} differ in {what}: {one} and {other}; give one source for each"
                    )
        lengths = np.array([part.tokens for part in parts], dtype=np.int64)
        paths = [str(part.path) for part in parts]
        self._files = Files(name, paths, lengths, parts[0].dtype, [part.skip for part in parts])
        self.format = parts[0].format
        if len(parts) == 1 and parts[0].ends is not None:
            self.ends, self.documents = parts[0].ends, parts[0].ends.count
        self.identity = {
            "format": self.format,
            "dtype": parts[0].dtype.name,
            "tokens": self.tokens,
            "files": len(parts),
        }
        whole = hashlib.sha256(json.dumps([self.identity, lengths.tolist()], sort_keys=True).encode())
        for block in _samples(parts):
            whole.update(block)
        self.fingerprint = whole.hexdigest()


def _open_part(path: Path, name: str, dtype: str | None) -> _Part:
    with path.open("rb") as file:
        start = file.read(LLMC_HEADER)
    size = path.stat().st_size
    if start.startswith(np.lib.format.MAGIC_PREFIX):
        part = _npy(path, name, size)
    elif path.with_suffix(".idx").exists():
        part = _megatron(path, path.with_suffix(".idx"), name, size)
    elif len(start) == LLMC_HEADER and struct.unpack_from("<i", start)[0] in LLMC:
        part = _llmc(path, name, size, start)
    elif path.suffix == ".npy":
        raise UserError(f"{name}: {path} is not a .npy file: it does not begin with its magic")
    else:
        return _raw(path, name, size, start, dtype)
    if dtype is not None and part.dtype != DTYPES[dtype]:
        raise UserError(
            f"{name}: dtype = {dtype}, but {path} ({part.format}) says {part.dtype.name}; leave dtype unset"
        )
    return part


def _exact(name: str, path: Path, size: int, skip: int, tokens: int, dtype: np.dtype[Any]) -> None:
    wanted = skip + tokens * dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{name}: {path} has {size} bytes, but its header says {tokens} tokens of {dtype.name} = {wanted} bytes; it is"
            f" {'cut short' if size < wanted else 'longer than it should be'}"
        )


def _raw(path: Path, name: str, size: int, start: bytes, dtype: str | None) -> _Part:
    kind = DTYPES[dtype or "uint16"]
    if size % kind.itemsize or size == 0:
        raise UserError(
            f"{name}: {path} has {size} bytes, which is no multiple of the {kind.itemsize} bytes of {kind.name}"
            if size
            else f"{name}: {path} is empty"
        )
    if dtype is None and size >= 64 and size % 4 == 0:
        ids = np.frombuffer(start[: len(start) // 4 * 4], dtype="<u2")
        if not ids[1::2].any() and ids.any():
            raise UserError(
                f'{name}: every second id of {path} is 0: it looks like uint32; say dtype = "uint32" (or "uint16")'
            )
    return _Part("nanoGPT", path, kind, 0, size // kind.itemsize)


def _llmc(path: Path, name: str, size: int, start: bytes) -> _Part:
    magic, version, tokens = struct.unpack_from("<3i", start)
    wanted, kind = LLMC[magic]
    if version != wanted:
        raise UserError(f"{name}: {path} has llm.c version {version}; magic {magic} is read with version {wanted}")
    _exact(name, path, size, LLMC_HEADER, tokens, DTYPES[kind])
    return _Part("llm.c", path, DTYPES[kind], LLMC_HEADER, tokens)


def _npy(path: Path, name: str, size: int) -> _Part:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, SyntaxError) as error:
            raise UserError(f"{name}: {path} has no readable .npy header: {error}") from None
        skip = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
        raise UserError(
            f"{name}: {path} holds {dtype} of shape {shape}; it must be one-dimensional little-endian integers"
        )
    dtype = np.dtype(f"<u{dtype.itemsize}")
    _exact(name, path, size, skip, shape[0], dtype)
    return _Part("npy", path, dtype, skip, shape[0])


def _megatron(path: Path, index: Path, name: str, size: int) -> _Part:
    """The .bin is one stream if its sequences lie end to end, as Megatron's writer leaves them: checked for up to
    100,000 sequences, else at 4,096 places.
    """
    with index.open("rb") as file:
        start = file.read(MEGATRON_HEADER)
    if not start.startswith(MEGATRON_MAGIC) or len(start) < MEGATRON_HEADER:
        raise UserError(f"{name}: {index} is not a Megatron index: it does not begin with MMIDIDX")
    version, code, sequences, borders = struct.unpack_from("<QBQQ", start, 9)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise UserError(
            f"{name}: {index} has version {version} and type code {code}; read are version 1 and the integer types"
            f" {', '.join(map(str, MEGATRON_DTYPES))}"
        )
    dtype = np.dtype(MEGATRON_DTYPES[code])
    at = {"lengths": MEGATRON_HEADER, "pointers": MEGATRON_HEADER + 4 * sequences}
    at["documents"] = at["pointers"] + 8 * sequences
    end = at["documents"] + 8 * borders
    if (found := index.stat().st_size) not in (end, end + sequences):  # one more byte a sequence: its modality
        raise UserError(
            f"{name}: {index} has {found} bytes, but its header says {sequences} sequences and {borders} document borders ="
            f" {end} bytes"
        )
    if sequences == 0:
        raise UserError(f"{name}: {index} has no sequences")
    lengths = np.memmap(index, "<i4", "r", at["lengths"], (sequences,))
    pointers = np.memmap(index, "<i8", "r", at["pointers"], (sequences,))
    some = np.arange(sequences) if sequences <= 100_000 else np.linspace(0, sequences - 1, 4096).astype(np.int64)
    ends = pointers[some] + lengths[some].astype(np.int64) * dtype.itemsize
    nexts = np.append(pointers[some[:-1] + 1], np.int64(size))
    if int(pointers[0]) != 0 or (wrong := np.flatnonzero(ends != nexts)).size:
        k = 0 if int(pointers[0]) else int(wrong[0])
        raise UserError(
            f"{name}: {path}: sequence {int(some[k])} of {index} is said to end at byte {int(ends[k])}, but what follows is"
            f" at byte {int(nexts[k])}: the files are not of one data set, or {path.name} ({size} bytes) is cut short"
        )
    documents = np.memmap(index, "<i8", "r", at["documents"], (borders,)) if borders else np.zeros(0, np.int64)
    is_range = borders in (0, sequences + 1) and (borders == 0 or int(documents[0]) == 0)
    document_ends = None
    if is_range and (borders == 0 or int(documents[-1]) == sequences):  # one sequence a document
        document_ends = DocumentEnds(
            name, index, sequences, size // dtype.itemsize, skip=at["pointers"], divisor=dtype.itemsize, shift=1
        )
    return _Part("Megatron", path, dtype, 0, size // dtype.itemsize, document_ends)


def _samples(parts: list[_Part]) -> list[bytes]:
    """What the fingerprint is taken of: the edges of each file, and blocks spread evenly over the stream."""
    out = []
    sizes = [part.tokens * part.dtype.itemsize for part in parts]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    middles = [int(starts[-1]) * k // _BLOCKS for k in range(_BLOCKS)] if starts[-1] > _BLOCK * _BLOCKS else []
    whole = not middles
    for part, size, start in zip(parts, sizes, starts[:-1].tolist(), strict=True):
        with part.path.open("rb", buffering=0) as file:
            places = [(0, size)] if whole else [(0, _EDGE), (max(0, size - _EDGE), _EDGE)]
            places += [(m - start, _BLOCK) for m in middles if start <= m < start + size]
            for offset, count in places:
                file.seek(part.skip + offset)
                out.append(file.read(count))
    return out
