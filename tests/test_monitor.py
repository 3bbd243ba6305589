"""The look into the layers, the gradient noise scale and the stopwatch, against plain PyTorch on the whole batch."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kamui_dist import attention, distributed, noise, parallel, precision, start, stopwatch
from kamui_dist.attention import document_mask, largest_score
from kamui_dist.model import GPT, Block, init_weights
from kamui_dist.monitor import Monitor
from kamui_dist.noise import NoiseScale
from kamui_dist.plan import make_plan
from kamui_dist.stopwatch import Stopwatch
from tests import tiny
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ROWS, T, LR = 8, tiny.T, 0.5

# name -> ranks and what differs. Every mesh, gradients held back or sent in each micro-batch, one micro-batch or two.
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"parallel__shard": 2}),
    "fsdp, each": (2, {"parallel__shard": 2, "parallel__defer_sync": False}),
    "ddp, one pass": (2, {"train__micro_batch": 4}),
    "hsdp": (4, {"parallel__shard": 2, "parallel__replicate": 2}),
    "fsdp 4": (4, {"parallel__shard": 4}),
}


def config(**changes: Any) -> Any:
    cfg = tiny.config(
        Path(), Path(), **{"train__global_batch": ROWS, "train__micro_batch": 1, "log__detail_every": 1, **changes}
    )
    cfg.model.vocab_size = tiny.VOCAB
    return cfg


def layout(name: str) -> Any:
    ranks, changes = MESHES[name]
    return config(**{"train__micro_batch": ROWS // ranks // 2, **changes})


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """A global batch: inputs, targets of which some do not count, where documents begin. (8, T) each."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 64, (ROWS, T + 1), generator=generator)
    x, y = rows[:, :-1], rows[:, 1:].clone()
    y[torch.rand(y.shape, generator=generator) < 0.3] = -100
    border = torch.randint(0, T, (ROWS, 1), generator=generator)
    return x, y, torch.where(torch.arange(T) < border, 0, border)


def freeze(model: nn.Module) -> nn.Module:
    model.get_parameter("final_norm.weight").requires_grad_(False)
    model.get_parameter("blocks.1.mlp.up.weight").requires_grad_(False)
    return model


class Loop:
    """The loop's own order of calls, on the process group that is there, around one fixed global batch."""

    def __init__(self, cfg: Any, freezing: bool = False, watched: bool = True) -> None:
        self.cfg, self.plan = cfg, make_plan(cfg, distributed.world_size())
        mesh = distributed.make_mesh(CPU, self.plan.replicate, self.plan.shard)
        model = start.build_model(cfg)
        self.model = parallel.parallelize(freeze(model) if freezing else model, cfg, self.plan, mesh, CPU)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR)
        self.clock = Stopwatch(CPU)
        if watched:
            self.monitor = Monitor(self.model, cfg, self.plan, CPU, self.clock)
        self.watched, self.step, self.losses = watched, 0, [0.0] * 0

    def run(
        self, documents: bool = False, scale: float = 1.0, spoil: str | None = None, update: bool = True
    ) -> dict[str, Any]:
        """One step. scale: of the loss, as for fp16. spoil: a parameter whose gradient becomes NaN."""
        micro, ranks = self.cfg.train.micro_batch, self.plan.world_size
        first = distributed.rank() * micro * self.plan.grad_accum_steps
        detail = self.watched and self.monitor.begin(self.step + 1)
        self.clock.start()
        loss_sum = torch.zeros(())
        for i in range(self.plan.grad_accum_steps):
            x, y, *starts = (t[first + i * micro : first + (i + 1) * micro] for t in batch()[: 3 if documents else 2])
            distributed.seed_random(7, self.step, i)
            last = i == self.plan.grad_accum_steps - 1
            with parallel.gradient_sync(self.model, last, self.cfg.parallel.defer_sync):
                with precision.autocast(CPU, self.cfg.run.precision):
                    loss = self.model(x, y, *starts)
                self.clock.lap("own")
                (loss * (scale * ranks / self.plan.tokens_per_step)).backward()
            loss_sum += loss.detach()
        self.clock.lap("backward")
        rows = distributed.gather_rows(loss_sum, parallel.grad_norm(self.model), device=CPU)
        self.clock.lap("meet")
        count = int((batch()[1] != -100).sum())
        unscale = self.plan.tokens_per_step / (count * scale)
        if spoil:
            dict(parallel.unwrap(self.model).named_parameters())[spoil].grad.mul_(math.nan)  # type: ignore[union-attr]
        if self.watched:
            self.monitor.before_update(unscale)  # in every step, as the loop does
        if update:
            parallel.clip_grad_norm(self.model, rows[0][1], unscale, 0.0)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clock.lap("update")
        self.step += 1
        self.losses.append(sum(r[0] for r in rows))
        self.clock.record()
        generator = torch.get_rng_state()
        record = self.monitor.after_update(x, y, *starts) if detail else {}
        assert torch.equal(generator, torch.get_rng_state())
        return record


