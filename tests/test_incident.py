"""What is left of a run that went wrong: whole, true, by one rank, in bounded number, and never at the cost of the run."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kamui_dist import distributed, incident, memory_advice, model, optim, parallel, start, worst
from kamui_dist.batches import Batch
from kamui_dist.config import Config
from kamui_dist.data import Loader
from kamui_dist.findings import Finding
from kamui_dist.mixture import TrainingData
from kamui_dist.plan import make_plan
from kamui_dist.shards import TokenDataset
from kamui_dist.state import State
from tests import tiny
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BAD = 38  # the window with the sentinel
FIRST = 16  # samples before the step that trains on it, with 16 samples a step


def finding(step: int = 5, kind: str = "divergence", action: str = "stop") -> Finding:
    return Finding(kind, step, "loss 7.", "a cause.", "an advice.", action)


def run_directory(base: Path, records: int = 3) -> Path:
    """As a run leaves it."""
    run = base / "run"
    (run / "checkpoints" / "step-00000100").mkdir(parents=True)
    (run / "checkpoints" / ".step-00000200.tmp").mkdir()
    steps = [{"kind": "step", "step": n, "loss": 1.0} for n in range(1, records + 1)]
    detail = {"kind": "detail", "step": 2, "layers": {"blocks.0": {"grad_norm": 1.5}}}
    lines = [json.dumps(r) for r in (*steps, detail)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "step", "st')  # killed while it wrote
    (run / "findings.jsonl").write_text(json.dumps(finding(2).record()) + "\n")
    (run / "config.toml").write_text("[run]\n")
    (run / "provenance.json").write_text('{"git": "abc"}')
    return run


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "incidents").iterdir())


def text(path: Path | None, name: str) -> str:
    assert path is not None
    return (path / name).read_text(encoding="utf-8")


def caught(function: Any, *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def boom() -> None:
    raise ValueError("boom-123")


# ---- a finding, which all ranks tell


def of_a_finding(base: str, shard: int) -> dict[str, Any]:
    """The step with the sentinel: the incident's directory, where this rank saw the sentinel, and whether it can go on."""
    run = Path(base) / f"run-{shard}"
    cfg = tiny.config(
        run, Path(base) / "data", model__factory="tests.tiny:trap", model__factory_args={"trap": "nan"},
        model__dropout=0.5, parallel__shard=shard, parallel__replicate=2 // shard,
    )  # fmt: skip
    data = TrainingData([TokenDataset(cfg.data.path or "")], ["novels"], [1.0], tiny.T)
    cfg.model.vocab_size = tiny.VOCAB
    rank, ranks = distributed.rank(), distributed.world_size()
    plan = make_plan(cfg, ranks, data.windows)
    wrapped = parallel.parallelize(
        start.build_model(cfg), cfg, plan, distributed.make_mesh(CPU, plan.replicate, plan.shard), CPU
    )
    module = parallel.unwrap(wrapped)
    optimizer = optim.build(module, cfg.optim)
    loader = Loader(
        data, context_length=tiny.T, micro_batch=cfg.train.micro_batch, rank=rank, ranks=ranks, device=CPU,
        grad_accum_steps=plan.grad_accum_steps, seed=cfg.run.seed, first_sample=FIRST,
    )  # fmt: skip
    micro_batches = loader.next()
    loader.close()
    run.mkdir(exist_ok=True)
    before = {name: w.clone() for name, w in parallel.local_weights(module).items()}
    state = State(step=2, samples=2 * FIRST, tokens=2 * FIRST * tiny.T)
    positions = worst.step_positions(cfg, plan, FIRST)
    path = worst.write_incident(
        run, finding(2, "non-finite", "skip"), state, module, micro_batches, positions, data, cfg, CPU
    )
    same = tiny.same(before, parallel.local_weights(module))
    x, y, *_ = micro_batches[0]
    for _ in range(2):  # FSDP has its shards again: an update goes on from here
        with parallel.gradient_sync(wrapped, last=True):
            wrapped(torch.zeros_like(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    where = [
        (m, row) for m, (x, *_) in enumerate(micro_batches) for row in range(len(x)) if (x[row] == tiny.SENTINEL).any()
    ]
    return {
        "path": path, "where": where, "training": module.training, "same": same,
        "finite": all(bool(w.isfinite().all()) for w in parallel.local_weights(module).values()),
    }  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """The directory, and of each rank what the four functions returned."""
    base = tmp_path_factory.mktemp("incident")
    tiny.write_data(base / "data", sentinels=(BAD,))
    run_directory(base)
    return base, run_ranks(on_two_ranks, 2, str(base), timeout=200)


def on_two_ranks(base: str) -> list[Any]:
    return [of_a_finding(base, 1), of_a_finding(base, 2), of_a_transformer(base), crash_at_once(f"{base}/run")]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2], ids=["DDP", "FSDP"])
