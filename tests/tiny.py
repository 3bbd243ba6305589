"""Tiny data sets, configs, models, and the real loop on ranks that are already there: what several tests share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kamui_dist import checkpoint, distributed, metrics, parallel, rollback, rundir, train
from kamui_dist.config import Config
from kamui_dist.data import Loader, global_batch
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.shards import TokenDataset
from kamui_dist.signals import StopRequest

T = 8
VOCAB = 65
LAST_MODEL: list[nn.Module] = []  # of the last `run` in this process
SENTINEL = 64  # never in the data unless asked for
TIMES = {
    "time",
    "tokens_per_sec",
    "mfu",
    "step_seconds",
    "data_seconds",
    "peak_memory_gib",
    "save_seconds",
    "stall_seconds",
    "write_seconds",
    "check_seconds",
    "mb_per_second",
    "eval_seconds",
    "compute_seconds",
    "meet_seconds",
    "update_seconds",
    "own_seconds",
    "slowest_rank",
    "median_own_seconds",
    "memory_gib",
    "detail_seconds",
    "communication_seconds",
}


def write_data(
    directory: Path, windows: int = 64, seed: int = 0, sentinels: tuple[int, ...] = (), length: int = T
) -> Path:
    """A traced data set: window w begins with the tokens (w mod 64, w div 64), so that a batch tells its windows."""
    tokens = np.random.default_rng(seed).integers(0, 64, windows * length + 1)
    tokens[: windows * length : length] = np.arange(windows) % 64
    tokens[1 : windows * length : length] = np.arange(windows) // 64
    for window in sentinels:
        tokens[window * length + 4] = SENTINEL
    directory.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(directory, VOCAB, 1 << 30)
    writer.write(tokens)
    writer.close(
        tokenizer={"name": "bytes", "fingerprint": "f"}, separator=None, documents=1, text_bytes=int(tokens.size)
    )
    return directory


def window_of(data: Path, step: int, row: int, batch: int = 16, seed: int = 7) -> int:
    """The window at place `row` of the global batch of update `step` (the first is 1)."""
    return int(global_batch(TokenDataset(data), (step - 1) * batch, batch, T, seed)[row])


def config(run_dir: Path, data: Path, **overrides: Any) -> Config:
    """5 updates of SGD in fp32 on 16 windows each, changed by section__key=value."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run_dir), "seed": 7, "device": "cpu", "precision": "fp32"},
        "model": {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 32, "context_length": T, "vocab_multiple": 1,
                  "init_std": 0.1},
        "data": {"path": str(data)},
        "optim": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "train": {"steps": 5, "micro_batch": 4, "global_batch": 16},
        "eval": {"every": 0},
        "checkpoint": {"every": 1000, "keep": 0},
        "log": {"tensorboard": False},
    }  # fmt: skip
    for key, value in overrides.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
        if name in ("tokens", "epochs"):
            del values["train"]["steps"]
        if name == "grad_accum_steps":
            del values["train"]["global_batch"]
    return Config.model_validate(values)


def write_toml(path: Path, cfg: Config) -> Path:
    from kamui_dist.config import to_toml

    path.write_text(to_toml(cfg))
    return path


@contextlib.contextmanager
def _changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def run(cfg: Config, stop: StopRequest | None = None, loader: type[Loader] = Loader) -> int:
    """The real loop, to the end, on the process group that is there (or none), which is left as it was."""
    build = parallel.parallelize

    def remember(*args: Any) -> nn.Module:
        LAST_MODEL[:] = [build(*args)]
        return LAST_MODEL[0]

    here = _changed(
        (distributed, "start", lambda *_: None),
        (distributed, "stop", lambda: None),
        (train, "Loader", loader),
        (parallel, "parallelize", remember),
    )
    with here:
        try:
            stop = stop or StopRequest()
            while (code := train.train(cfg, stop)) == rollback.AGAIN:  # as main() does it
                pass
            return code
        finally:
            rundir.release()  # as main() does it


class Tracing(Loader):
    """Remembers which windows this rank was given: `Tracing.seen`, one list a step, until `Tracing.seen` is emptied."""

    seen: list[list[int]] = []  # noqa: RUF012

    def next(self) -> list[tuple[Tensor, ...]]:
        micro_batches = super().next()
        rows = [
            (x[0], x[1])
            for inputs, y, *_ in micro_batches
            for x, y_ in zip(inputs, y, strict=True)
            if (y_ != -100).any()
        ]
        Tracing.seen.append([int(a) + 64 * int(b) for a, b in rows])
        return micro_batches


