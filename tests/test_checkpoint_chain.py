"""The chain of checkpoints: asynchronous saves, known-good ones only, retention, full disks, `kamui-dist inspect`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kamui_dist import checkpoint, cli, distributed, files, health, parallel, retention
from kamui_dist.checkpoint import CheckpointError
from kamui_dist.errors import EXIT_DIVERGED, UserError
from kamui_dist.plan import Plan
from tests import corruption, tiny
from tests.benchmarks.checkpoint_time import build
from tests.ranks import run_ranks
from tests.test_checkpoint import limit_file_size, small

pytestmark = pytest.mark.timeout(600)  # the ranks of `pair` make 130 saves
ASYNC = {"checkpoint__async": True}
ONE = {"model__n_layers": 1}  # half the tensors, half the time


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_data(tmp_path_factory.mktemp("data") / "train", windows=64)


def findings(run: Path) -> list[dict[str, Any]]:
    path = run / "findings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hashes(directory: Path) -> dict[int, dict[str, str]]:
    """SHA-256 of every file of data of every published checkpoint. Each is verified."""
    out = {}
    for step, path in checkpoint.step_directories(directory):
        checkpoint.verify(path)
        out[step] = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.glob("*.safetensors")}
    return out


# ---- two ranks, started once


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def fifty_asynchronous_saves(base: Path) -> dict[str, Any]:
    """J07 and B35: 50 saves of 20 MB; five updates in place follow each at once; the weights of every fifth are compared."""
    metrics, module, savers, state = build(base, 20, "ddp")
    saver, resident, wrong, flying = savers["async"], [], 0, 0
    write = checkpoint.save

    def slowly(*args: Any, **more: Any) -> Any:
        nonlocal flying
        flying += 1
        assert flying == 1, "two saves at once"
        try:
            return write(*args, **more)
        finally:
            flying -= 1

    checkpoint.save = slowly
    for number in range(1, 51):
        state.step = number
        before = {f"model.{name}": p.detach().clone() for name, p in module.named_parameters()}
        assert saver.save(state) == ""
        for _ in range(5):
            rows = distributed.gather_rows(float(saver.code()), device=torch.device("cpu"))
            saver.poll([int(row[0]) for row in rows])
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(1.0)
        if number % 5 == 0:
            saver.wait()
            step, path = checkpoint.step_directories(base / "async" / "checkpoints")[-1]
            assert step == number
            into = {name: torch.zeros_like(t) for name, t in before.items()}
            checkpoint.load(checkpoint.open_checkpoint(path), into, ignore=("optim.",))
            wrong += any(not torch.equal(into[name], before[name]) for name in before)
            distributed.barrier()
        resident.append(resident_mib())
    saver.wait()
    checkpoint.save = write
    # what is no fault of the storage (here: no JSON) is raised by all ranks, at the step where the last of them knows
    saver.facts = {"x": object()}
    assert saver.save(state) == ""
    codes = [0]
    while min(codes) == 0:
        codes = [int(row[0]) for row in distributed.gather_rows(float(saver.code()), device=torch.device("cpu"))]
        if min(codes) == 0:
            saver.poll(codes)
    assert codes == [3, 3]
    with pytest.raises(CheckpointError, match="rank 0: TypeError"):
        saver.poll(codes)
    saver.wait()
    metrics.close()
    print(
        f"resident memory: {resident[9]:.1f} MiB after the 10th asynchronous save of 20 MB, {resident[-1]:.1f} after the 50th"
    )
    return {"growth": resident[-1] - resident[9], "wrong": wrong}


def touch_weight(name: str, value: float) -> None:
    weights = dict(parallel.unwrap(tiny.LAST_MODEL[0]).named_parameters())
    with torch.no_grad():
        weights[name].view(-1)[-1] = value


def join_saves() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("save-"):
            thread.join()


def small_files(on: bool) -> None:
    join_saves()  # it is the next save that shall meet the limit, or no longer
    limit_file_size(2000 if on else resource.RLIM_INFINITY)


def on_two_ranks(base: Path, data: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"toy": fifty_asynchronous_saves(base / "toy")}
    me = distributed.rank()
    for name, mesh in {"ddp": {}, "fsdp": {"parallel__shard": 2}}.items():
        for kind, how in {"sync": {}, "async": ASYNC}.items():
            # I13: 30 saves back to back
            cfg = tiny.config(
                base / f"{name}-{kind}",
                data,
                train__steps=30,
                checkpoint__every=1,
                optim__name="adamw",
                **ONE,
                **mesh,
                **how,
            )
            out[f"{name}-{kind}"] = tiny.run(cfg)
            # B29, I11: one rank cannot write while updates 4 and 5 are made
            loader = type("Loader", (tiny.Tracing,), {})
            calls = iter(range(1, 99))

            def following(self, calls=calls):
                call = next(calls)
                if me == 1 and call in (4, 6):
                    small_files(call == 4)
                return tiny.Tracing.next(self)

            loader.next = following  # type: ignore[attr-defined]
            cfg = tiny.config(
                base / f"{name}-{kind}-failing",
                data,
                train__steps=12,
                checkpoint__every=2,
                checkpoint__keep=2,
                **ONE,
                **mesh,
                **how,
            )
            out[f"{name}-{kind}-failing"] = tiny.run(cfg, loader=loader)
    # the last save must succeed
    cfg = tiny.config(base / "last", data, train__steps=4, checkpoint__every=2, **ONE, **ASYNC)
    with pytest.raises(CheckpointError, match=r"step 4 was not saved: rank 1: OSError.*File too large"):
        tiny.run(cfg, loader=tiny.acting(4, lambda: small_files(True), only_rank=1))
    small_files(False)
    # replicas that drifted apart, and weights that are not finite but that no loss shows (a token that never comes)
    cfg = tiny.config(base / "drift", data, train__steps=6, checkpoint__every=1, **ONE)
    out["drift"] = tiny.run(
        cfg, loader=tiny.acting(4, lambda: touch_weight("blocks.0.mlp_norm.weight", 1.25), only_rank=1)
    )
    cfg = tiny.config(
        base / "broken", data, train__steps=6, checkpoint__every=1, model__tie_embeddings=False, **ONE, **ASYNC
    )
    out["names"] = [n for n, _ in parallel.unwrap(tiny.LAST_MODEL[0]).named_parameters()]
    out["broken"] = tiny.run(
        cfg, loader=tiny.acting(4, lambda: touch_weight("token_embedding.weight", float("nan")), only_rank=1)
    )
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("pair")
    return base, run_ranks(on_two_ranks, 2, base, data, timeout=500)


@pytest.mark.slow
def test_an_asynchronous_save_holds_the_weights_of_its_step_and_memory_does_not_grow(pair):
    _, results = pair
    for result in results:
        assert result["toy"]["wrong"] == 0
        assert result["toy"]["growth"] < 40, "MiB from the 10th to the 50th save"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ddp", "fsdp"])
def test_thirty_asynchronous_saves_are_bit_for_bit_the_synchronous_ones(pair, mesh):
    base, results = pair
    assert all(result[f"{mesh}-{kind}"] == 0 for result in results for kind in ("sync", "async"))
    sync, aside = (hashes(base / f"{mesh}-{kind}" / "checkpoints") for kind in ("sync", "async"))
    assert list(aside) == list(range(1, 31))
    assert aside == sync
    records = tiny.records(base / f"{mesh}-async", "checkpoint", timeless=False)
    assert [r["step"] for r in records] == list(range(1, 31))
    assert [r["aside"] for r in records] == [True] * 29 + [False], "the last one is waited for"
    for record in records:
        assert 0 < record["check_seconds"] < record["save_seconds"]
        assert record["stall_seconds"] > 0
        assert record["mb_per_second"] == pytest.approx(record["bytes"] / 1e6 / record["write_seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp-sync", "ddp-async", "fsdp-sync", "fsdp-async"])
def test_a_save_that_one_rank_could_not_write_costs_that_checkpoint_and_not_the_run(pair, name):
    base, results = pair
    run = base / f"{name}-failing"
    assert all(result[f"{name}-failing"] == 0 for result in results)
    assert [r["step"] for r in tiny.records(run)] == list(range(1, 13))
    assert [r["step"] for r in tiny.records(run, "checkpoint")] == [2, 6, 8, 10, 12]
    [finding] = findings(run)
    assert (finding["kind"], finding["step"], finding["action"]) == ("save-failed", 4, "warn")
    assert "rank 1: OSError" in finding["message"]
    assert "Training goes on" in finding["advice"]
    assert list(hashes(run / "checkpoints")) == [10, 12]
    assert not list((run / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_the_last_save_must_succeed(pair):
    base, _ = pair  # what it raises is asserted on the ranks
    [finding] = findings(base / "last")
    assert (finding["kind"], finding["step"], finding["action"]) == ("save-failed", 4, "stop")
    assert "start the same command again" in finding["advice"]
    assert list(hashes(base / "last" / "checkpoints")) == [2]


@pytest.mark.slow
def test_replicas_that_differ_stop_the_run_and_are_named(pair):
    base, results = pair
    assert [result["drift"] for result in results] == [EXIT_DIVERGED] * 2, results[0]["names"]
    [finding] = findings(base / "drift")
    assert (finding["kind"], finding["step"], finding["action"]) == ("replica-divergence", 4, "stop")
    assert "rank 0 against rank 1" in finding["message"]
    assert list(hashes(base / "drift" / "checkpoints")) == [1, 2, 3]
    status = tiny.status(base / "drift")
    assert (status["outcome"], status["exit_code"]) == ("failed", EXIT_DIVERGED)
    assert "replica-divergence" in status["reason"]


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_published(pair):
    """I05, where no loss shows it."""
    base, results = pair
    assert [result["broken"] for result in results] == [EXIT_DIVERGED] * 2, results[0]["names"]
    [finding] = findings(base / "broken")
    assert (finding["kind"], finding["step"]) == ("non-finite-weights", 4)
    assert "rank 1: " in finding["message"]
    assert all(r["loss"] is not None for r in tiny.records(base / "broken")), "no loss shows it"
    assert list(hashes(base / "broken" / "checkpoints")) == [1, 2, 3], "the one in flight was waited for"


def hybrid(base: Path, data: Path) -> int:
    name = "blocks.0.mlp_norm.weight"

    def touch() -> None:
        weight = dict(tiny.LAST_MODEL[0].named_parameters())[name]
        with torch.no_grad():
            weight.to_local().add_(0.5)  # type: ignore[attr-defined]

    cfg = tiny.config(
        base / "run",
        data,
        train__steps=4,
        checkpoint__every=1,
        parallel__shard=2,
        parallel__replicate=2,
        train__micro_batch=2,
        **ONE,
    )
    return tiny.run(cfg, loader=tiny.acting(3, touch, only_rank=3))


@pytest.mark.slow
def test_under_hsdp_the_ranks_with_the_same_shard_are_compared(tmp_path, data):
    assert run_ranks(hybrid, 4, tmp_path, data) == [EXIT_DIVERGED] * 4
    [finding] = findings(tmp_path / "run")
    assert finding["kind"] == "replica-divergence"
    assert "rank 1 against rank 3" in finding["message"]
    assert tiny.steps_saved(tmp_path / "run") == [1, 2]


# ---- what is good


def test_health_sees_every_kind_of_damage():
    torch.manual_seed(0)
    parts = {
        "a": torch.randn(33, 7), "half": torch.randn(5).to(torch.bfloat16), "big": torch.full((4, 4), 3e38), "none": torch.empty(0),
        "view": torch.randn(9)[1:], "int": torch.arange(3),
    }  # fmt: skip
    assert health.non_finite(parts) == [], "a norm that overflows is no element that did"
    before = health.checksums(parts)
    assert before == health.checksums({n: t.clone() for n, t in parts.items()})
    for name in ("a", "half", "big", "view"):
        for value in (float("nan"), float("inf"), float("-inf")):
            changed = {n: t.clone() for n, t in parts.items()}
            changed[name].view(-1)[-1] = value
            assert health.non_finite(changed) == [name]
        for position in range(parts[name].numel()):
            changed = {n: t.clone() for n, t in parts.items()}
            raw = changed[name].view(-1)[position : position + 1].view(torch.uint8)
            raw[0] ^= 1
            after = health.checksums(changed)
            assert [n for n in after if after[n] != before[n]] == [name]
            assert health.digest(after) != health.digest(before)
    plan = Plan(8, 4, 2, 1, 8, 8, 1, 0, 0, None, None)
    assert parallel.replicas(plan) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    groups = [[(0, "x"), (2, "x"), (4, "y"), (6, "x")], [(1, "z"), (3, "z"), (5, "z"), (7, "z")]]
    finding = health.divergence(7, groups, ["w"], 3)
    assert "rank 4 against the others (ranks 0, 2, 6)" in finding.message
    assert finding.action == "stop"


# ---- retention


def test_pinned_and_best_stay_damaged_ones_do_not_count(tmp_path, capsys):
    run = tmp_path / "run"
    directory = run / "checkpoints"
    facts = {"state": {"tokens": 8}, "strategy": "single", "world_size": 1}
    for step in range(1, 8):
        checkpoint.save(directory, step, small(step), facts)
    assert cli.main(["inspect", "pin", str(run), "2"]) == 0
    assert cli.main(["inspect", "pin", str(run), "9"]) == 2
    assert "it has 1, 2, 3, 4, 5, 6, 7" in capsys.readouterr().err
    os.truncate(directory / "step-00000007" / "rank-00000.safetensors", 9)
    (directory / "step-00000006" / "manifest.json").write_text("{}")
    files.write_json(directory / "best.json", {"step": 3})
    assert retention.best_step(directory) == 3
    assert checkpoint.prune(directory, 1, 0, {3}) == [1, 4], "5 is the newest that is whole"
    assert [step for step, _ in checkpoint.step_directories(directory)] == [2, 3, 5, 6, 7]
    checkpoint.save(directory, 2, small(2), facts)  # saved again: still pinned
    assert checkpoint.prune(directory, 1, 0, {3}) == []
    capsys.readouterr()

    assert cli.main(["inspect", "checkpoints", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "tokens", "val", "loss", "size", "saved", "by", "state"]
    assert "complete, pinned" in lines[1]
    assert "complete, best" in lines[2]
    assert "DAMAGED" in lines[4]
    assert "manifest.json" in lines[4]
    assert "DAMAGED: rank-00000.safetensors has 9 bytes" in lines[5]
    with pytest.raises(SystemExit):
        cli.main(["inspect", "pin", str(run), "x"])
    assert cli.main(["inspect", "unpin", str(run), "2"]) == 0
    assert cli.main(["inspect", "unpin", str(run), "2"]) == 2
    assert checkpoint.prune(directory, 1, 0, {3}) == [2]
    found = checkpoint.newest(directory)
    assert found is not None
    assert found.step == 5
    data = directory / "step-00000005" / "rank-00000.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    capsys.readouterr()
    assert cli.main(["inspect", "checkpoints", str(run)]) == 0, "sizes alone do not show it"
    out = capsys.readouterr().out
    assert out.count("in quarantine: ") == 2
    assert cli.main(["inspect", "checkpoints", str(run / "checkpoints"), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "verified, best" in out
    assert "SHA-256" in out
    assert "; 1 damaged" in out
    assert cli.main(["inspect", "checkpoints", str(tmp_path)]) == 2


@pytest.mark.slow
def test_a_run_keeps_what_is_pinned_and_the_best_that_was_saved(tmp_path, data, capsys):
    run = tmp_path / "run"
    pin = lambda: cli.main(["inspect", "pin", str(run), "2"])  # noqa: E731
    cfg = tiny.config(
        run, data, train__steps=8, checkpoint__every=1, checkpoint__keep=1, data__val_path=str(data), eval__every=4,
        eval__batches=1, optim__lr=0.0, **ASYNC,
    )  # fmt: skip
    assert tiny.run(cfg, loader=tiny.acting(4, pin)) == 0
    kept = tiny.steps_saved(run)
    assert {4, 8} <= set(kept)
    assert kept in ([2, 4, 8], [4, 8]), "2 may have been replaced before it could be pinned"
    assert cli.main(["inspect", "checkpoints", str(run), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "verified, best" in out
    assert f"{tiny.records(run, 'eval')[0]['val_loss']:.4f}" in out


@pytest.mark.parametrize("left", [None, "{", '{"step": 9, "val_loss": 1.0}', '{"step": 4, "val_loss": 1.0}'])
def test_the_best_is_protected_though_its_file_was_lost(tmp_path, data, left):
    """As after a kill between a checkpoint and best.json."""
    run = tmp_path / "run"
    changes = {"checkpoint__every": 2, "data__val_path": str(data), "eval__every": 2, "eval__batches": 1}
    assert tiny.run(tiny.config(run, data, train__steps=4, optim__lr=0.0, **changes)) == 0
    best = run / "checkpoints" / "best.json"
    told = best.read_text()
    assert json.loads(told)["step"] == 2
    best.unlink() if left is None else best.write_text(left)
    worse = tiny.config(run, data, train__steps=8, optim__lr=50.0, checkpoint__keep=1, **changes)
    tiny.run(worse)
    losses = [r["val_loss"] for r in tiny.records(run, "eval")]
    assert len(losses) == 4
    assert min(losses[2:]) > losses[0]
    assert tiny.steps_saved(run) == [2, 8]
    assert best.read_text() == told


def test_a_checkpoint_that_is_a_link_is_refused_at_a_start(tmp_path, data):
    run = tmp_path / "run"
    cfg = tiny.config(run, data, train__steps=4, checkpoint__every=2)
    assert tiny.run(cfg) == 0
    link = run / "checkpoints" / "step-00000004"
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"step-00000004 is a symbolic link, .*; move the directory itself back"):
        tiny.run(cfg)
    link.unlink()
    (tmp_path / "elsewhere").rename(link)
    assert tiny.run(cfg) == 0
    assert tiny.steps_saved(run) == [2, 4]


class Deleting:
    """Deletions that do not end before `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        remove = retention.remove

        def slowly(path: Path) -> None:
            self.began.set()
            assert self.go.wait(60)
            remove(path)

        monkeypatch.setattr(retention, "remove", slowly)


@pytest.mark.parametrize("how", [{}, ASYNC], ids=["sync", "async"])
def test_training_does_not_wait_for_what_is_deleted(tmp_path, data, monkeypatch, how):
    """Under DDP it would be the other ranks that wait for rank 0, in a step with a short time limit."""
    deleting = Deleting(monkeypatch)
    kept: list[list[int]] = []

    def look() -> None:
        join_saves()
        assert deleting.began.is_set()
        kept.append(tiny.steps_saved(tmp_path / "run"))
        deleting.go.set()

    cfg = tiny.config(tmp_path / "run", data, train__steps=8, checkpoint__every=2, checkpoint__keep=1, **how)
    assert tiny.run(cfg, loader=tiny.acting(8, look)) == 0
    assert kept == [[2, 4, 6]], "the next saves were made all the same"
    assert tiny.steps_saved(tmp_path / "run") == [8], "the end of the run waits for it"
    assert not [t for t in threading.enumerate() if t.name == "prune"]


def test_a_save_waits_for_a_deletion_whose_room_it_needs(tmp_path, data, monkeypatch):
    deleting = Deleting(monkeypatch)
    monkeypatch.setattr(
        retention, "free_bytes", lambda path: 0 if deleting.began.is_set() and not deleting.go.is_set() else 1 << 40
    )
    wait = retention.Pruner.wait

    def waits(self: retention.Pruner) -> None:
        deleting.go.set()
        wait(self)

    monkeypatch.setattr(retention.Pruner, "wait", waits)
    cfg = tiny.config(tmp_path / "run", data, train__steps=8, checkpoint__every=2, checkpoint__keep=1)
    assert tiny.run(cfg) == 0
    assert [r["step"] for r in tiny.records(tmp_path / "run", "checkpoint")] == [2, 4, 6, 8]
    assert findings(tmp_path / "run") == []


def test_random_damage_is_seen_before_anything_is_loaded(tmp_path):
    corruption.make(tmp_path)
    count, missed = corruption.damage(tmp_path / "step-00000001", flips=40, truncations=10, seed=1)
    assert (count, missed) == (50, [])


# ---- a disk that is really full


@contextlib.contextmanager
def small_disk(options: str) -> Iterator[Path]:
    """A tmpfs of its own."""
    directory = Path(tempfile.mkdtemp(prefix="kamui-disk-"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        directory.rmdir()
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
        directory.rmdir()


def fill(disk: Path) -> None:
    """Every free byte."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def run_on_full_disk(disk: Path, data: Path, how: dict[str, Any], take: Any, give: Any) -> Path:
    """The disk is full while updates 4 to 6 of 10 are made, with a checkpoint at every second."""
    calls = iter(range(1, 99))

    class Filling(tiny.Tracing):
        def next(self) -> Any:
            call = next(calls)
            if call == 4:
                join_saves()  # that of step 2 is on the disk
                take()
            if call == 7:
                join_saves()  # that of step 6 has failed by now
                give()
            return super().next()

    cfg = tiny.config(
        disk / "run", data, train__steps=10, checkpoint__every=2, log__tensorboard=True, log__every=1, **how
    )
    assert tiny.run(cfg, loader=Filling) == 0
    run = disk / "run"
    assert [r["step"] for r in tiny.records(run)] == list(range(1, 11)), "no record is lost"
    assert list(hashes(run / "checkpoints")) == [2, 8, 10]
    assert [f["step"] for f in findings(run)] == [4, 6]
    for finding in findings(run):
        assert (finding["kind"], finding["action"]) == ("disk-full", "warn")
        assert "free some of: " in finding["advice"]
        assert "checkpoints older than the newest" in finding["advice"] or "whatever else fills" in finding["advice"]
    return run


@pytest.mark.parametrize("how", [{}, ASYNC], ids=["sync", "async"])
def test_without_room_the_save_is_skipped_and_the_run_goes_on(data, how):
    with small_disk("size=8m") as disk:
        run = run_on_full_disk(disk, data, how, lambda: fill(disk), (disk / "ballast").unlink)
        assert "are free" in findings(run)[0]["message"]


@pytest.mark.parametrize("how", [{}, ASYNC], ids=["sync", "async"])
def test_a_disk_that_fills_up_in_the_middle_of_a_save(data, how):
    """Free bytes and no free inode: the check before the save sees nothing, and the writer fails with ENOSPC."""
    with small_disk("size=64m,nr_inodes=60") as disk:
        names = [disk / f"file-{i}" for i in range(60)]

        def take() -> None:
            with contextlib.suppress(OSError):
                for name in names:
                    name.touch()
            made = [name for name in names if name.exists()]
            made[-1].unlink()  # one is left, for the directory: the file in it fails

        def give() -> None:
            for name in names:
                name.unlink(missing_ok=True)

        run = run_on_full_disk(disk, data, how, take, give)
        assert "No space left on device" in findings(run)[0]["message"]


def test_a_save_onto_a_full_disk_leaves_the_earlier_ones(tmp_path):
    with small_disk("size=1m") as disk:
        tensors = {"a": torch.randn(400, 256)}  # 0.4 MB
        first = checkpoint.save(disk, 1, tensors, {})
        checkpoint.save(disk, 2, tensors, {})
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left on device") as error:
                checkpoint.save(disk, 3, tensors, {})
            assert error.value.errnos == (28,)
            assert sorted(path.name for path in disk.iterdir()) == ["step-00000001", "step-00000002"]
        checkpoint.verify(first.path)
        assert retention.free_bytes(disk / "not" / "yet") == retention.free_bytes(disk) < 1 << 20


# ---- who may write


@pytest.mark.slow
def test_group_and_others_cannot_write_into_a_run(tmp_path, data):
    cfg = f"tiny.config({str(tmp_path / 'run')!r}, {str(data)!r}, log__tensorboard=True)"
    script = f"import os; os.umask(0); from tests import tiny; tiny.run({cfg})"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=Path(__file__).parent.parent)
    run = tmp_path / "run"
    loose = [path for path in run.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert loose == []
    assert len(list(run.rglob("*"))) > 6


def test_threads_of_saves_are_gone(tmp_path, data):
    assert tiny.run(tiny.config(tmp_path / "run", data, checkpoint__every=1, **ASYNC)) == 0
    assert len(tiny.steps_saved(tmp_path / "run")) == 5
    assert not [t for t in threading.enumerate() if t.name.startswith("save-")]
    shutil.rmtree(tmp_path / "run")