def test_the_worst_sequence_is_the_one_with_the_sentinel(two_ranks, shard):
    base, results = two_ranks
    ranks = [r[shard - 1] for r in results]
    step = [tiny.window_of(base / "data", FIRST // 16 + 1, row) for row in range(16)]
    assert BAD in step
    assert all(r["training"] and r["same"] and r["finite"] for r in ranks)
    assert [r["path"] is not None for r in ranks] == [True, False]
    path = ranks[0]["path"]
    assert path == base / f"run-{shard}" / "incidents" / "step-00000002-non-finite"
    told = json.loads(text(path, "windows.json"))
    listed = {(part["rank"], part["micro_batch"], row): s for part in told for row, s in enumerate(part["sequences"])}
    assert len(listed) == 16
    assert sorted(s["window"] for s in listed.values()) == sorted(step)
    assert {s["source"] for s in listed.values()} == {"novels"}
    bad = [place for place, s in listed.items() if "non_finite" in s]
    assert bad == [(rank, *place) for rank, r in enumerate(ranks) for place in r["where"]], "as the rank itself saw it"
    assert len(bad) == 1
    one = listed[bad[0]]
    assert (one["window"], one["loss"], one["non_finite"], one["targets"]) == (BAD, None, "nan", tiny.T)
    assert all(3 < s["loss"] < 6 for place, s in listed.items() if place != bad[0])
    shown = text(path, "worst.txt").split("==== ")[1:]
    assert len(shown) == worst.SHOWN
    assert f"window {BAD} of novels" in shown[0]
    assert f"byte {BAD * tiny.T * 2}" in shown[0]
    losses = [float(re.findall(r"loss ([\d.]+)", s)[0]) for s in shown[1:]]
    assert losses == sorted(losses, reverse=True)
    assert "NOT what the file holds" not in "".join(shown)
    assert "\x1b" not in "".join(shown), "token 27 is the byte ESC: a terminal would obey it"
    report = text(path, "report.txt")
    assert "1 of 16 are not finite" in report
    assert f"window {BAD} of novels" in report
    assert "The run goes on" in report


def of_a_transformer(base: str) -> list[float]:
    """Under FSDP, with documents: the largest difference of each sequence's loss from that of one process, pass by pass."""
    cfg = tiny.config(Path(base), Path(base), parallel__shard=2, parallel__replicate=1, model__vocab_size=tiny.VOCAB,
                      model__dropout=0.5, model__checkpointing="full")  # fmt: skip
    plan = make_plan(cfg, 2)
    net = parallel.parallelize(start.build_model(cfg), cfg, plan, distributed.make_mesh(CPU, 1, 2), CPU)
    alone = model.GPT(cfg.model).eval()
    model.init_weights(alone, cfg.run.seed)
    draw = torch.Generator().manual_seed(distributed.rank())
    micro_batches: list[Batch] = []
    for _ in range(2):
        x = torch.randint(0, 64, (4, tiny.T), generator=draw)
        y = torch.randint(0, 64, (4, tiny.T), generator=draw)
        y[0, 3:], y[1] = -100, -100
        micro_batches.append((x, y, torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6]] * 4)))
    sums, targets = worst.sequence_losses(net, micro_batches, CPU, "fp32")
    assert net.training
    assert sums.shape == targets.shape == (2, 4)
    assert targets[0].tolist() == [3, 0, 8, 8]
    with torch.no_grad():
        expected = [[float(alone(*(t[i : i + 1] for t in part))) for i in range(4)] for part in micro_batches]
    return np.abs(sums - np.array(expected)).max(axis=1).tolist()