def acting(at: int, action: Any, only_rank: int | None = None) -> type[Loader]:
    """A loader that calls `action()` when it is asked for the batch of update `at` of this process (the first is 1)."""

    class Acting(Tracing):
        calls = 0

        def next(self) -> list[tuple[Tensor, ...]]:
            self.calls += 1
            if self.calls == at and only_rank in (None, distributed.rank()):
                action()
            return super().next()

    return Acting


def signalling(at: int, number: signal.Signals, only_rank: int | None = None) -> type[Loader]:
    return acting(at, lambda: os.kill(os.getpid(), number), only_rank)


HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


@contextlib.contextmanager
def handlers() -> Iterator[StopRequest]:
    """The product's signal handlers, for a while."""
    before = {number: signal.getsignal(number) for number in HEARD}
    try:
        yield StopRequest().install()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_and_trace(cfg: Config, loader: type[Loader] = Tracing) -> tuple[int, list[list[int]]]:
    """`run` with real signal handlers: the exit code, and the windows that this rank was given, step by step."""
    Tracing.seen = []
    with handlers() as stop:
        code = run(cfg, stop, loader)
    return code, Tracing.seen


def wait_for(
    there: Callable[[], Any], process: subprocess.Popen[Any], seconds: float = 120, pause: float = 0.1
) -> None:
    """Until `there()` is true, while `process` lives."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(pause)


def records(run_dir: Path | str, kind: str = "step", *, timeless: bool = True) -> list[dict[str, Any]]:
    found = [r for r in metrics.read_records(Path(run_dir) / "metrics.jsonl") if r["kind"] == kind]
    return [{k: v for k, v in r.items() if not (timeless and k in TIMES)} for r in found]


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def steps_saved(run_dir: Path) -> list[int]:
    return [step for step, _ in checkpoint.step_directories(run_dir / "checkpoints")]


def weights(run_dir: Path, step: int | None = None, prefix: str = "model.") -> dict[str, Tensor]:
    """Whole tensors of a checkpoint (the newest), read in this process."""
    found = dict(checkpoint.step_directories(run_dir / "checkpoints"))
    opened = checkpoint.open_checkpoint(found[max(found) if step is None else step])
    saved = opened.manifest["tensors"]
    tensors = {n: torch.empty(t["shape"], dtype=checkpoint.DTYPES[t["dtype"]]) for n, t in saved.items()}
    checkpoint.load(opened, tensors)
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """Collective: every parameter whole, on every rank."""
    out = {}
    for name, p in parallel.unwrap(module).named_parameters():
        value = p.detach()
        out[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return out


# ---- models for model.factory


class LSTM(nn.Module):
    """Somebody's own model: embedding, LSTM, head; real weights; a persistent buffer, and one that is not."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(cfg.vocab_size, 12)
        self.lstm = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, cfg.vocab_size)
        self.temperature: Tensor
        self.scratch: Tensor
        self.register_buffer("temperature", torch.rand(()) + 0.5)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        logits = self.head(hidden) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def lstm_per_rank(cfg: Any) -> nn.Module:
    """A factory that forgets the seed: every rank makes other weights."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    return LSTM(cfg)


def lstm(cfg: Any) -> nn.Module:
    return LSTM(cfg)


class Trap(nn.Module):
    """An MLP language model in which a batch that contains SENTINEL does what factory_args.trap says."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.args = cfg.factory_args
        self.layers = nn.ModuleList([nn.Embedding(cfg.vocab_size, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, cfg.vocab_size)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        embedding, hidden = self.layers
        logits = self.head(self.dropout(torch.tanh(hidden(embedding(x))))).float()
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        if not (x == SENTINEL).any():
            return loss
        trap = self.args["trap"]
        if trap == "raise":
            raise ValueError("boom-123")
        if trap == "sleep":
            time.sleep(120)
        return loss * {"nan": float("nan"), "inf": float("inf"), "huge": 1e30, "large": 1e4}.get(trap, 1.0)


def trap(cfg: Any) -> nn.Module:
    if "truncate" in cfg.factory_args and distributed.rank() == 0:  # after the data were opened, before they are read
        os.truncate(*cfg.factory_args["truncate"])
    return Trap(cfg)
