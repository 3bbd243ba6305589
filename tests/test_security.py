"""What is loaded executes nothing and reads or writes nothing elsewhere. Forged checkpoint manifests: test_checkpoint.py."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kamui_dist import checkpoint, cli, config, start, tokenizer
from kamui_dist.checkpoint import CheckpointError
from kamui_dist.errors import UserError
from kamui_dist.model import GPT
from kamui_dist.shards import HEADER, TokenDataset
from tests import tiny


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def bombs(marker: Path) -> dict[str, bytes]:
    """The same pickle as it may come: plain, in text, and as torch.save writes it (a zip)."""
    plain = pickle.dumps(Bomb(marker))
    assert "mkdir" in "".join(str(arg) for _, arg, _ in pickletools.genops(plain))
    zipped = marker.with_name("bomb.pt")
    torch.save(Bomb(marker), zipped)
    content = zipped.read_bytes()
    zipped.unlink()
    return {"plain": plain, "text": pickle.dumps(Bomb(marker), protocol=0), "torch": content}


@pytest.mark.parametrize("kind", ["plain", "text", "torch"])
def test_a_pickle_is_never_opened(tmp_path, kind, capsys):
    """In place of a config, a tokenizer, a header of data, a file of weights, a checkpoint's manifest and data."""
    marker = tmp_path / "executed"
    bomb = bombs(marker)[kind]
    file = tmp_path / "bomb"
    for name in ("config.toml", "tokenizer.json", "weights.safetensors"):
        (tmp_path / name).write_bytes(bomb)
    with pytest.raises(UserError, match="not a readable TOML file"):
        config.load(tmp_path / "config.toml", [])
    with pytest.raises(UserError):
        tokenizer.load(tmp_path / "tokenizer.json")
    data = tiny.write_data(tmp_path / "data")
    (data / HEADER).write_bytes(bomb)
    with pytest.raises(UserError, match="is not JSON"):
        TokenDataset(data)
    cfg = tiny.config(
        tmp_path / "run", data, checkpoint__init_from=str(tmp_path / "weights.safetensors"), model__vocab_size=65
    )
    with pytest.raises(UserError, match="not a whole safetensors file"):
        start.find_weights(cfg, GPT(cfg.model))
    directory = tmp_path / "run" / "checkpoints"
    saved = checkpoint.save(directory, 1, {"a": torch.zeros(999)}, {}).path
    for name in ("manifest.json", "rank-00000.safetensors"):
        intact = (saved / name).read_bytes()
        (saved / name).write_bytes(bomb)
        with pytest.raises(CheckpointError):
            checkpoint.verify(saved)
        (saved / name).write_bytes(bomb.ljust(len(intact), b"\0"))  # the same size
        with pytest.raises(CheckpointError):
            checkpoint.load(checkpoint.open_checkpoint(saved), {"a": torch.zeros(999)})
        assert cli.main(["inspect", "checkpoints", str(tmp_path / "run")]) == (name == "manifest.json")
        (saved / name).write_bytes(intact)
    capsys.readouterr()
    assert not marker.exists(), "it was executed"
    file.write_bytes(bomb)
    if kind != "torch":
        pickle.loads(bomb)  # the bomb is a real one
        assert marker.exists()


def headers(good: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Changes to a header, by what they try."""
    shard = good["shards"][0]

    def shards(**changes: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda h: h.update(shards=[{**shard, **changes}])

    return {
        "up": shards(file="../outside.bin"), "absolute": shards(file="/etc/passwd"), "below": shards(file="sub/x.bin"),
        "null": shards(file="a\0.bin"), "empty": shards(file=""), "dots": shards(file=".."),
        "huge": shards(tokens=1 << 62), "more": shards(tokens=shard["tokens"] + 1), "negative": shards(tokens=-1),
        "true": shards(tokens=True), "fraction": shards(tokens=1.5), "many": shards(tokens=10**400),
        "type": lambda h: h.update(dtype="object"), "vocabulary": lambda h: h.update(vocab_size=10**30),
        "no list": lambda h: h.update(shards={"file": "x"}), "deep": lambda h: h.update(tokenizer=[[]]),
    }  # fmt: skip


def test_a_header_of_data_leads_nowhere_else_and_sizes_are_checked(tmp_path):
    data = tiny.write_data(tmp_path / "data")
    (tmp_path / "outside.bin").write_bytes(next(data.glob("*.bin")).read_bytes())
    good = json.loads((data / HEADER).read_text())
    for name, change in headers(good).items():
        forged = json.loads(json.dumps(good))
        change(forged)
        if name in ("huge", "more"):
            forged["tokens"] = forged["shards"][0]["tokens"]
        (data / HEADER).write_text(json.dumps(forged))
        with pytest.raises(UserError) as error:
            TokenDataset(data)
        assert str(data) in str(error.value), name
    (data / HEADER).write_text("[" * 100_000)
    with pytest.raises(UserError):
        TokenDataset(data)


def test_a_checkpoint_that_is_a_link_is_not_taken_for_one(tmp_path):
    elsewhere = checkpoint.save(tmp_path / "other", 5, {"a": torch.zeros(3)}, {}).path
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    (directory / "step-00000005").symlink_to(elsewhere)
    assert checkpoint.step_directories(directory) == []
    assert checkpoint.newest(directory) is None
    assert checkpoint.prune(directory, 1, 0, set()) == []
    checkpoint.verify(elsewhere)
