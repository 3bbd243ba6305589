"""What only a GPU can show. Skipped without one: `pytest tests/test_gpu.py` on a machine that has it is the project's GPU check."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kamui_dist import distributed
from kamui_dist.config import Config
from kamui_dist.data import Loader
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.shards import TokenDataset
from kamui_dist.signals import StopRequest
from kamui_dist.train import train

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.slow]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train"
    path.mkdir()
    writer = ShardWriter(path, vocab_size=257, shard_tokens=50_000)
    # A walk over the bytes: predictable enough to learn something in a few steps.
    writer.write(np.cumsum(np.random.default_rng(0).integers(-2, 3, 200_000)) % 256)
    writer.close(
        tokenizer={"name": "bytes", "fingerprint": "0" * 64}, separator=256, documents=1, text_bytes=200_000,
        sources=[], seed=0, split=None,
    )  # fmt: skip
    return path


def run(shards: Path, folder: Path, **changes: dict) -> list[dict]:
    values: dict[str, dict] = {
        "run": {"dir": str(folder), "device": "cuda"},
        "model": {"n_layers": 2, "n_heads": 4, "d_model": 128, "context_length": 128},
        "data": {"path": str(shards), "val_path": str(shards)},
        "optim": {"lr": 1e-3},
        "train": {"steps": 12, "micro_batch": 8, "global_batch": 16},
        "eval": {"every": 6, "batches": 2},
        "checkpoint": {"every": 6},
    }
    for section, table in changes.items():
        values[section] = {**values.get(section, {}), **table}
    assert train(Config.model_validate(values), StopRequest()) in (0, 75)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "step"]


def losses(records: list[dict]) -> list[float]:
    return [r["loss"] for r in records]


def test_fp32_on_the_gpu_is_fp32_on_the_cpu(shards: Path, tmp_path: Path) -> None:
    gpu = run(shards, tmp_path / "gpu", run={"precision": "fp32", "dir": str(tmp_path / "gpu"), "device": "cuda"})
    cpu = run(shards, tmp_path / "cpu", run={"precision": "fp32", "dir": str(tmp_path / "cpu"), "device": "cpu"})
    np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=2e-4)
    np.testing.assert_allclose(
        [r["grad_norm_pre_clip"] for r in gpu[:3]], [r["grad_norm_pre_clip"] for r in cpu[:3]], rtol=1e-3
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", [{}, {"compile": True}, {"checkpointing": "selective"}, {"position": "rope", "mlp": "swiglu",
                                   "norm": "rmsnorm", "n_kv_heads": 2, "qk_norm": True, "bias": False}])  # fmt: skip
def test_it_trains_in_every_precision_and_shape(shards: Path, tmp_path: Path, precision: str, model: dict) -> None:
    shape = {"n_layers": 2, "n_heads": 4, "d_model": 128, "context_length": 128, **model}
    records = run(shards, tmp_path, run={"precision": precision, "dir": str(tmp_path), "device": "cuda"}, model=shape)
    done = [r for r in records if not r["skipped"]]
    assert len(done) >= 8
    assert done[-1]["loss"] < done[0]["loss"] - 0.2


def test_a_resume_is_bitwise(shards: Path, tmp_path: Path) -> None:
    settings = {"precision": "bf16", "device": "cuda", "deterministic": True}
    model = {"n_layers": 2, "n_heads": 4, "d_model": 128, "context_length": 128, "dropout": 0.1}
    constant = {"kind": "constant"}
    whole = run(shards, tmp_path / "a", run={**settings, "dir": str(tmp_path / "a")}, model=model, schedule=constant)
    parts: dict[str, dict] = {"model": model, "schedule": constant, "run": {**settings, "dir": str(tmp_path / "b")}}
    run(shards, tmp_path / "b", **parts, train={"steps": 7, "micro_batch": 8, "global_batch": 16})
    resumed = run(shards, tmp_path / "b", **parts)
    assert losses(resumed) == losses(whole)
    assert [r["grad_norm_pre_clip"] for r in resumed] == [r["grad_norm_pre_clip"] for r in whole]


def test_batches_arrive_on_the_device_as_they_were_read(shards: Path) -> None:
    options = {
        "context_length": 128,
        "micro_batch": 4,
        "grad_accum_steps": 2,
        "rank": 0,
        "ranks": 1,
        "seed": 1,
        "first_sample": 0,
    }
    dataset = TokenDataset(str(shards))
    with (
        Loader(dataset, device=torch.device("cuda", 0), **options) as on_gpu,  # type: ignore[arg-type]
        Loader(dataset, device=torch.device("cpu"), **options) as on_cpu,  # type: ignore[arg-type]
    ):
        for _ in range(50):
            for (x, y), (u, v) in zip(on_gpu.next(), on_cpu.next(), strict=True):
                busy = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
                assert torch.equal(x.cpu(), u)
                assert torch.equal(y.cpu(), v)
                del busy


def test_a_step_reads_the_device_once(shards: Path, tmp_path: Path) -> None:
    """The packed reduction is the only host synchronisation: torch raises at any other inside these calls."""
    device = torch.device("cuda", 0)
    loss, norm = torch.ones((), device=device, dtype=torch.float64), torch.ones((), device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        distributed.seed_random(1, 2, 3)
        with pytest.raises(RuntimeError, match="synchroniz"):
            distributed.gather_rows(loss, norm, 1.0, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert distributed.gather_rows(loss, norm, 1.0, device=device) == [[1.0, 1.0, 1.0]]


def test_an_asynchronous_copy_holds_the_values_before_the_update():
    """Staging on CUDA: pinned buffers, a stream of its own, and the update waits for it. 20 rounds in the same buffers."""
    from kamui_dist.staging import Staging

    device = torch.device("cuda")
    weight, buffer = torch.zeros(32 << 20, device=device), torch.zeros(8, device=device)
    staging = Staging()
    addresses = set()
    for number in range(20):
        weight.fill_(number)
        buffer.fill_(number)
        copies = staging.capture({"weight": weight, "buffer": buffer}, at_once={"buffer"})
        buffer.add_(1)  # what a forward pass may do
        staging.before_update()
        weight.add_(1)
        staging.finish()
        assert bool((copies["weight"] == number).all())
        assert bool((copies["buffer"] == number).all())
        assert copies["weight"].is_pinned()
        addresses.add(copies["weight"].data_ptr())
    assert len(addresses) == 1
