"""Other programs' files as a training source: what each writes is read as it stands, and what is wrong with one is said."""

from __future__ import annotations

import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kamui_dist.errors import UserError
from kamui_dist.foreign import open_stream
from kamui_dist.shards import TokenDataset
from tests.test_data import write

IDS = np.random.default_rng(0).integers(1, 50257, 1000)


def llmc(path: Path, ids: np.ndarray, magic: int, version: int, dtype: str, count: int | None = None) -> Path:
    """As dev/data/data_common.py of llm.c writes it."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


def megatron(prefix: Path, documents: list[np.ndarray], code: int, dtype: str, modes: bool = False) -> Path:
    """As _IndexWriter of Megatron's indexed_dataset.py writes it: lengths, pointers, and the borders of documents."""
    data = b"".join(d.astype(dtype).tobytes() for d in documents)
    lengths = np.array([len(d) for d in documents], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1].astype(np.int64) * np.dtype(dtype).itemsize)])
    borders = np.arange(len(documents) + 1)
    prefix.with_suffix(".bin").write_bytes(data)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders))
    index += lengths.tobytes() + pointers.astype(np.int64).tobytes() + borders.astype(np.int64).tobytes()
    prefix.with_suffix(".idx").write_bytes(index + (b"\0" * len(lengths) if modes else b""))
    return prefix.with_suffix(".bin")


def save(path: Path) -> Path:
    np.save(path, IDS)
    return path


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def all_tokens(stream: Any) -> list[int]:
    return stream.read(np.array([0]), stream.tokens - 1)[0].tolist()


def test_each_format_is_recognised_and_read(tmp_path):
    IDS.astype("<u2").tofile(tmp_path / "nano.bin")
    IDS.astype("<u4").tofile(tmp_path / "wide.bin")
    np.save(tmp_path / "a.npy", IDS.astype(np.int32))
    np.save(tmp_path / "b.npy", IDS.astype(np.uint16))
    paths: dict[str, Any] = {
        "nanoGPT": [(tmp_path / "nano.bin", None), (tmp_path / "wide.bin", "uint32")],
        "llm.c": [
            (llmc(tmp_path / "one.bin", IDS, 20240520, 1, "<u2"), None),
            (llmc(tmp_path / "seven.bin", IDS + 70000, 20240801, 7, "<u4"), "uint32"),
        ],
        "npy": [(tmp_path / "a.npy", None), (tmp_path / "b.npy", None)],
    }
    parts = np.split(IDS, [10, 11, 500])
    for code, dtype in ((8, "<u2"), (4, "<i4"), (5, "<i8")):
        path = megatron(tmp_path / f"m{code}", parts, code, dtype, modes=code == 4)
        paths.setdefault("Megatron", []).append((path, None))
    paths["Megatron"] += [(tmp_path / "m8.idx", None), (tmp_path / "m8", None)]
    for kind, files in paths.items():
        for path, dtype in files:
            stream = open_stream(path, dtype=dtype)
            assert (stream.format, stream.vocab_size, stream.tokens) == (kind, None, 1000)
            assert all_tokens(stream) == (IDS + (70000 if path.name == "seven.bin" else 0)).tolist()
            assert stream.windows(99) == 10
            with pytest.raises(
                UserError, match=r"data.path: .* holds token id \d+ at byte \d+, but the vocabulary has 50 ids"
            ):
                stream.read(np.array([1]), 99, vocab_size=50)
    for path in (paths["Megatron"][0][0], paths["Megatron"][1][0]):
        ends = open_stream(path).ends
        assert ends is not None
        assert ends.read(0, 4).tolist() == [10, 11, 500, 1000]
        assert [ends.rank(p) for p in (0, 9, 10, 11, 499, 999)] == [0, 0, 1, 2, 2, 3]
    # A byte offset is that of the file, its header included.
    assert open_stream(tmp_path / "one.bin").locate(3) == (str(tmp_path / "one.bin"), 1024 + 6)


def test_a_negative_id_is_beyond_every_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -1, 4, 5], dtype=np.int64))
    with pytest.raises(UserError, match="token id 18446744073709551615 at byte"):
        open_stream(tmp_path / "a.npy").read(np.array([0]), 4, vocab_size=10)


def test_several_files_are_one_stream_in_name_order(tmp_path):
    for name, part in zip(("train_000002", "train_000001", "train_000010"), np.split(IDS, [300, 600]), strict=True):
        llmc(tmp_path / f"{name}.bin", part, 20240520, 1, "<u2")
    expected = np.concatenate([IDS[300:600], IDS[:300], IDS[600:]]).tolist()
    for path in (tmp_path, tmp_path / "train_*.bin"):
        stream = open_stream(path)
        assert all_tokens(stream) == expected
        assert stream.read(np.array([2, 6]), 99).tolist() == [expected[198:298], expected[594:694]]
    llmc(tmp_path / "x_val_1.bin", IDS, 20240520, 1, "<u2")
    with pytest.raises(UserError, match=r"also holds x_val_1\.bin, which looks held out"):
        open_stream(tmp_path)
    (tmp_path / "x_val_1.bin").unlink()
    IDS.astype("<u2").tofile(tmp_path / "train_000011.bin")
    with pytest.raises(UserError, match=r"differ in format: nanoGPT and llm.c"):
        open_stream(tmp_path)