@pytest.mark.slow
def test_the_loss_of_each_sequence_is_that_of_a_pass_of_its_own(two_ranks):
    for rank in two_ranks[1]:
        assert max(rank[2]) < 1e-4


def one_step(tmp_path: Path, **overrides: Any) -> tuple[Config, TrainingData, torch.nn.Module]:
    cfg = tiny.config(
        tmp_path / "run", tiny.write_data(tmp_path / "data", windows=20), model__factory="tests.tiny:trap",
        model__factory_args={"trap": "nan"}, **overrides,
    )  # fmt: skip
    cfg.model.vocab_size = tiny.VOCAB
    data = TrainingData([TokenDataset(cfg.data.path or "")], ["data"], [1.0], tiny.T)
    (tmp_path / "run").mkdir()
    return cfg, data, tiny.trap(cfg.model)


def test_weights_that_are_not_finite_are_told_apart_from_data(tmp_path):
    cfg, data, net = one_step(tmp_path)
    torch.nn.init.constant_(net.head.bias, float("nan"))  # type: ignore[arg-type,union-attr]
    x = torch.ones(1, tiny.T, dtype=torch.int64)
    path = worst.write_incident(tmp_path / "run", finding(), State(), net, [(x, x)], np.array([[3]]), data, cfg, CPU)
    report = text(path, "report.txt")
    assert "weights that are not finite on rank 0: head.bias" in report
    assert "it is the weights, or the model, and not some of the data" in report
    assert "NOT what the file holds at this place now" in text(path, "worst.txt"), "ones, which the data are not"


def test_padding_and_positions_of_a_step(tmp_path):
    """Of an epoch's last step; after a rollback; with train.overfit_one_batch."""
    cfg, data, net = one_step(tmp_path, train__epochs=1.0, train__global_batch=16)
    plan = make_plan(cfg, 1, data.windows)
    last = worst.step_positions(cfg, plan, 16)
    assert last.tolist() == [[16, 17, 18, 19], *[[-1] * 4] * 3]
    gaps = [(4, 9)]
    assert worst.step_positions(cfg, plan, 0, gaps)[:2].tolist() == [[0, 1, 2, 3], [9, 10, 11, 12]]
    cfg.train.overfit_one_batch = True
    assert worst.step_positions(cfg, plan, 16)[0].tolist() == [0, 1, 2, 3]
    loader = Loader(
        data, context_length=tiny.T, micro_batch=4, rank=0, ranks=1, grad_accum_steps=4, seed=cfg.run.seed,
        first_sample=16, device=CPU, limit=plan.total_samples,
    )  # fmt: skip
    path = worst.write_incident(tmp_path / "run", finding(), State(), net, loader.next(), last, data, cfg, CPU)
    loader.close()
    told = json.loads(text(path, "windows.json"))
    assert [[bool(s) for s in part["sequences"]] for part in told] == [[True] * 4, *[[False] * 4] * 3]
    assert "all 4 are finite now" in text(path, "report.txt")


# ---- a crash or a hang, which one rank tells


def test_a_crash_is_told_whole(tmp_path):
    run = run_directory(tmp_path, records=300)
    path = incident.crash(run, caught(boom))
    assert path == run / "incidents" / "step-00000300-crash"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.toml", "findings.jsonl", "layers.json", "memory.txt", "provenance.json", "records.jsonl", "report.txt",
        "stacks.txt",
    ]  # fmt: skip
    records = [json.loads(line) for line in text(path, "records.jsonl").splitlines()]
    assert len(records) == 200
    assert records[-2:] == [{"kind": "step", "step": 300, "loss": 1.0}, json.loads(text(path, "layers.json"))]
    assert "in boom" in text(path, "stacks.txt")
    assert "ValueError: boom-123" in text(path, "stacks.txt")
    assert "thread MainThread" in text(path, "stacks.txt")
    assert "VmRSS" in text(path, "memory.txt")
    assert "GiB free of" in text(path, "memory.txt")
    report = text(path, "report.txt")
    for part in (
        "crash at step 300",
        "rank 0: ValueError: boom-123",
        "the checkpoint step-00000100",
        "--step 301",
        torch.__version__,
    ):
        assert part in report, part


