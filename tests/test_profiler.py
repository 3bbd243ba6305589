"""log.profile_steps: a trace and a table of the right steps, and nothing else; what lack of memory is answered with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from kamui_dist import distributed, memory_advice, model, optim, parallel, precision, profiler
from kamui_dist.config import KEYS
from kamui_dist.knobs import Config, Log
from kamui_dist.memory_advice import GIB, Memory, advise, count_parameters, estimate
from kamui_dist.plan import make_plan
from kamui_dist.profiler import Profiler
from kamui_dist.tensors import local_part
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def work() -> None:
    """Of a step: 3 products, and the sum that one of them is not in."""
    a = torch.ones(64, 64)
    for _ in range(3):
        a = a.mm(a).clamp(max=1.0)
    a.sum()


def profiled(
    base: Path, steps: list[int], ran: list[int], log: dict[str, Any] | None = None
) -> tuple[list[str], list[Path]]:
    """What was said, and the traces, after the steps `ran`."""
    said: list[str] = []
    p = Profiler(Log(profile_steps=steps, **(log or {})), base, CPU, enabled=True, say=said.append)
    for n in ran:
        p.step(n)
        work()
    p.close()
    p.close()
    return said, sorted(base.rglob("*.gz"))


def marks(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(e["name"] for e in events if e["name"].startswith("ProfilerStep#") and e["ph"] == "X")


@pytest.mark.parametrize(
    ("steps", "ran", "recorded"),
    [
        ([3, 4], [1, 2, 3, 4, 5, 6], [3, 4]),
        ([2], [1, 2, 3], [2]),
        ([1, 2], [1, 2, 3], [1, 2]),  # no step before for a warm-up
        ([3, 4], [3, 4, 5], [3, 4]),  # a run that goes on just there
        ([3, 4], [1, 2, 3, 4], [3, 4]),  # to the last step of the run
        ([2, 9], [1, 2, 3], [2, 3]),  # a run that ends before
        ([3, 4], [4, 5, 6], []),
        ([3, 4], [1, 2], []),
        ([], [1, 2, 3], []),
    ],
)
def test_the_trace_holds_the_steps_that_were_asked_for(tmp_path, steps, ran, recorded):
    said, traces = profiled(tmp_path, steps, ran)
    assert [mark for trace in traces for mark in marks(trace)] == [f"ProfilerStep#{n}" for n in recorded]
    if recorded:
        name = f"steps-{steps[0]}-{steps[-1]}"
        assert traces == [tmp_path / "profile" / name / "rank-0.pt.trace.json.gz"]
        assert [p.name for p in (tmp_path / "profile").iterdir()] == [name], "what was made aside is left"
        assert str(traces[0]) in said[-1]
        first, last = recorded[0], recorded[-1]
        title = f"profile of step {first}" if first == last else f"profile of steps {first} to {last}"
        asked = "" if last == steps[-1] else f" ({first} to {steps[-1]} were asked for, the run ended before)"
        assert said[0].startswith(f"{title}{asked}, rank 0, by time on the CPU")
        assert rows(said[0])["aten::mm"][2] == "3", "a step, of the steps that were recorded"
    else:
        assert not (tmp_path / "profile").exists()
        assert len(said) == (1 if steps else 0), said
        assert not said or said[0].startswith("note: log.profile_steps")


def test_other_ranks_and_runs_without_it_do_nothing(tmp_path, capsys):
    p = Profiler(Log(profile_steps=[1, 2]), tmp_path, CPU, enabled=False)
    p.step(1)
    p.step(3)
    p.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "profile").write_text("a file where the directory belongs")
    said, traces = profiled(tmp_path, [1, 2], [1, 2, 3])
    assert not traces
    assert said[-1].startswith("warning: the trace could not be written")
    assert "aten::mm" in said[0], "the table is told all the same"


def test_memory_history_on_the_cpu_is_a_note(tmp_path):
    said, _ = profiled(tmp_path, [], [1, 2], {"memory_history": True})
    assert len(said) == 1
    assert "log.memory_history has no effect on the CPU" in said[0]


def rows(text: str) -> dict[str, list[str]]:
    """operator -> [self ms a step, share, calls a step]"""
    lines = [line for line in text.splitlines() if line.startswith("  ") and "operator" not in line]
    return {line[:46].strip(): line[46:].split() for line in lines}


def test_the_table_agrees_with_torchs_own(tmp_path):
    """Own times and calls of every operator, against key_averages() of the same events."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as p:
        for _ in range(4):
            work()
    events = p.profiler.kineto_results.events()
    spent, calls = profiler._of_operators([e for e in events if e.name()[0] != "["])
    expected = {a.key: a for a in p.key_averages() if a.key[0] != "["}
    assert set(spent) == set(expected)
    for name, a in expected.items():
        assert calls[name] == a.count, name
        assert spent[name] / 1000 == pytest.approx(a.self_cpu_time_total, rel=0.02, abs=5), name
    told = rows(profiler.table(events, steps=4))
    assert told["aten::mm"][2] == "3"
    assert sum(float(share[:-1]) for _, share, *_ in told.values()) == pytest.approx(100, abs=1)


