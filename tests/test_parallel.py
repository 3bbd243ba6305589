"""The mathematics does not depend on the machine: every strategy, micro-batch and accumulation against plain PyTorch."""

from __future__ import annotations

import functools
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from kamui_dist import data as data_module
from kamui_dist import distributed, optim, parallel, precision, start
from kamui_dist.errors import EXIT_STOPPED
from kamui_dist.evaluate import evaluate
from kamui_dist.model import GPT, init_weights
from kamui_dist.plan import make_plan
from kamui_dist.shards import TokenDataset
from tests import tiny
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS, BATCH = 5, 16
ACCUM = 4  # micro-batches of the step whose collectives are counted

# How many targets count in each row of the global batch. With 4 ranks a rank or a whole micro-batch has none, another has all.
VALID = np.array([0, 0, 0, 0, 8, 1, 0, 0, 8, 8, 8, 8, 3, 0, 1, 7])


def valid_targets(step: int) -> np.ndarray:
    return np.roll(VALID, 3 * step)


class Uneven(data_module.Loader):
    """The product's loader, with targets taken out according to a row's place in the global batch."""

    def __init__(self, dataset: TokenDataset, **args: Any) -> None:
        self.layout = args["micro_batch"], args["grad_accum_steps"], args["rank"], args["ranks"]
        self.step = args["first_sample"] // BATCH
        super().__init__(dataset, **args)

    def next(self) -> list[tuple[torch.Tensor, ...]]:
        places = data_module.rank_positions(0, *self.layout)  # (A, B)
        valid = valid_targets(self.step)
        out: list[tuple[torch.Tensor, ...]] = []
        for rows, (x, y) in zip(places, super().next(), strict=True):
            keep = torch.arange(tiny.T)[None] < torch.from_numpy(valid[rows])[:, None]
            out.append((x, y.masked_fill(~keep, -100)))
        self.step += 1
        return out


# ---- the reference: one process, the whole batch, nothing of ours but the module and its initial weights


def reference(data: Path, cfg: Any, optimizer: str = "sgd") -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model_cfg = cfg.model.model_copy(update={"vocab_size": tiny.VOCAB})
    model = GPT(model_cfg)
    init_weights(model, cfg.run.seed)
    dataset = TokenDataset(data)
    stream = np.fromfile(next(data.glob("*.bin")), dtype="<u2").astype(np.int64)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups = [
        {"params": decayed, "weight_decay": cfg.optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    opt: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=cfg.optim.lr)
        if optimizer == "sgd"
        else torch.optim.AdamW(groups, lr=cfg.optim.lr, betas=(0.9, 0.95), foreach=False)
    )
    losses, norms = [], []
    for step in range(STEPS):
        windows = data_module.global_batch(dataset, step * BATCH, BATCH, tiny.T, cfg.run.seed)
        rows = torch.from_numpy(np.stack([stream[w * tiny.T : w * tiny.T + tiny.T + 1] for w in windows]))
        x, y = rows[:, :-1], rows[:, 1:].clone()
        for row, count in enumerate(valid_targets(step)):
            y[row, count:] = -100
        logits = model.logits(x)  # (16, T, 65)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        limit = cfg.optim.grad_clip or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        opt.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


VARIANTS: dict[str, dict[str, Any]] = {
    "tied, clipped": {"optim__grad_clip": 0.5},
    "untied, not clipped": {"optim__grad_clip": 0.0, "model__tie_embeddings": False},
    # Without biases: the gradient of a key's bias is 0 up to rounding, and Adam makes steps of any size of that.
    "adamw": {"optim__name": "adamw", "optim__lr": 1e-3, "optim__weight_decay": 0.1, "model__bias": False},
}


