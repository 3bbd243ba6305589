"""Checkpoints: equal on any mesh, never half, never damaged unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kamui_dist import checkpoint, distributed, files, manifest
from kamui_dist.checkpoint import CheckpointError
from kamui_dist.errors import UserError
from kamui_dist.manifest import strangers
from tests.ranks import run_ranks

Digests = dict[str, tuple[str, tuple[int, ...], str]]


class Model(nn.Module):
    """Odd row counts (65, 7, 2), a tied weight, a frozen parameter, persistent and transient buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(65, 7, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(7, 7, dtype=dtype), nn.Linear(7, 2, dtype=dtype))
        self.back = nn.Linear(2, 7, bias=False, dtype=dtype)
        self.head = nn.Linear(7, 65, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.body[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.body(self.embedding(x))))


def shard(model: nn.Module, strategy: str) -> nn.Module:
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (distributed.world_size(),))
    elif strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        return model  # single, and what DDP wraps: the same plain tensors on every rank
    for layer in model.body:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        tokens = torch.arange(8) * (step + 3) % 65
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digests(tensors: dict[str, Tensor]) -> Digests:
    """dtype, shape and SHA-256 of every whole tensor: the same on any mesh if and only if bit-equal."""
    out = {}
    for name, tensor in tensors.items():
        full = whole(tensor).detach().contiguous()
        content = full.reshape(-1).view(torch.uint8).numpy().tobytes()
        out[name] = (str(full.dtype), tuple(full.shape), hashlib.sha256(content).hexdigest())
    return out


def save_here(root: Path, strategies: dict[str, str]) -> dict[str, Digests]:
    """On any number of ranks: trains and saves one checkpoint a name; returns the digests of what was saved."""
    out = {}
    for name, strategy in strategies.items():
        dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
        model = shard(Model(dtype), strategy)
        optimizer = sgd(model) if name.startswith("sgd") else adamw(model)
        train(model, optimizer)
        before = digests(checkpoint.training_tensors(model, optimizer))
        saved = checkpoint.save(
            root / name, 3, checkpoint.training_tensors(model, optimizer), {"step": 3, "best": float("inf")}
        )
        assert digests(checkpoint.training_tensors(model, optimizer)) == before, "save changed the run"
        assert saved.state == {"step": 3, "best": float("inf")}
        assert saved == checkpoint.open_checkpoint(root / name / "step-00000003")
        out[name] = before
    return out