def test_a_crash_before_anything_was_written(tmp_path):
    path = incident.crash(tmp_path, caught(boom))
    assert path == tmp_path / "incidents" / "step-00000000-crash"
    assert "from the beginning" in text(path, "report.txt")


def crash_at_once(run: str) -> tuple[Path | None, Path | None]:
    error = caught(boom)
    agreed = RuntimeError("of all ranks")
    agreed.agreed = True  # type: ignore[attr-defined]
    first = incident.crash(Path(run), agreed) if distributed.rank() else None
    distributed.barrier()
    return first, incident.crash(Path(run), error)


@pytest.mark.slow
def test_of_ranks_that_crash_together_one_tells(two_ranks):
    run = two_ranks[0] / "run"
    assert [rank[3] for rank in two_ranks[1]] == [(None, run / "incidents" / "step-00000003-crash")] * 2
    assert names(run) == ["step-00000003-crash"]


def test_a_hang_is_told_with_the_stacks_of_all_ranks(tmp_path):
    run = run_directory(tmp_path)
    (run / "stacks").mkdir()
    for rank in range(2):
        (run / "stacks" / f"rank-{rank:05d}.txt").write_text(f"rank {rank} is here")
    (run / "stacks" / "rank-00007.txt").write_text("of another start")
    os.utime(run / "stacks" / "rank-00007.txt", (1, 1))
    path = incident.hang(run, "rank 1 last seen in backward of step 4")
    assert path == run / "incidents" / "step-00000003-hang"
    assert "rank 0 is here" in text(path, "stacks.txt")
    assert "rank 1 is here" in text(path, "stacks.txt")
    assert "of another start" not in text(path, "stacks.txt")
    assert "rank 1 last seen in backward of step 4" in text(path, "report.txt")


def test_a_file_system_that_hangs_keeps_nobody(tmp_path, monkeypatch, capsys):
    """A pipe that nobody writes into, in place of a file: to open it takes for ever."""
    run = run_directory(tmp_path)
    (run / "findings.jsonl").unlink()
    os.mkfifo(run / "findings.jsonl")
    monkeypatch.setattr(incident, "PATIENCE_SECONDS", 0.3)
    assert incident.hang(run, "rank 0") is None
    assert "not written within" in capsys.readouterr().err
    os.close(os.open(run / "findings.jsonl", os.O_WRONLY))  # lets the thread go
    for thread in threading.enumerate():
        if thread.name == "kamui-incident":
            thread.join(10)


def test_a_full_disk_is_one_line(tmp_path, capsys):
    run = run_directory(tmp_path, records=300)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        path = incident.crash(run, caught(boom))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path is None
    assert names(run) == [], "nothing that is not whole"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the incident could not be kept: ")


def test_a_place_that_cannot_be_written_raises_nothing(tmp_path, capsys):
    run = run_directory(tmp_path)
    (run / "incidents").write_text("a file where the directory belongs")
    assert incident.crash(run, caught(boom)) is None
    assert incident.publish(run, finding(), {"report.txt": "x"}) is None
    assert capsys.readouterr().err.count("warning: the incident could not be kept") == 2
    assert incident.crash(tmp_path / "nowhere" / "\0", caught(boom)) is None


