"""Small corpora, the prepare command in this process, and what it wrote: what several tests share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from kamui_dist.cli import main
from kamui_dist.errors import UserError
from kamui_dist.shards import TokenDataset
from kamui_dist.tokenizer import load

AUSTEN = Path(__file__).parents[1] / "data" / "austen"


def text_files(directory: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(text.encode())
    return directory


def many(n: int) -> dict[str, str]:
    return {f"{i:03d}.txt": f"document number {i}\n" * (1 + i % 3) for i in range(n)}


def run(*words: object) -> int:
    return main([str(word) for word in words])


def fails(capsys, *words: object) -> str:
    """The one line that a failing command says."""
    capsys.readouterr()
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return str(err)


def stream(part: Path) -> np.ndarray:
    dataset = TokenDataset(part)
    return np.concatenate(
        [np.fromfile(part / shard["file"], dtype=dataset.dtype) for shard in dataset.header["shards"]]
    ).astype(np.int64)


def docs(part: Path) -> list[str]:
    """The documents of a prepared directory, from its tokens alone."""
    dataset = TokenDataset(part)
    tokenizer, ids = load(dataset.tokenizer), stream(part)
    ends = np.flatnonzero(ids == dataset.separator)
    assert ends[-1] == len(ids) - 1
    assert dataset.documents == len(ends)
    return [tokenizer.decode(part_ids[:-1]) for part_ids in np.split(ids, ends + 1)[:-1]]


def all_bytes(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def header(part: Path) -> dict:
    return dict(json.loads((part / "dataset.json").read_text()))


def ends(part: Path) -> list[int]:
    """The document index."""
    return np.fromfile(part / "documents.bin", dtype="<u8").tolist()


def texts(part: Path) -> list[str]:
    """The documents by the index, special tokens left out."""
    tokenizer = load(TokenDataset(part).tokenizer)
    assert ends(part)[-1] == len(stream(part))
    return [tokenizer.decode(ids) for ids in np.split(stream(part), ends(part))[:-1]]


def jsonl(path: Path, values: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values))
    return path


def square(x: int) -> int:
    """What test workers do: slowly, and with a fault at -1 and an end at -2."""
    if x == -1:
        raise UserError("minus one")
    if x == -2:
        os._exit(9)
    time.sleep(0.002 * (x % 3))
    return x * x