def load_here(root: Path, strategies: dict[str, str]) -> dict[str, Digests]:
    out = {}
    for name, strategy in strategies.items():
        found = checkpoint.newest(root / name.split("|")[0])
        assert found is not None
        dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
        model = shard(Model(dtype), strategy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = sgd(model) if name.startswith("sgd") else adamw(model)
        checkpoint.load_training(found, model, optimizer)
        out[name] = digests(checkpoint.training_tensors(model, optimizer))
        if name.startswith("sgd"):
            assert not optimizer.state, "a round trip left state in an optimizer that has none"
        train(model, optimizer, steps=1)  # the restored state is one that the optimizer can work with
    return out


def load_and_save_here(root: Path, load: dict[str, str], save: dict[str, str]) -> tuple[Any, Any]:
    return load_here(root, load), save_here(root, save)


@pytest.mark.slow
def test_bit_equal_on_any_mesh(tmp_path):
    """FSDP2(2), DDP(2), single, HSDP(2 x 2) -> FSDP2(4), FSDP2(2), DDP(2), HSDP, single; AdamW, SGD, bf16."""
    expected = single = save_here(tmp_path, {"single": "plain"})
    saved2 = run_ranks(save_here, 2, tmp_path, {"fsdp2": "fsdp", "ddp2": "plain", "sgd": "fsdp", "bf16": "fsdp"})
    assert saved2[0] == saved2[1]
    expected |= saved2[0]
    on4 = {"fsdp2": "fsdp", "ddp2": "fsdp", "bf16": "fsdp", "sgd": "fsdp", "single": "hsdp", "single|again": "fsdp"}
    ranks4 = run_ranks(load_and_save_here, 4, tmp_path, on4, {"hsdp4": "hsdp", "fsdp4": "fsdp"})
    expected |= ranks4[0][1]
    on2 = {"hsdp4": "fsdp", "fsdp4": "fsdp", "single": "fsdp", "fsdp2": "plain", "bf16": "plain"}
    on1 = {"fsdp2": "plain", "ddp2": "plain", "hsdp4": "plain", "fsdp4": "plain", "sgd": "plain", "bf16": "plain"}
    results = [loaded for loaded, _ in ranks4] + run_ranks(load_here, 2, tmp_path, on2) + [load_here(tmp_path, on1)]
    for loaded in results:
        for name, found in loaded.items():
            assert found == expected[name.split("|")[0]], name
    names = set(single["single"])
    assert "model.scale" in names
    assert "model.cache" not in names, "a transient buffer was saved"
    assert "model.head.weight" not in names, "a tied weight was saved twice"
    assert "optim.exp_avg.embedding.weight" in names
    assert "optim.step.embedding.weight" in names
    assert not any(name.startswith("optim.") and name.endswith("body.0.bias") for name in names), "it is frozen"
    assert expected["bf16"]["optim.exp_avg.embedding.weight"][0] == "torch.bfloat16"
    # DCP spreads replicated tensors over the ranks
    sizes = [
        file["bytes"] for file in checkpoint.open_checkpoint(tmp_path / "ddp2/step-00000003").manifest["files"].values()
    ]
    assert len(sizes) == 2
    assert min(sizes) > 0.3 * max(sizes)


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {f"t.{dtype}": (torch.randn(5, 3) * 9).to(dtype) for dtype in manifest.DTYPES.values()}
    return tensors | {
        "zero_dim": torch.tensor(7.5, dtype=torch.float64),
        "no_rows": torch.empty(0, 4),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "cube": torch.arange(24.0).view(2, 3, 4),
    }


def zeros_like_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def test_every_dtype_and_shape(tmp_path):
    tensors = some_tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = checkpoint.save(tmp_path / "new" / "dir", 5, tensors, {})
        into = zeros_like_all(tensors)
        checkpoint.load(saved, into)
    for name, tensor in tensors.items():
        assert same_bytes(into[name], tensor), name
    assert sorted(path.name for path in saved.path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert all(path.stat().st_mode & 0o022 == 0 for path in saved.path.iterdir())
    with safe_open(saved.path / "rank-00000.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors) - {"no_rows"}
        for name in file.keys():  # noqa: SIM118
            assert same_bytes(file.get_tensor(name), tensors[name]), name
    part = {"cube": torch.zeros(2, 3, 4)}
    with pytest.raises(UserError, match="no_rows is in the checkpoint and not in this run"):
        checkpoint.load(saved, dict(part))
    checkpoint.load(saved, part, ignore=("t.", "zero_dim", "no_rows", "transposed"))
    assert torch.equal(part["cube"], tensors["cube"])
    for wrong in ({"n": 1}, {"c": torch.zeros(2, dtype=torch.complex64)}):
        with pytest.raises(CheckpointError, match=r"only tensors|complex64"):
            checkpoint.save(tmp_path / "wrong", 1, wrong, {})  # type: ignore[arg-type]
    assert not list((tmp_path / "wrong").glob("*"))


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, 1, {"a": torch.tensor(value)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    into = {"a": torch.tensor(0.0)}
    checkpoint.load(checkpoint.open_checkpoint(tmp_path / "step-00000001"), into)
    assert into["a"] == 2.0
    # killed between the two renames: the old one is found again
    (tmp_path / "step-00000001").rename(tmp_path / ".tmp-replaced-step-00000001")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_mismatches_name_both_sides(tmp_path):
    model = Model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    saved = checkpoint.save(tmp_path, 1, checkpoint.training_tensors(model, optimizer), {})
    other = Model()
    other.back = nn.Linear(3, 7, bias=False)
    other.extra = nn.Linear(1, 1, bias=False)
    with pytest.raises(UserError) as error:
        checkpoint.load_training(saved, other, adamw(other))
    assert "model.back.weight has shape [7, 3], in the checkpoint [7, 2]" in str(error.value)
    assert "model.extra.weight is not in the checkpoint" in str(error.value)
    half = Model(torch.bfloat16)
    with pytest.raises(UserError, match=r"embedding.weight is torch.bfloat16, in the checkpoint torch.float32"):
        checkpoint.load_weights(saved, half)
    checkpoint.load_weights(saved, fresh := Model())
    assert torch.equal(fresh.embedding.weight, model.embedding.weight)
    # moments of every parameter or of none, but not of some
    fewer = {k: v for k, v in checkpoint.training_tensors(model, optimizer).items() if k != "optim.exp_avg.back.weight"}
    with pytest.raises(UserError, match=r"lacks optimizer state exp_avg of back.weight"):
        checkpoint.load_training(checkpoint.save(tmp_path, 2, fewer, {}), again := Model(), adamw(again))
    optimizer.state[model.back.weight]["count"] = 3
    with pytest.raises(TypeError, match="only tensors are saved"):
        checkpoint.training_tensors(model, optimizer)


def test_optimizer_flags_come_from_the_config(tmp_path):
    model = Model()
    optimizer = adamw(model, weight_decay=0.01)
    train(model, optimizer)
    saved = checkpoint.save(tmp_path, 3, checkpoint.training_tensors(model, optimizer), {})
    resumed = Model()
    fused = adamw(resumed, weight_decay=0.3, fused=True)
    fused.param_groups[0]["lr"] = 0.5
    checkpoint.load_training(saved, resumed, fused)
    assert fused.param_groups[0]["weight_decay"] == 0.3
    assert fused.param_groups[0]["lr"] == 0.5
    assert fused.param_groups[0]["fused"] is True
    # B25: the next step is the uninterrupted one's, and not that of weights alone
    again, cold = Model(), Model()
    restored, fresh = adamw(again, weight_decay=0.01), adamw(cold, weight_decay=0.01)
    checkpoint.load_training(saved, again, restored)
    checkpoint.load_weights(saved, cold)
    for each, its_optimizer in ((model, optimizer), (again, restored), (cold, fresh)):
        train(each, its_optimizer, 1)
    assert torch.equal(again.embedding.weight, model.embedding.weight)
    assert not torch.equal(cold.embedding.weight, model.embedding.weight)


def refuses(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.verify(path)
    return str(error.value)


def test_verify_finds_every_flip_and_truncation(tmp_path):
    tensors = {f"layer.{i}": torch.randn(9, 5) for i in range(20)}
    good = checkpoint.save(tmp_path, 1, tensors, {"step": 1, "text": "a b"}).path
    checkpoint.verify(good)
    generator = random.Random(0)
    for trial in range(60):
        file = generator.choice(sorted(good.iterdir()))
        intact = file.read_bytes()
        position = generator.randrange(len(intact))
        if trial < 40:
            damaged = bytearray(intact)
            damaged[position] ^= generator.randrange(1, 256)
        else:
            damaged = bytearray(intact[:position])
        file.write_bytes(damaged)
        refuses(good)
        file.write_bytes(intact)
    spaces = good / "manifest.json"
    intact = spaces.read_bytes()
    spaces.write_bytes(intact.replace(b" ", b"\t", 1))  # the same JSON is not the same file
    refuses(good)
    spaces.write_bytes(intact)
    checkpoint.verify(good)
    (good / "more.safetensors").write_bytes(b"")
    checkpoint.verify(
        good
    )  # what is nobody's is read by nobody: a note, or what a file server leaves, costs no checkpoint
    assert strangers(checkpoint.open_checkpoint(good)) == ["more.safetensors"]
    (good / "more.safetensors").unlink()
    data = good / "rank-00000.safetensors"
    elsewhere = data.rename(tmp_path / "elsewhere")
    assert "is missing" in refuses(good)
    data.symlink_to(elsewhere)
    assert "not a regular file" in refuses(good)
    # load checks as well, without a hash: what is too short or is a pickle never gets into the model
    data.unlink()
    data.write_bytes(elsewhere.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="bytes"):
        checkpoint.load(checkpoint.open_checkpoint(good), zeros_like_all(tensors))
    content = pickle.dumps({name: tensor.tolist() for name, tensor in tensors.items()})[:2000]
    data.write_bytes(content + b"\0" * (elsewhere.stat().st_size - len(content)))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        checkpoint.load(checkpoint.open_checkpoint(good), zeros_like_all(tensors))
    (good / "manifest.json").write_bytes(content)
    assert "not JSON" in refuses(good)
    (good / "manifest.json").unlink()
    assert "is missing" in refuses(good)


def test_forged_manifests_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": torch.arange(6.0).view(3, 2)}, {}).path
    good = json.loads((path / "manifest.json").read_bytes())
    shutil.copy(path / "rank-00000.safetensors", tmp_path / "outside.safetensors")

    def rename(to: str) -> Callable[[Any], None]:
        def change(m: Any) -> None:
            m["files"][to] = m["files"].pop("rank-00000.safetensors")
            m["tensors"]["a"]["chunks"][0]["file"] = to

        return change

    def chunk(**changes: Any) -> Callable[[Any], None]:
        return lambda m: m["tensors"]["a"]["chunks"][0].update(changes)

    def tensor(**changes: Any) -> Callable[[Any], None]:
        return lambda m: m["tensors"]["a"].update(changes)

    huge = [1 << 40, 2]
    forgeries: dict[str, Callable[[Any], Any]] = {
        "not a plain file name": rename("../outside.safetensors"),
        "not a plain file": rename(str(tmp_path / "outside.safetensors")),
        "not a plain": rename("sub/a.safetensors"),
        "not listed": chunk(file="rank-00001.safetensors"),
        "outside the shape": chunk(offsets=[1, 0]),
        "chunk is wrong": chunk(offsets=[-1, 0]),
        "chunk is": chunk(sizes=[3, 2.0]),
        "6 elements, its shape": tensor(shape=[4, 2]),
        "in [0-9]+ bytes": lambda m: (tensor(shape=huge)(m), chunk(sizes=huge)(m)),
        "chunks are wrong": tensor(dtype="PICKLE"),
        "chunks are": tensor(shape=[1 << 70, 2]),
        "size or sha256": lambda m: m["files"]["rank-00000.safetensors"].update(bytes=-1),
        "version 2": lambda m: m.update(version=2),
        "step or state": lambda m: m.update(step="1"),
        "was renamed": lambda m: m.update(step=2),
    }
    for message, change in forgeries.items():
        forged = json.loads(json.dumps(good))
        change(forged)
        del forged["sha256"]
        forged["sha256"] = hashlib.sha256(manifest.render(forged)).hexdigest()
        (path / "manifest.json").write_bytes(manifest.render(forged))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.verify(path)
    # a header that lies, under a manifest that fits the file: refused when read
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    at = data.index(b'"data_offsets":[0,24]')
    data[at : at + 21] = b'"data_offsets":[8,32]'
    (path / "rank-00000.safetensors").write_bytes(data)
    (path / "manifest.json").write_bytes(manifest.render(good))
    with pytest.raises(CheckpointError, match="places a where it cannot be"):
        checkpoint.load(checkpoint.open_checkpoint(path), {"a": torch.zeros(3, 2)})


def small(step: int) -> dict[str, Tensor]:
    return {"a": torch.full((4, 2), float(step)), "b": torch.full((2, 2), -float(step))}


def test_prune_counts_numbers(tmp_path):
    def left() -> list[int]:
        return [step for step, _ in checkpoint.step_directories(tmp_path)]

    assert checkpoint.prune(tmp_path / "absent", 2, 0, set()) == []
    for step in range(8, 13):
        checkpoint.save(tmp_path, step, small(step), {})
    for other in ("step-12", "step-00000099x", "best"):
        (tmp_path / other).mkdir()
    (tmp_path / "step-00000098").write_text("a file")
    assert left() == [8, 9, 10, 11, 12]
    assert checkpoint.prune(tmp_path, 0, 0, set()) == []
    assert checkpoint.prune(tmp_path, 3, 0, set()) == [8, 9]
    assert left() == [10, 11, 12]
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, small(step), {})
    assert checkpoint.prune(tmp_path, 2, 5, {1}) == [2, 3, 4]
    assert left() == [1, 5, 10, 11, 12]
    checkpoint.save(tmp_path, 123456789, small(1), {})
    assert left()[-1] == 123456789
    assert not list(tmp_path.glob(".tmp-*"))
    files.write_json(tmp_path / "best.json", {"step": 1})
    files.write_json(tmp_path / "best.json", {"step": 5})
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 5}
    assert (tmp_path / "best.json").stat().st_mode & 0o022 == 0


def test_newest_alone(tmp_path, capsys):
    assert checkpoint.newest(tmp_path / "absent") is None
    (tmp_path / ".tmp-step-00000030").mkdir()
    (tmp_path / ".tmp-best.json").write_text("{")
    assert checkpoint.newest(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    for step in (10, 20):
        checkpoint.save(tmp_path, step, small(step), {})
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000030")
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 20
    told = capsys.readouterr().err
    assert "step-00000030" in told
    assert "trying step 20, 10 steps earlier" in told
    assert "missing" in (tmp_path / "quarantine/step-00000030/reason.txt").read_text()
    for step in (10, 20):
        (tmp_path / f"step-{step:08d}" / "rank-00000.safetensors").write_bytes(b"")
    for _ in range(2):  # also the second time, when the damaged ones are in quarantine
        with pytest.raises(UserError, match="refusing to start from zero"):
            checkpoint.newest(tmp_path)
    shutil.rmtree(tmp_path / "quarantine")
    assert checkpoint.newest(tmp_path) is None


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def failures_and_fallback(root: Path) -> None:
    """Two ranks. Every check is made on both."""
    me = distributed.rank()
    torch.manual_seed(0)
    tensors = {"a": torch.randn(300, 70), "b": torch.randn(300, 70), "c": torch.randn(64)}
    (root / ".tmp-step-00000002" / "junk").mkdir(parents=True, exist_ok=True)  # B28: on both ranks at once
    distributed.barrier()
    checkpoint.save(root, 1, tensors, {"step": 1})
    for victim in (0, 1):
        for size in (0, 50_000):  # at once, and in the middle of the file
            if me == victim:
                limit_file_size(size)
            with pytest.raises(CheckpointError, match=f"step 2 was not saved: rank {victim}: OSError.*File too large"):
                checkpoint.save(root, 2, tensors, {"step": 2})
            limit_file_size(resource.RLIM_INFINITY)
            distributed.barrier()
            assert [path.name for path in root.iterdir()] == ["step-00000001"]
    with pytest.raises(CheckpointError, match="rank 0"):  # what JSON cannot say fails in finish, on rank 0
        checkpoint.save(root, 2, tensors, {"step": object()})
    with pytest.raises(CheckpointError, match="rank 1: TypeError"):
        checkpoint.save(root, 2, tensors if me == 0 else {"a": 1}, {})  # type: ignore[dict-item]
    found = checkpoint.newest(root)
    assert found is not None
    assert found.step == 1
    into = zeros_like_all(tensors)
    checkpoint.load(found, into)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    with pytest.raises(UserError, match="rank 1:"):  # I10: one rank's fault is everybody's
        checkpoint.load(found, into if me == 0 else {"a": torch.zeros(1)})

    for step in (2, 3, 4):
        checkpoint.save(root, step, tensors, {"step": step})
    if me == 0:
        victims = {3: root / "step-00000003/rank-00001.safetensors", 4: root / "step-00000004/rank-00000.safetensors"}
        victims[3].unlink()
        data = bytearray(victims[4].read_bytes())
        data[-1] ^= 1
        victims[4].write_bytes(data)
    distributed.barrier()
    found = checkpoint.newest(root)
    assert found is not None
    assert distributed.gather_objects(found.step) == [2, 2]
    quarantined = sorted(path.name for path in (root / "quarantine").iterdir())
    assert quarantined == ["step-00000003", "step-00000004"]
    if me == 0:  # damaged after it was verified
        os.truncate(root / "step-00000002/rank-00001.safetensors", 100)
    distributed.barrier()
    with pytest.raises(CheckpointError, match="rank-00001"):
        checkpoint.load(found, into)
    if me == 0:
        (root / "step-00000001/manifest.json").write_text("{}")
    distributed.barrier()
    with pytest.raises(UserError, match="refusing to start from zero"):
        checkpoint.newest(root)
    # a failed rank's peers are not left with a broken group
    checkpoint.save(root, 5, tensors, {})
    found = checkpoint.newest(root)
    assert found is not None
    assert found.step == 5


@pytest.mark.slow
def test_two_ranks_fail_and_recover_together(tmp_path):
    run_ranks(failures_and_fallback, 2, tmp_path / "run")


def raise_on_rank_1() -> None:
    if distributed.rank() == 1:
        raise ValueError("rank 1 breaks")
    distributed.barrier()


@pytest.mark.slow
def test_ranks_helper_tells_which_rank_failed():
    with pytest.raises(AssertionError, match=r"--- rank 1:[\s\S]*ValueError: rank 1 breaks"):
        run_ranks(raise_on_rank_1, 2)