def event(name: str, device: DeviceType, start: int, duration: int, own: int = 0, linked: int = 0) -> Any:
    """As torch's _KinetoEvent, which only a GPU makes for kernels."""
    values = {
        "name": name, "device_type": device, "start_ns": start, "duration_ns": duration, "correlation_id": own,
        "linked_correlation_id": linked, "is_user_annotation": name.startswith("ProfilerStep"), "is_async": False,
        "start_thread_id": 1,
    }  # fmt: skip
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def test_kernels_count_for_the_operator_that_launched_them():
    GPU = DeviceType.CUDA
    events = [
        event("ProfilerStep#3", DeviceType.CPU, 0, 9000),
        event("aten::mm", DeviceType.CPU, 10, 100, own=1),
        event("cudaLaunchKernel", DeviceType.CPU, 20, 50, own=1, linked=1),  # its own id is of another counter
        event("aten::add", DeviceType.CPU, 200, 100, own=2),
        event("gemm_a", GPU, 400, 3_000_000, linked=1),
        event("gemm_b", GPU, 500, 3_000_000, linked=1),
        event("vectorized_add", GPU, 600, 1_000_000, linked=2),
        event("ncclKernel", GPU, 700, 1_000_000),
        event("ProfilerStep#3", GPU, 400, 9_000_000),  # an annotation around kernels, not one of them
    ]
    text = profiler.table(events, steps=2)
    assert "on the GPU, 4.00 ms a step" in text
    assert rows(text) == {
        "aten::mm": ["3.000", "75.0%", "1"],
        "aten::add": ["0.500", "12.5%", "0"],
        "ncclKernel": ["0.500", "12.5%", "0"],
    }


# ---- memory


