"""Whether every strategy computes on these processes what one process computes: the last part of `kamui-dist check`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kamui_dist import distributed, parallel, start
from kamui_dist.config import Config
from kamui_dist.plan import make_plan


def parity(device: torch.device) -> Iterator[tuple[str, list[str]]]:
    """(result, faults) of each strategy: three updates of a tiny model, in fp32, against one process that sees the whole batch."""
    ranks = distributed.world_size()
    reference = _train(device, 1, 1)
    meshes = [(ranks, 1), (1, ranks)] if ranks > 1 else []
    if ranks >= 4 and ranks % 2 == 0:
        meshes.append((2, ranks // 2))
    if not meshes:
        yield f"parity: single: loss {reference[0]:.6f}; DDP, FSDP and HSDP need more processes", []
    for replicate, shard in meshes:
        name = (
            f"DDP {replicate}" if shard == 1 else f"FSDP {shard}" if replicate == 1 else f"HSDP {replicate} x {shard}"
        )
        loss, weights = _train(device, replicate, shard)
        off = max(float((weights[key] - value).abs().max()) for key, value in reference[1].items())
        off = max(distributed.gather_objects(max(off, abs(loss - reference[0]))))
        good = off < 1e-3  # false for NaN, too
        fault = (
            [] if good else [f"{name} computes something else than one process: losses or weights differ by {off:.2g}"]
        )
        yield f"parity: {name} against one process: loss {loss:.6f}, largest difference {off:.1e}", fault


def _train(device: torch.device, replicate: int, shard: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The last loss, and the weights whole. replicate = shard = 1: on each rank for itself, with the batch of all."""
    ranks, length, alone = distributed.world_size(), 16, replicate * shard == 1
    width = 64 * -(-ranks // 64)  # each rank has to get a row
    cfg = Config.model_validate({
        "run": {"precision": "fp32", "seed": 1},
        "model": {"n_layers": 2, "n_heads": 2, "d_model": width, "context_length": length, "vocab_size": 128},
        "parallel": {"replicate": replicate, "shard": shard},
        "train": {"steps": 3, "micro_batch": 1},
    })  # fmt: skip
    plan = make_plan(cfg, replicate * shard, windows=1)
    mesh = None if alone else distributed.make_mesh(device, replicate, shard)
    model = parallel.parallelize(start.build_model(cfg), cfg, plan, mesh, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 128, (ranks, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    rows = tokens if alone else tokens[distributed.rank()][None]
    loss = torch.zeros((), device=device)
    for _ in range(3):
        with parallel.gradient_sync(model, last=True):
            loss = model(rows[:, :-1], rows[:, 1:]) / (ranks * length)
            (loss * plan.world_size).backward()  # averaged over the ranks by DDP and FSDP
        optimizer.step()
        optimizer.zero_grad()
    value = loss.item() if alone else sum(distributed.gather_objects(loss.item()))
    named = ((name, p.detach()) for name, p in parallel.unwrap(model).named_parameters())
    return value, {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in named}