def cases(ranks: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """name -> (variant, layout): every way to divide one global batch of 16 windows among `ranks`."""
    meshes: dict[int, dict[str, dict[str, Any]]] = {
        1: {"single": {}},
        2: {"ddp": {}, "fsdp": {"parallel__shard": 2}},
        4: {"fsdp": {"parallel__shard": 4}, "hsdp": {"parallel__shard": 2, "parallel__replicate": 2}},
    }
    out: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, mesh in meshes[ranks].items():
        for accum in (1, 2, 4):
            out[f"{name}{ranks}-x{accum}"] = "tied, clipped", {**mesh, "train__micro_batch": BATCH // ranks // accum}
        two = {**mesh, "train__micro_batch": BATCH // ranks // 2}
        if ranks < 4:
            out[f"{name}{ranks}-untied"] = "untied, not clipped", two
        if name != "fsdp" or ranks == 2:
            out[f"{name}{ranks}-adamw"] = "adamw", two
        if name == {1: "", 2: "fsdp", 4: "hsdp"}[ranks]:
            out[f"{name}{ranks}-each"] = "tied, clipped", {**two, "parallel__defer_sync": False}
        if name == "fsdp" and ranks == 2:
            out[f"{name}{ranks}-keep"] = "tied, clipped", {**two, "parallel__reshard_after_forward": False}
    return out


def train_all(base: Path, data: Path) -> None:
    for name, (variant, layout) in cases(distributed.world_size()).items():
        assert tiny.run(tiny.config(base / name, data, **VARIANTS[variant], **layout), loader=Uneven) == 0


def check_against_reference(base: Path, data: Path, ranks: int) -> None:
    expected = {
        variant: reference(data, tiny.config(base, data, **args), args.get("optim__name", "sgd"))
        for variant, args in VARIANTS.items()
    }
    norms = expected["tied, clipped"][1]
    assert max(norms) > 0.5, "the limit must be felt, or clipping is not tested"
    for name, (variant, _) in cases(ranks).items():
        losses, norms, weights = expected[variant]
        seen = tiny.records(base / name)
        assert [r["targets"] for r in seen] == [int(VALID.sum())] * STEPS
        assert [r["loss"] for r in seen] == pytest.approx(losses, abs=1e-6), name
        assert [r["grad_norm_pre_clip"] for r in seen] == pytest.approx(norms, rel=1e-6), name
        limit = VARIANTS[variant].get("optim__grad_clip", 1.0) or float("inf")
        assert [r["grad_norm_post_clip"] for r in seen] == pytest.approx([min(n, limit) for n in norms], rel=1e-6)
        assert tiny.distance(tiny.weights(base / name), weights) <= 1e-6, name


@pytest.mark.slow
def test_one_process_with_any_accumulation_equals_plain_pytorch(tmp_path):
    data = tiny.write_data(tmp_path / "data")
    train_all(tmp_path, data)
    check_against_reference(tmp_path, data, 1)


# ---- initial weights


def initial_weights(base: Path, data: Path, meshes: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    out = []
    for mesh in meshes:
        cfg = tiny.config(base, data, model__vocab_size=65, model__tie_embeddings=False, **mesh)
        plan = make_plan(cfg, distributed.world_size(), 64)
        device_mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
        model = parallel.parallelize(start.build_model(cfg), cfg, plan, device_mesh, CPU)
        out.append({name: tensor.numpy() for name, tensor in tiny.full_weights(model).items()})
    return out


# ---- what is sent, and when


def count_communication(base: Path, data: Path, meshes: list[dict[str, Any]], accum: int) -> list[dict[str, int]]:
    """Collectives in one accumulated step, forward and backward only; the step before warms up (DDP rebuilds its buckets)."""
    out = []
    for mesh in meshes:
        cfg = tiny.config(
            base, data, model__vocab_size=65, train__micro_batch=1, train__global_batch=16 * accum, **mesh
        )
        plan = make_plan(cfg, distributed.world_size(), 64)
        device_mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
        model = parallel.parallelize(start.build_model(cfg), cfg, plan, device_mesh, CPU)
        reductions = [0]
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(reductions, counting_hook)
        x = torch.randint(0, 64, (1, tiny.T))

        def step(model=model, x=x, defer=cfg.parallel.defer_sync):
            for i in range(accum):
                with parallel.gradient_sync(model, last=i == accum - 1, defer=defer):
                    model(x, x).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad = None

        step()
        reductions[0] = 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("c10d::")}
        groups = sum(isinstance(m, FSDPModule) for m in model.modules())
        out.append({
            "groups": groups, "hook": reductions[0],
            "reduce_scatter": sum(n for k, n in counts.items() if "reduce_scatter" in k),
            "all_gather": sum(n for k, n in counts.items() if "allgather" in k),
            "all_reduce": sum(n for k, n in counts.items() if "allreduce" in k),
        })  # fmt: skip
    return out


def counting_hook(counter, bucket):  # DDP checks annotations
    counter[0] += 1
    mean = bucket.buffer() / torch.distributed.get_world_size()
    return torch.distributed.all_reduce(mean, async_op=True).get_future().then(lambda future: future.value()[0])


# ---- an exception in the middle of accumulation


def recover(base: Path, data: Path, meshes: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Per mesh: how far this rank's weights are from rank 0's, and from those of a run without the exception."""
    out = []
    for mesh in meshes:
        after = []
        for fail in (True, False):
            cfg = tiny.config(base, data, model__vocab_size=65, train__micro_batch=1, **mesh)
            plan = make_plan(cfg, distributed.world_size(), 64)
            device_mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
            model = parallel.parallelize(start.build_model(cfg), cfg, plan, device_mesh, CPU)
            optimizer = torch.optim.SGD(parallel.unwrap(model).parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(distributed.rank())
            x = torch.randint(0, 64, (1, tiny.T), generator=generator)
            if fail:
                try:
                    for i in range(3):
                        with parallel.gradient_sync(model, last=i == 2):
                            model(x, x).backward()
                            if i == 1:
                                raise ValueError("in micro-batch 2")
                except ValueError:
                    parallel.reshard(model)
                    optimizer.zero_grad()
            for i in range(2):
                with parallel.gradient_sync(model, last=i == 1):
                    model(x, x).backward()
            optimizer.step()
            after.append(tiny.full_weights(model))
        whole = distributed.gather_objects({n: t.tolist() for n, t in after[0].items()})[0]
        out.append((
            max(float((t - torch.tensor(whole[n])).abs().max()) for n, t in after[0].items()),
            tiny.distance(*after),
        ))  # fmt: skip
    return out


# ---- one start of the ranks for all of it

MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"parallel__shard": 2}, {"parallel__shard": 2, "parallel__defer_sync": False}],
    4: [{"parallel__shard": 4}, {"parallel__shard": 2}, {"parallel__shard": 2, "parallel__defer_sync": False}],
}


# ---- a run that goes on under another strategy

MOVES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ddp": {}, "fsdp": {"parallel__shard": 2}},
    4: {"fsdp": {"parallel__shard": 4}, "hsdp": {"parallel__shard": 2}},
}
MOVED: dict[str, Any] = {**VARIANTS["adamw"], "train__micro_batch": 2}


def move(base: Path, data: Path) -> dict[str, list[list[int]]]:
    """Goes on with runs that one process began, and begins runs that one process will go on with: the windows of each step."""
    seen = {}
    for name, mesh in MOVES[distributed.world_size()].items():
        code, seen[f"to-{name}"] = tiny.run_and_trace(tiny.config(base / f"to-{name}", data, **MOVED, **mesh))
        assert code == 0
        cfg = tiny.config(base / f"from-{name}", data, **MOVED, **mesh)
        code, seen[f"from-{name}"] = tiny.run_and_trace(cfg, tiny.signalling(2, signal.SIGTERM, only_rank=1))
        assert code == EXIT_STOPPED
    return seen


def check_moves(base: Path, data: Path, ranks: int, seen: list[dict[str, list[list[int]]]]) -> None:
    assert tiny.run(tiny.config(base / "unmoved", data, **MOVED)) == 0
    expected = tiny.records(base / "unmoved")
    windows = [
        sorted(data_module.global_batch(TokenDataset(data), s * BATCH, BATCH, tiny.T, 7).tolist()) for s in range(5)
    ]
    for name in MOVES[ranks]:
        code, rest = tiny.run_and_trace(tiny.config(base / f"from-{name}", data, **MOVED))
        assert code == 0
        union = {
            key: [sorted(w for part in step for w in part) for step in zip(*(s[key] for s in seen), strict=True)]
            for key in seen[0]
        }
        assert union[f"to-{name}"] == windows[2:]
        assert union[f"from-{name}"] + [sorted(step) for step in rest] == windows
        for way in ("to", "from"):
            run = base / f"{way}-{name}"
            assert [r["step"] for r in tiny.records(run, "resume")] == [2]
            for one, other in zip(tiny.records(run), expected, strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
                assert one["grad_norm_pre_clip"] == pytest.approx(other["grad_norm_pre_clip"], rel=1e-5)
                assert (one["step"], one["tokens"], one["lr"]) == (other["step"], other["tokens"], other["lr"])
            assert tiny.distance(tiny.weights(run, prefix=""), tiny.weights(base / "unmoved", prefix="")) <= 1e-5


def everything(base: Path, data: Path) -> dict[str, Any]:
    train_all(base, data)
    meshes = MESHES[distributed.world_size()]
    return {
        "moves": move(base, data),
        "initial": initial_weights(base, data, meshes[:2]),
        "counts": count_communication(base, data, meshes, ACCUM),
        "recover": recover(base, data, meshes[:2]),
        "types": types_in_bf16(base, data, meshes[:2]),
        "modes": mode_after_evaluation(base, data, meshes[:2]),
    }


def types_in_bf16(base: Path, data: Path, meshes: list[dict[str, Any]]) -> list[set[str]]:
    """Every type of weights, gradients and moments after a bf16 step."""
    out = []
    for mesh in meshes:
        cfg = tiny.config(base, data, model__vocab_size=65, run__precision="bf16", optim__name="adamw", **mesh)
        plan = make_plan(cfg, distributed.world_size(), 64)
        device_mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
        model = parallel.parallelize(start.build_model(cfg), cfg, plan, device_mesh, CPU)
        optimizer = optim.build(parallel.unwrap(model), cfg.optim)
        x = torch.randint(0, 64, (2, tiny.T))
        with parallel.gradient_sync(model, last=True), precision.autocast(CPU, "bf16"):
            loss = model(x, x)
            assert loss.dtype == torch.float32
            loss.backward()
        optimizer.step()
        tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
        assert len(tensors) == 5 * len(list(model.parameters()))
        out.append({str(t.dtype) for t in tensors if t is not None})
    return out


def mode_after_evaluation(base: Path, data: Path, meshes: list[dict[str, Any]]) -> list[Any]:
    """(loss, targets) of 7 windows in batches of 2, and the model's mode after it and after an exception in it."""
    out = []
    dataset = TokenDataset(data)
    for mesh in [*meshes, None]:
        if mesh is None:
            plain = GPT(tiny.config(base, data, model__vocab_size=65).model)
            init_weights(plain, 7)
            batches = list(data_module.evaluation_batches(dataset, tiny.T, 2, 0, 1, 7))
            total = sum(float(plain(x, y)) for x, y in batches)
            count = sum(int((y != -100).sum()) for _, y in batches)
            out.append((total / count, count, True, True))
            continue
        cfg = tiny.config(base, data, model__vocab_size=65, model__dropout=0.5, **mesh)
        plan = make_plan(cfg, distributed.world_size(), 64)
        device_mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
        module = parallel.unwrap(parallel.parallelize(start.build_model(cfg), cfg, plan, device_mesh, CPU))
        batches = list(
            data_module.evaluation_batches(dataset, tiny.T, 2, distributed.rank(), distributed.world_size(), 7)
        )
        module.train()
        loss, count, *_ = evaluate(module, batches, CPU, "fp32")
        trained = module.training

        def breaking(batches=batches):
            yield batches[0]
            raise ValueError("in evaluation")

        with pytest.raises(ValueError, match="in evaluation"):
            evaluate(module, breaking(), CPU, "fp32")
        out.append((loss, count, trained, module.training))
    return out


@functools.cache
def plain_initial() -> dict[str, torch.Tensor]:
    module = GPT(tiny.config(Path(), Path(), model__vocab_size=65, model__tie_embeddings=False).model)
    init_weights(module, 7)
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_fsdp_and_hsdp(tmp_path, ranks):
    data = tiny.write_data(tmp_path / "data")
    begun = tmp_path / "begun"
    assert tiny.run_and_trace(tiny.config(begun, data, **MOVED), tiny.signalling(2, signal.SIGTERM))[0] == EXIT_STOPPED
    for name in MOVES[ranks]:
        shutil.copytree(begun, tmp_path / f"to-{name}")
    results = run_ranks(everything, ranks, tmp_path, data)

    check_against_reference(tmp_path, data, ranks)
    check_moves(tmp_path, data, ranks, [result["moves"] for result in results])

    for result in results:
        # the same initial weights bit by bit, as one process fills them
        for weights in result["initial"]:
            assert tiny.same({name: torch.from_numpy(array) for name, array in weights.items()}, plain_initial())

        # with several micro-batches gradients travel once, or with defer_sync=false in each; replicas meet once
        plain, deferred, each = result["counts"]
        if ranks == 2:
            assert (plain["groups"], plain["hook"], plain["all_reduce"]) == (0, 1, 1)
        else:
            assert plain["groups"] == 3  # two blocks and the root
            assert (plain["reduce_scatter"], plain["all_reduce"]) == (3, 0)
        assert deferred["groups"] == each["groups"] == 3
        assert deferred["reduce_scatter"] == 3
        assert each["reduce_scatter"] == 3 * ACCUM
        assert deferred["all_reduce"] == each["all_reduce"] == (0 if ranks == 2 else 3)
        assert deferred["all_gather"] == each["all_gather"]

        # an exception between micro-batches leaves no switch wrong: the next step is the same on all ranks
        for mesh, (between_ranks, against_undisturbed) in enumerate(result["recover"]):
            assert between_ranks == 0
            if (
                ranks == 2 and mesh == 0
            ):  # DDP; under FSDP partial gradients of the failed step stay (see gradient_sync)
                assert against_undisturbed == 0

        assert result["types"] == [{"torch.float32"}] * 2

        *strategies, one_process = result["modes"]
        for loss, count, after, after_exception in strategies:
            assert loss == pytest.approx(one_process[0], abs=1e-6)
            assert count == one_process[1] == 7 * tiny.T
            assert after is True
            assert after_exception is True