def held(cfg: Config) -> tuple[float, float]:
    """Bytes that the CPU's allocator holds after a forward pass more than before it, and the most during backward."""
    net = model.GPT(cfg.model)
    model.init_weights(net, 0)
    x = torch.randint(0, cfg.model.vocab_size or 0, (cfg.train.micro_batch, cfg.model.context_length))
    mark = 12345
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        with precision.autocast(CPU, cfg.run.precision):
            loss = net(x, x)
        torch.empty(mark, dtype=torch.uint8)
        loss.backward()
    now = most = 0
    after = None
    for e in sorted(p.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if e.name() == "[memory]":
            if e.nbytes() == mark:
                after = now
            now += e.nbytes()
            most = max(most, now)
    assert after is not None
    return after, most


def tiny_config(compute: str = "fp32", **overrides: Any) -> Config:
    shape = {"n_layers": 4, "n_heads": 4, "d_model": 64, "context_length": 128, "vocab_size": 500} | overrides
    return Config.model_validate(
        {"run": {"precision": compute, "device": "cpu"}, "model": shape, "train": {"steps": 1, "micro_batch": 4}}
    )


LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tie_embeddings": False}
KINDS: list[dict[str, Any]] = [
    {}, {"vocab_size": 4096}, LLAMA, {"n_kv_heads": 2, "position": "rope"}, {"qk_norm": True}, {"norm": "rmsnorm", "qk_norm": True},
    {"d_model": 128}, {"dropout": 0.1},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_estimate_is_what_the_allocator_holds(kind):
    for compute in ("fp32", "bf16"):
        for checkpointing in ("none", "selective", "full"):
            cfg = tiny_config(compute, **kind, checkpointing=checkpointing)
            parameters = count_parameters(cfg.model)
            assert parameters is not None
            after, most = held(cfg)
            # autocast's copies of the weights: of those in the graph
            head = -(-cfg.model.vocab_size // 64) * 64 * cfg.model.d_model  # type: ignore[operator]
            copies = parameters if checkpointing == "none" else head
            kept, again = memory_advice.activations(cfg, sharded=False)
            kept += memory_advice.softmax(cfg) + (2 * copies if compute == "bf16" else 0)
            assert kept == pytest.approx(after, rel=0.07), (compute, checkpointing)
            bound = kept + again + 2 * memory_advice.softmax(cfg) + 4 * parameters
            assert 0.5 * bound < most < bound, (compute, checkpointing)


@pytest.mark.parametrize("kind", [*KINDS, {"vocab_size": 65, "vocab_multiple": 1, "bias": False}], ids=str)
def test_parameters_are_counted_as_they_are(kind):
    shape = tiny_config(**kind).model
    with torch.device("meta"):
        assert count_parameters(shape) == model.parameter_counts(model.GPT(shape))[0]
    assert count_parameters(shape.model_copy(update={"vocab_size": None})) is None
    assert count_parameters(shape.model_copy(update={"factory": "a:b"})) is None


def held_by_rank() -> list[tuple[list[int], Memory]]:
    """Bytes of weights, gradients and optimizer state on this rank, under DDP and FSDP; and what was expected."""
    out = []
    for shard in (1, 2):
        cfg = tiny_config()
        cfg.parallel.shard, cfg.parallel.replicate = shard, 2 // shard
        made = make_plan(cfg, 2)
        with torch.device("meta"):
            net: torch.nn.Module = model.GPT(cfg.model)
        wrapped = parallel.parallelize(net, cfg, made, distributed.make_mesh(CPU, made.replicate, made.shard), CPU)
        module = parallel.unwrap(wrapped)
        optimizer = optim.build(module, cfg.optim)
        x = torch.zeros(1, 8, dtype=torch.int64)
        wrapped(x, x).backward()
        optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        kinds = (
            list(parallel.local_weights(module).values()),
            [p.grad for p in module.parameters() if p.grad is not None],
            moments,
        )
        held = [sum(local_part(t).numel() * t.element_size() for t in tensors) for tensors in kinds]
        out.append((held, estimate(cfg, made, count_parameters(cfg.model) or 0)))
    return out


@pytest.mark.slow
def test_what_a_rank_holds_of_weights_gradients_and_moments():
    for strategy, ranks in zip(("DDP", "FSDP"), zip(*run_ranks(held_by_rank, 2), strict=True), strict=True):
        held = [sum(column) for column in zip(*(held for held, _ in ranks), strict=True)]
        weights, gradients, optimizer = (
            sum(getattr(m, f) for _, m in ranks) for f in ("weights", "gradients", "optimizer")
        )
        assert held[1:] == pytest.approx([gradients, optimizer], rel=1e-3), strategy
        if strategy == "DDP":
            assert held[0] == weights
        else:  # with what is gathered: on either rank two blocks of four, and what is no block
            assert 0.5 < (weights - held[0]) / (2 * held[0]) < 1


def gpt(**overrides: Any) -> Config:
    """1.3 billion parameters in bf16 on 8 ranks."""
    values: dict[str, Any] = {
        "model": {"n_layers": 24, "n_heads": 16, "d_model": 2048, "context_length": 2048, "vocab_size": 50257},
        "train": {"steps": 1, "micro_batch": 8, "global_batch": 128},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def test_the_arithmetic_by_hand():
    """P = 10^9 in fp32 with AdamW: 16 bytes each. Logits: 3 x 4 x 8 x 2048 x 50257."""
    cfg = gpt(run__precision="fp32")
    m = estimate(cfg, make_plan(cfg, 1), 10**9)
    assert m.weights + m.gradients + m.optimizer == 16e9
    assert m.logits == 12 * 8 * 2048 * 50257
    cfg = gpt(run__precision="bf16", parallel__shard=8)
    m = estimate(cfg, make_plan(cfg, 8), 10**9)
    assert m.optimizer == 1e9
    assert m.gradients == 4e9, "deferred over 2 micro-batches: whole on every rank"
    cfg = gpt(run__precision="bf16", parallel__shard=8, parallel__defer_sync=False, optim__name="sgd")
    m = estimate(cfg, make_plan(cfg, 8), 10**9)
    assert (m.gradients, m.optimizer) == (0.5e9, 0)


def saved(lines: list[str]) -> dict[str, float]:
    """key -> GiB"""
    return {
        line.split(" ")[0]: float(line.rpartition("about ")[2].split(" ")[0]) for line in lines if "GiB less" in line
    }


def test_the_advice_says_which_key_frees_how_much():
    cfg = gpt()
    parameters = count_parameters(cfg.model)
    made = make_plan(cfg, 8)
    lines = advise(cfg, made, parameters)
    m = estimate(cfg, made, parameters or 0)
    assert lines[0] == f"memory of one rank, estimated: {m}"
    gib = saved(lines[1:])
    assert gib["train.micro_batch"] == pytest.approx(((m.activations or 0) + (m.logits or 0)) / 2 / GIB, abs=0.06)
    assert lines[1].startswith("model.checkpointing = full"), "the most first"
    assert gib["parallel.shard"] == pytest.approx(16 * (parameters or 0) * 7 / 8 / GIB, rel=0.3)
    told = "\n".join(lines)
    assert "train.micro_batch 8 -> 4 (the same batch in 2 times as many passes)" in told
    assert "model.checkpointing = selective" in told
    assert "defer_sync" not in told, "without FSDP it frees nothing"
    for line in lines[1:]:
        assert line.split(" ")[0] in KEYS, line


@pytest.mark.parametrize(
    ("overrides", "there", "not_there"),
    [
        ({"train__micro_batch": 1}, "model.checkpointing", "train.micro_batch"),
        ({"train__micro_batch": 9, "train__global_batch": 72}, "train.micro_batch 9 -> 3", "9 -> 4"),
        ({"model__checkpointing": "full"}, "train.micro_batch", "model.checkpointing"),
        ({"parallel__shard": 8}, "parallel.defer_sync = false", "parallel.shard"),
        ({"parallel__shard": 8, "parallel__reshard_after_forward": False}, "parallel.reshard_after_forward = true", "shard = "),
        ({"run__precision": "fp32"}, "run.precision = bf16", "defer_sync"),
    ],
)  # fmt: skip
def test_only_what_can_be_changed_is_advised(overrides, there, not_there):
    cfg = gpt(**overrides)
    told = "\n".join(advise(cfg, make_plan(cfg, 8), count_parameters(cfg.model))[1:])
    assert there in told
    assert not_there not in told


def test_advice_without_numbers_where_they_are_not_known():
    cfg = gpt(model__factory="tests.tiny:lstm")
    lines = advise(cfg, make_plan(cfg, 8), 10**9)
    assert "train.micro_batch = 8" in lines[1]
    assert any(line.startswith("parallel.shard = 8") for line in lines)
    [line] = advise(cfg, make_plan(cfg, 8), None)
    assert line.startswith("train.micro_batch: half of it")