# ---- the reference: one process, the whole batch, loops over layers and heads


def layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def norm_of(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.detach().double() ** 2).sum()) for t in tensors))


def plain_model() -> GPT:
    model = GPT(config().model)
    init_weights(model, 7)
    freeze(model)
    return model


def gradient(model: GPT, rows: slice) -> dict[str, Tensor]:
    """Of the summed loss of these rows, over the mean number of targets in so many rows."""
    x, y, _ = batch()
    model.zero_grad()
    loss = F.cross_entropy(model.logits(x[rows]).flatten(0, 1), y[rows].flatten(), ignore_index=-100, reduction="sum")
    (loss * ROWS / ((y != -100).sum() * len(x[rows]))).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def reference(name: str) -> dict[str, Any]:
    model, (ranks, _) = plain_model(), MESHES[name]
    cfg = layout(name)
    micro, own = cfg.train.micro_batch, ROWS // ranks
    whole = gradient(model, slice(0, ROWS))
    small = micro if name in ("single", "ddp", "ddp, one pass", "fsdp, each") else own
    squares = [norm_of([*gradient(model, slice(r * own, r * own + small)).values()]) ** 2 for r in range(ranks)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, g in whole.items():
            model.get_parameter(n).sub_(LR * g)
    layers: dict[str, dict[str, float]] = {}
    parameters = dict(model.named_parameters())
    for layer in dict.fromkeys(map(layer_of, parameters)):
        of = [n for n in parameters if layer_of(n) == layer]
        elements = sum(parameters[n].numel() for n in of)
        layers[layer] = {
            "grad_norm": norm_of([whole[n] for n in of if n in whole]),
            "weight_norm": norm_of([parameters[n] for n in of]),
            "update_norm": norm_of([parameters[n] - before[n] for n in of]),
            "frozen": sum(parameters[n].numel() for n in of if n not in whole) / elements,
        }
    # the first row of each rank's last micro-batch
    looked = [r * own + own - micro for r in range(ranks)]
    x, _, starts = (t[looked] for t in batch())
    for i, values in enumerate(look(model, x, None)):
        layers[f"blocks.{i}"] |= values
    return {
        "layers": layers,
        "in documents": look(model, x, starts),
        "estimate": noise.estimate(small, statistics.mean(squares), ROWS, norm_of([*whole.values()]) ** 2),
    }


@torch.no_grad()
def look(model: GPT, x: Tensor, starts: Tensor | None) -> list[dict[str, float]]:
    """By block. starts: where each token's document begins."""
    assert model.position_embedding is not None
    places = torch.arange(x.shape[1])
    h = model.token_embedding(x) + model.position_embedding(places if starts is None else places - starts)
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, _ = block.attention.heads(block.attention_norm(h), None)
        h = block(h, None, document_mask(starts, 8, 0.0))
        rms = float((h.double() ** 2).mean()) ** 0.5
        found.append({"activation_rms": rms, "attention_logit_max": naive_largest(q, k, starts)})
    return found


def naive_largest(q: Tensor, k: Tensor, documents: Tensor | None) -> float:
    B, H, length, size = q.shape
    largest = -math.inf
    for b in range(B):
        for head in range(H):
            for t in range(length):
                for s in range(t + 1):
                    if documents is None or documents[b, t] == documents[b, s]:
                        key = k[b, head // (H // k.shape[1]), s]
                        largest = max(largest, float(q[b, head, t].double() @ key.double()) / math.sqrt(size))
    return largest


def check_record(name: str, record: dict[str, Any]) -> None:
    expected = reference(name)
    assert list(record["layers"]) == ["token_embedding", "position_embedding", "blocks.0", "blocks.1", "final_norm"]
    for layer, values in expected["layers"].items():
        got = dict(record["layers"][layer])
        # two fp32 weights that are close have a difference of few digits
        assert got.pop("trains") is True  # the bias of the norm does
        assert got.pop("update_ratio") == pytest.approx(values["update_norm"] / values["weight_norm"], rel=1e-4)
        assert got == pytest.approx(values, rel=1e-4), f"{name}: {layer}"
    assert record["layers"]["final_norm"]["frozen"] == 0.5
    signal, trace = expected["estimate"]
    assert record["gradient_signal"] == pytest.approx(signal, rel=1e-3, abs=1e-5)
    assert record["gradient_noise"] == pytest.approx(trace, rel=1e-3)
    assert record["causality_gap"] == 0.0
    assert ("communication_seconds" in record) == name.startswith("ddp")
    assert record.get("communication_seconds", 1) > 0
    json.dumps(record, allow_nan=False)


def shared_part(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != "detail_seconds"}


def one_mesh(name: str) -> dict[str, Any]:
    """Everything that is asked of one mesh, on this rank."""
    loop = Loop(layout(name), freezing=True)
    out: dict[str, Any] = {"first": loop.run(scale=64.0)}  # the norms do not know of the scale
    out["hooks"] = sum(len(p._post_accumulate_grad_hooks or ()) for p in loop.model.parameters())
    out["training"] = all(m.training for m in loop.model.modules())
    out["spoilt"] = loop.run(spoil="blocks.0.mlp.up.weight", update=False, documents=True)
    out["noise"] = loop.monitor.noise.to_dict()
    # a look at every step, at the first, at none, and no monitor at all: the same losses and weights
    runs = []
    for every in (1, 100, 0, None):
        other = layout(name)
        other.model.dropout, other.run.precision, other.log.detail_every = 0.2, "bf16", every or 0
        again = Loop(other, watched=every is not None)
        records = [again.run(documents=bool(step % 2)) for step in range(3)]
        assert [bool(r) for r in records] == {1: [True] * 3, 100: [True, False, False]}.get(every or 0, [False] * 3)
        assert all(r["causality_gap"] == 0.0 for r in records[:1] if r)
        runs.append((again.losses, tiny.full_weights(again.model)))
    out["same losses"] = all(losses == runs[0][0] for losses, _ in runs)
    out["same weights"] = all(tiny.same(weights, runs[0][1]) for _, weights in runs)
    out["moves"] = len(set(runs[0][0])) == 3
    return out


def check_mesh(name: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["same losses"]
        assert result["same weights"]
        assert result["moves"]
        assert result["hooks"] == 0
        assert result["training"]
        check_record(name, result["first"])
        # A gradient that is not finite is that of its layer; nothing moved, and the estimate is as it was
        layers = result["spoilt"]["layers"]
        assert [n for n, layer in layers.items() if layer["grad_norm"] is None] == ["blocks.0"]
        assert [layer["update_norm"] for layer in layers.values()] == [0.0] * 5
        assert result["noise"]["weight"] == pytest.approx(1 - noise.DECAY)
        assert "causality_gap" not in result["spoilt"]
        for i, values in enumerate(reference(name)["in documents"]):
            got = layers[f"blocks.{i}"]
            assert {key: got[key] for key in values} == pytest.approx(values, rel=1e-4)
            assert got["activation_rms"] != result["first"]["layers"][f"blocks.{i}"]["activation_rms"]
        json.dumps(result["spoilt"], allow_nan=False)
        assert shared_part(result["first"]) == shared_part(results[0]["first"])
        assert shared_part(result["spoilt"]) == shared_part(results[0]["spoilt"])


def test_one_process() -> None:
    check_mesh("single", [one_mesh("single")])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_meshes(ranks: int) -> None:
    names = [name for name, (n, _) in MESHES.items() if n == ranks]
    results = run_ranks(several, ranks, names)
    for i, name in enumerate(names):
        check_mesh(name, [result[i] for result in results])


def several(names: list[str]) -> list[dict[str, Any]]:
    return [one_mesh(name) for name in names]


# ---- in the loop


def runs(base: Path, data: Path) -> list[tuple[int, bool, bool]]:
    """DDP and FSDP, each with three values of detail_every: looks, and whether records and weights are those of the first."""
    found = []
    for mesh in ({}, {"parallel__shard": distributed.world_size()}):
        runs = []
        for every in (0, 1, 100):
            run_dir = base / f"{len(mesh)}-{every}"
            values = {"model__dropout": 0.2, "train__micro_batch": 2, "log__detail_every": every, **mesh}
            assert tiny.run(tiny.config(run_dir, data, **values)) == 0
            steps = [[r[k] for k in ("loss", "grad_norm_pre_clip", "lr", "targets")] for r in tiny.records(run_dir)]
            runs.append((steps, tiny.full_weights(tiny.LAST_MODEL[0])))
            same = steps == runs[0][0], tiny.same(runs[-1][1], runs[0][1])
            found.append((len(tiny.records(run_dir, "detail")), *same))
    return found


@pytest.mark.slow
def test_a_run_does_not_depend_on_being_looked_at(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data")
    results = run_ranks(runs, 2, tmp_path, data)
    for found in results:
        assert found == [(0, True, True), (5, True, True), (1, True, True)] * 2
    [record, *_] = tiny.records(tmp_path / "1-1", "detail")
    assert record["step"] == 1
    assert record["causality_gap"] == 0.0
    assert record["layers"]["blocks.1"]["update_ratio"] > 0
    assert len(tiny.records(tmp_path / "1-1", "step")) == 5
    last = tiny.records(tmp_path / "0-1", timeless=False)[-1]
    assert last["compute_seconds"] + last["meet_seconds"] + last["update_seconds"] < last["step_seconds"]
    assert last["median_own_seconds"] <= last["own_seconds"]
    assert last["slowest_rank"] in (0, 1)
    assert 0 < last["memory_gib"] < 1.05 * last["peak_memory_gib"]  # the kernel counts both a little behind


# ---- attention scores


@pytest.mark.parametrize("scores", [1, 200, 1 << 24])  # a row of queries at a time, some, all
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_largest_score_is_that_of_all_that_is_visible(monkeypatch: Any, scores: int, key_heads: int) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    for seed in range(3):
        torch.manual_seed(seed)
        q, k = torch.randn(2, 4, 9, 6), torch.randn(2, key_heads, 9, 6)
        k[:, :, 8] *= 10  # only the last query sees it
        border = torch.randint(1, 9, (2, 1))
        documents = torch.where(torch.arange(9) < border, 0, border)
        for starts in (None, documents):
            mask = document_mask(starts, 6, 0.0, flex=False)
            assert float(largest_score(q, k, mask)) == pytest.approx(naive_largest(q, k, starts), rel=1e-5)
    q[0, 0, 3, 0] = math.nan
    assert math.isnan(float(largest_score(q, k, None)))


def test_scores_are_never_all_in_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "SCORES", 8192)
    sizes = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)
            return out

    q = torch.randn(1, 4, 256, 8)
    with Watching():
        largest_score(q, q, None)
    assert 1000 < max(sizes) <= 8192 < 4 * 256 * 256


def test_of_a_very_long_sequence_the_beginning_is_looked_at(monkeypatch: Any) -> None:
    monkeypatch.setattr("kamui_dist.monitor.LONGEST", 4)
    record = Loop(layout("single"), freezing=True).run(documents=True, update=False)
    x, _, starts = batch()
    for i, values in enumerate(look(plain_model(), x[4:5, :4], starts[4:5, :4])):
        assert {key: record["layers"][f"blocks.{i}"][key] for key in values} == pytest.approx(values, rel=1e-4)


# ---- causality


class Bag(nn.Module):
    """Predicts from the mean of the embeddings up to `ahead` tokens after the one at hand; 0 is causal."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ahead = ahead
        self.embedding = nn.Embedding(tiny.VOCAB, 16)
        self.head = nn.Linear(16, tiny.VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        length = x.shape[1]
        seen = torch.ones(length, length).tril(self.ahead)
        mixed = (seen / seen.sum(1, keepdim=True)) @ self.embedding(x)
        return F.cross_entropy(self.head(mixed).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")


class Noisy(Bag):
    """Another answer each time, in evaluation too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (1 + torch.rand(()))


def test_a_step_that_is_not_due_costs_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop calls before_update in every step: a copy of the weights in each would be most of the monitor's cost."""
    model = Bag(0)
    monitor = Monitor(model, config(log__detail_every=100), make_plan(config(), 1), CPU)
    monkeypatch.setattr(parallel, "local_weights", pytest.fail)
    monkeypatch.setattr("kamui_dist.monitor.local_part", pytest.fail)
    for step in (2, 99, 101):
        assert not monitor.begin(step)
        monitor.before_update(1.0)
    assert monitor.weights == {}
    assert monitor.squares == []


def gap_of(model: nn.Module, length: int = 64, **changes: Any) -> Any:
    torch.manual_seed(1)
    cfg = config(model__context_length=length, train__micro_batch=2, train__grad_accum_steps=1, **changes)
    monitor = Monitor(model, cfg, make_plan(cfg, 1), CPU)
    rows = torch.randint(0, tiny.VOCAB, (2, length + 1))
    rows[rows == tiny.SENTINEL] = 0
    assert monitor.begin(1)
    (model(rows[:, :-1], rows[:, 1:]) / rows.numel()).backward()
    monitor.before_update(1.0)
    record = monitor.after_update(rows[:, :-1], rows[:, 1:])
    assert monitor.begin(2)
    monitor.before_update(1.0)
    assert "causality_gap" not in monitor.after_update(rows[:, :-1], rows[:, 1:])  # once a start
    return record.get("causality_gap")


def test_a_model_that_sees_its_targets_is_told() -> None:
    assert gap_of(Bag(0)) == 0.0
    assert gap_of(Bag(1)) > 6e-3  # one token too far; at the cut in the middle it is half of that
    assert gap_of(Bag(64)) > 1e-2  # no mask at all
    assert gap_of(Bag(1), length=2) > 1e-2
    assert gap_of(tiny.LSTM(config().model)) == 0.0
    assert gap_of(Noisy(0)) == 0.0  # its noise is no leak
    assert gap_of(Bag(0), length=1) is None  # nothing comes after
    # special tokens that the data do not have are not tried: this model would raise
    cfg = config(model__factory_args={"trap": "raise"}).model
    assert gap_of(tiny.Trap(cfg)) == 0.0


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_our_model_does_not_leak_and_one_without_a_mask_does(monkeypatch: Any, compute: str) -> None:
    def build() -> GPT:
        model = GPT(config(model__context_length=64, run__precision=compute).model)
        init_weights(model, 7)
        return model

    assert gap_of(build(), run__precision=compute) == 0.0
    monkeypatch.setattr("kamui_dist.model.attend", lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v))
    assert gap_of(build(), run__precision=compute) > 1e-4


# ---- compiled blocks


@pytest.mark.slow
def test_compiled_blocks_are_not_compiled_again_and_give_the_same_numbers() -> None:
    records, graphs = [], []
    for compiled in (False, True):
        cfg = layout("single")
        cfg.model.compile = compiled
        # the same code path with a backend that needs no C++ compiler
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
            loop = Loop(cfg)
        cfg.log.detail_every = 2
        loop.run()  # also step 1 is one to look into
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        records += [loop.run(), loop.run(), loop.run()][::2]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]
    for eager, compiled_ in zip(records[:2], records[2:], strict=True):
        assert compiled_["layers"].keys() == eager["layers"].keys()
        for name, values in eager["layers"].items():
            assert compiled_["layers"][name] == pytest.approx(values, rel=1e-3)


