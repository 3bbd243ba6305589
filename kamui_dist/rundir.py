"""The run directory: effective config, provenance, status, findings. Rank 0 writes; what goes wrong is agreed by all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from kamui_dist import __version__, checkpoint, config, distributed
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.files import write_json, write_text
from kamui_dist.state import State


def locate(cfg: Config) -> Path:
    """One directory for all ranks, whatever their working directories. Makes nothing. Collective."""
    return Path(distributed.broadcast_object(str(Path(cfg.run.dir or "").absolute())))


def prepare(path: Path) -> None:
    """Makes the run directory, or shows that it can be written. Collective. Raises UserError on every rank alike."""
    with distributed.together():
        if distributed.is_main():
            try:
                (path / "checkpoints").mkdir(parents=True, exist_ok=True)
                probe = path / f".probe-{os.getpid()}"
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(f"run.dir: {path} cannot be written: {error.strerror}") from None


def describe(path: Path, cfg: Config, device: torch.device, fingerprint: str, tokenizer: str) -> None:
    """config.toml, provenance.json and a copy of the tokenizer: what is needed to repeat and to use the run. Rank 0."""
    devices = distributed.gather_objects(
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    if not distributed.is_main():
        return
    write_text(path / "config.toml", config.to_toml(cfg))
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    write_json(path / "provenance.json", {
        "kamui_dist": __version__, "git": git.stdout.strip() or None, "torch": torch.__version__,
        "python": platform.python_version(), "command": [sys.executable, *sys.orig_argv[1:]], "cwd": str(Path.cwd()),
        "host": platform.node(), "world_size": distributed.world_size(), "devices": devices,
        "data_fingerprint": fingerprint, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    })  # fmt: skip
    if Path(tokenizer).is_file():  # else "bytes"
        shutil.copyfile(tokenizer, path / "tokenizer.json")


def write_status(
    path: Path, outcome: str, step: int, reason: str = "", exit_code: int | None = None, requeue: bool = False
) -> None:
    """status.json, which scripts read since torchrun hides exit codes. `requeue`: running the same command again will help."""
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(path / "status.json", {
            "outcome": outcome, "step": step, "reason": reason, "requeue": requeue, "exit_code": exit_code, "pid": os.getpid(),
        })  # fmt: skip


def record_failure(cfg: Config, error: BaseException, exit_code: int) -> None:
    """Outcome "failed", unless there is no run directory: a wrong config makes none, or leaves none."""
    path = Path(cfg.run.dir or "")
    if isinstance(error, UserError):
        with contextlib.suppress(OSError):  # rmdir takes empty directories only: what prepare() has just made
            (path / "checkpoints").rmdir()
            path.rmdir()
    if not path.is_dir():
        return
    try:
        step = json.loads((path / "status.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError):
        step = 0
    reason = (str(error) or type(error).__name__).splitlines()[0]
    write_status(path, "failed", step, reason, exit_code, requeue=not isinstance(error, UserError))


def published(path: Path, cfg: Config, state: State) -> None:
    """After a checkpoint: best.json, retention, status. Rank 0."""
    if not distributed.is_main():
        return
    if state.best_step == state.step:
        write_json(path / "checkpoints" / "best.json", {"step": state.step, "val_loss": state.best_val_loss})
    best = {state.best_step} if cfg.checkpoint.best and state.best_step is not None else set()
    checkpoint.prune(path / "checkpoints", cfg.checkpoint.keep, cfg.checkpoint.keep_every, best)
    write_status(path, "running", state.step)