def test_the_first_and_the_newest_are_kept(tmp_path):
    (tmp_path / "incidents").mkdir()
    stale, fresh = tmp_path / "incidents" / ".step-1-a-host-1", tmp_path / "incidents" / ".step-1-a-host-2"
    for aside in (stale, fresh):
        aside.mkdir()
    os.utime(stale, (1, 1))
    for n in range(1, 14):
        path = incident.publish(tmp_path, finding(n), {"report.txt": str(n)})
        assert path is not None
        os.utime(path, (n, n))  # one second apart, as seen by who comes next
    kept = [int(name.split("-")[1]) for name in names(tmp_path) if name[0] != "."]
    assert kept == [1, *range(5, 14)]
    assert len(kept) == incident.KEPT
    assert fresh.exists(), "another rank may be writing it"
    assert not stale.exists()


def test_a_number_is_added_to_a_name_that_exists(tmp_path):
    for n in range(3):
        path = incident.publish(tmp_path, finding(), {"report.txt": str(n)})
        assert path is not None
        assert path.name == "step-00000005-divergence" + (f"-{n + 1}" if n else "")
    for age in (incident._STARTED - 10, time.time()):  # a crash of an earlier start, then one of this
        crashed = incident.publish(tmp_path, finding(5, "crash"), {"report.txt": "x"})
        assert crashed is not None
        os.utime(crashed, (age, age))
    assert crashed is not None
    assert crashed.name == "step-00000005-crash-2"
    assert incident.publish(tmp_path, finding(5, "crash"), {"report.txt": "y"}) == crashed
    assert text(crashed, "report.txt") == "x"


def allocate_on_the_cpu() -> None:
    torch.empty(10**15)


def allocate_in_python() -> None:
    bytearray(1 << 60)


@pytest.mark.parametrize("allocate", [allocate_on_the_cpu, allocate_in_python])
def test_lack_of_memory_is_answered_with_what_frees_some(tmp_path, allocate):
    cfg = tiny.config(tmp_path, tmp_path, model__vocab_size=50257, model__d_model=512, model__context_length=1024)
    path = incident.crash(tmp_path, caught(allocate), cfg)
    assert path is not None
    assert path.name == "step-00000000-out-of-memory"
    report = text(path, "report.txt")
    parameters = memory_advice.count_parameters(cfg.model)
    assert f"memory of one rank, estimated: {memory_advice.estimate(cfg, make_plan(cfg, 1), parameters or 0)}" in report
    assert "train.micro_batch 4 -> 2" in report


def test_lack_of_memory_with_a_model_of_ones_own(tmp_path):
    """Its parameters are known from provenance.json."""
    cfg = tiny.config(tmp_path, tmp_path, model__factory="tests.tiny:lstm")
    assert "memory of one rank" not in text(incident.crash(tmp_path, MemoryError(), cfg), "report.txt")
    other = tmp_path / "other"
    other.mkdir()
    (other / "provenance.json").write_text('{"parameters": 1073741824}')
    cfg.run.dir = str(other)
    report = text(incident.crash(other, MemoryError(), cfg), "report.txt")
    assert "weights 4.0 GiB, gradients 4.0 GiB, optimizer 0.0 MiB: 8.0 GiB in all" in report
    assert "MemoryError: (no message)" in report
    assert "Change something first (see above), then the same command goes on" in report


def test_what_is_out_of_memory():
    assert incident.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert incident.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not incident.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not incident.is_out_of_memory(ValueError("out of memory of what I did"))


def test_which_findings_are_worth_an_incident():
    warned, stopped, skipped = (
        finding(1, "spike", "warn"),
        finding(1, "plateau", "stop"),
        finding(1, "non-finite", "skip"),
    )
    turned = finding(1, "divergence", "rollback")
    assert incident.worth([], first_non_finite=True) is None
    assert incident.worth([warned], first_non_finite=True) is None
    assert incident.worth([warned, skipped], first_non_finite=True) is skipped
    assert incident.worth([skipped], first_non_finite=False) is None, "the second of a row, or the fp16 scale"
    assert incident.worth([skipped, turned], first_non_finite=True) is turned
    assert incident.worth([warned, stopped], first_non_finite=False) is stopped


def test_it_loads_without_torch():
    code = "import sys, kamui_dist.incident; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