# ---- noise scale


def test_the_noise_scale_is_unbiased_and_exact_where_it_can_be() -> None:
    rng = np.random.default_rng(0)
    each = rng.normal(0.3, 1.0, (50, 20)) * np.linspace(0.5, 2, 20)  # gradients of 50 sequences, of 20 weights
    mean = each.mean(0)
    signal, trace = float(mean @ mean), float(((each - mean) ** 2).sum(1).mean())
    # with the expected squared lengths of batches of 4 and 32: the truth
    assert noise.estimate(4, signal + trace / 4, 32, signal + trace / 32) == pytest.approx((signal, trace), rel=1e-9)

    # a batch of 16 on 4 ranks, drawn many times: right on average, although each draw is far off
    draws = 4000
    signals, traces = np.empty(draws), np.empty(draws)
    for i in range(draws):
        ranks = each[rng.integers(0, 50, (4, 4))].mean(1)  # (ranks, weights)
        whole = ranks.mean(0)
        signals[i], traces[i] = noise.estimate(4, float((ranks**2).sum(1).mean()), 16, float(whole @ whole))
    for values, truth in ((signals, signal), (traces, trace)):
        error = values.std() / math.sqrt(draws)
        assert abs(values.mean() - truth) < 4 * error < 0.05 * truth
        assert values.std() > 0.05 * truth