def test_our_own_directories_are_opened_as_before(tmp_path):
    dataset = write(tmp_path / "x", np.arange(50))
    for path in (tmp_path / "x", str(tmp_path / "x")):
        stream = open_stream(path)
        assert isinstance(stream, TokenDataset)
        assert stream.fingerprint == dataset.fingerprint
    with pytest.raises(UserError, match=r"dtype = uint32, but .*/x/dataset.json says uint16; leave dtype unset"):
        open_stream(tmp_path / "x", dtype="uint32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: (p / "a.bin").write_bytes(b"123"), r"a.bin has 3 bytes, which is no multiple of the 2 bytes of uint16"),
        (lambda p: (p / "a.bin").write_bytes(b""), r"a.bin is empty"),
        (lambda p: IDS.astype("<u4").tofile(p / "a.bin"), r'every second id of .*a.bin is 0: .*; say dtype = "uint32"'),
        (lambda p: llmc(p / "a.bin", IDS, 20240520, 1, "<u2", count=1001), r"3024 bytes, .*1001 tokens .*= 3026 bytes.*short"),
        (lambda p: llmc(p / "a.bin", IDS, 20240801, 7, "<u2"), r"1000 tokens of uint32 = 5024 bytes"),
        (lambda p: llmc(p / "a.bin", IDS, 20240520, 2, "<u2"), r"llm.c version 2; magic 20240520 is read with version 1"),
        (lambda p: np.save(p / "a.npy", IDS.reshape(10, 100)), r"a.npy holds int64 of shape \(10, 100\)"),
        (lambda p: np.save(p / "a.npy", IDS.astype(np.float32)), r"a.npy holds float32 of shape \(1000,\)"),
        (lambda p: np.save(p / "a.npy", np.array(["x"], dtype=object), allow_pickle=True), r"a.npy holds object"),
        (lambda p: (p / "a.npy").write_bytes(b"\x93NUMPY\x01\x00junk"), r"a.npy has no readable .npy header"),
        (lambda p: cut(save(p / "a.npy"), 500), r"a.npy has 500 bytes, but .* 1000 tokens of uint64 = 8128 bytes"),
        (lambda p: (p / "a.npy").write_bytes(b"xx"), r"a.npy is not a .npy file"),
        (lambda p: cut(megatron(p / "a", [IDS], 8, "<u2"), 1998), r"said to end at byte 2000, but what follows is at byte 1998"),
        (lambda p: cut(megatron(p / "a", [IDS], 8, "<u2").with_suffix(".idx"), 60), r"60 bytes, .*1 sequences and 2 .*= 62"),
        (lambda p: megatron(p / "a", [IDS], 7, "<f4"), r"version 1 and type code 7"),
        (lambda p: megatron(p / "a", [IDS], 8, "<u2").with_suffix(".idx").write_bytes(b"0" * 50), r"a.idx is not a Megatron index"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        open_stream(next(p for p in sorted(tmp_path.iterdir()) if p.suffix != ".idx"), "data.sources (x)")
    assert str(caught.value).startswith("data.sources (x): ")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"data.path: no file matches {tmp_path}/*.bin")):
        open_stream(tmp_path / "*.bin")
    with pytest.raises(UserError, match=f"no such directory: {tmp_path}/x.bin"):
        open_stream(tmp_path / "x.bin")
    IDS.astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"dtype = uint32, but .*b.bin \(llm.c\) says uint16"):
        open_stream(llmc(tmp_path / "b.bin", IDS, 20240520, 1, "<u2"), dtype="uint32")
    np.zeros(3, dtype="<u2").tofile(tmp_path / "c.bin")
    with pytest.raises(UserError, match="holds 3 tokens, but one window takes"):
        open_stream(tmp_path / "c.bin").windows(8)


def test_fingerprint_of_samples(tmp_path):
    """The same wherever it lies; another for another size or another sampled byte; and fast however large the file is."""
    IDS.astype("<u2").tofile(tmp_path / "a.bin")
    IDS.astype("<u2").tofile(tmp_path / "b.bin")
    one = open_stream(tmp_path / "a.bin").fingerprint
    assert open_stream(tmp_path / "b.bin").fingerprint == one
    changed = IDS.copy()
    changed[500] += 1
    changed.astype("<u2").tofile(tmp_path / "b.bin")
    assert open_stream(tmp_path / "b.bin").fingerprint != one
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(2 * 10**12)
    began = time.perf_counter()
    stream = open_stream(huge)
    assert time.perf_counter() - began < 2
    assert stream.tokens == 10**12
    assert stream.read(np.array([stream.windows(1024) - 1]), 1024).shape == (1, 1025)
    with huge.open("r+b") as file:
        file.seek(2 * 10**12 - 2)
        file.write(b"\1")
    assert open_stream(huge).fingerprint != stream.fingerprint