def test_both_averages_are_smoothed_for_themselves_and_saved() -> None:
    scale = NoiseScale()
    assert scale.record(8) == {}
    for small, big in ((3.0, 2.0), (5.0, 1.5)):
        scale.observe(2, small, 4, big)
    # signals 1, -2 and traces 4, 14 with weights 0.9 x 0.1 and 0.1
    assert scale.record(8)["gradient_signal"] == pytest.approx((0.09 * 1 - 0.1 * 2) / 0.19)
    assert scale.record(8)["gradient_noise"] == pytest.approx((0.09 * 4 + 0.1 * 14) / 0.19)
    assert scale.record(8)["noise_scale"] is None
    scale.observe(2, math.nan, 4, 1.0)
    scale.observe(2, 3.0, 4, math.inf)
    again = NoiseScale()
    again.load(json.loads(json.dumps(scale.to_dict())))
    for one in (scale, again):
        one.observe(2, 40.0, 4, 39.0)  # 38, 4
    assert again.record(8) == scale.record(8)
    signal, trace = (0.081 - 0.18 + 3.8) / 0.271, (0.324 + 1.26 + 0.4) / 0.271
    assert again.record(8)["noise_scale"] == pytest.approx(trace / signal)
    assert again.record(8)["noise_scale_tokens"] == pytest.approx(8 * trace / signal)


def test_one_process_with_one_micro_batch_has_no_estimate() -> None:
    loop = Loop(config(train__micro_batch=ROWS))
    record = loop.run()
    assert not {"noise_scale", "gradient_noise"} & record.keys()
    assert record["layers"]["blocks.0"]["grad_norm"] > 0


# ---- stopwatch


def test_sections_add_up_and_what_lies_between_steps_counts_nowhere(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Stopwatch(CPU)
    for step in range(2):
        assert clock.own_seconds == (0.0, 4.0)[step]  # of the step before
        now[0] += 100  # validation, data
        clock.start()
        for name, seconds in (("own", 1), ("own", 3), ("backward", 5), ("meet", 0.5), ("update", 2)):
            now[0] += seconds + (10 * step if name == "meet" else 0)
            clock.lap(name)
        record = clock.record()
        assert record["compute_seconds"] == 9
        assert (record["meet_seconds"], record["update_seconds"]) == ((0.5, 2), (10.5, 2))[step]
    worst = {"own_seconds": 9.0, "slowest_rank": 1, "median_own_seconds": 4.5}
    assert stopwatch.slowest([4.0, 9.0, 4.5]) == worst
    assert stopwatch.slowest([0.0, 0.0, 0.0]) == dict.fromkeys(worst)


def test_on_cuda_nothing_is_read_before_it_has_passed(monkeypatch: Any) -> None:
    """With events of a pretended device: what is asked for too early would raise."""
    device_time, host_time = [0.0], [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            host_time[0] += 1  # launched; it passes when the device has come so far
            self.at = host_time[0]

        def query(self) -> bool:
            return self.at <= device_time[0]

        def elapsed_time(self, other: Event) -> float:
            assert self.query()
            assert other.query()
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Stopwatch(torch.device("cuda"))
    for step in range(3):
        clock.start()
        clock.lap("own")
        clock.lap("own")
        clock.lap("backward")
        device_time[0] = host_time[0]  # the synchronisation of the step
        clock.lap("meet")
        clock.lap("update")
        record = clock.record()
        assert clock.own_seconds == 2
        assert record["compute_seconds"] == 3
        assert record["meet_seconds"] == record["update_seconds"] == (None if step == 0 else 1)
    assert len(clock._steps) <= 2


def test_memory_is_what_is_held_now() -> None:
    before = stopwatch.memory_gib(CPU)
    block = torch.ones(1 << 26)  # 256 MiB
    held = stopwatch.memory_gib(CPU) - before
    assert 0.2 < held < 0.3
    del block
    assert stopwatch.memory_gib(CPU) - before < 0.1
