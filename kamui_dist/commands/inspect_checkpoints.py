"""`kamui-dist inspect checkpoints | pin | unpin`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError

EXIT_DAMAGED = 1


def add_checkpoints_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, for example runs/demo")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare it with the manifest")


def run_checkpoints(args: argparse.Namespace) -> int:
    """Lists a run's checkpoints, newest last. State is `complete` (manifest, names and sizes are right), with --verify
    `verified` (every byte was read and its SHA-256 compared), or what is wrong. Exit code 1 if a checkpoint is damaged;
    those in quarantine are listed, and do not count: training has moved them aside and gone on without them."""
    from kamui_dist import retention
    from kamui_dist.history import read_records
    from kamui_dist.manifest import step_directories

    directory = _checkpoints(args.run)
    losses = {r["step"]: r.get("val_loss") for r in read_records(directory.parent / "metrics.jsonl") if _deciding(r)}
    best, began, read, damaged = retention.best_step(directory), time.monotonic(), 0, 0
    rows = [("step", "tokens", "val loss", "size", "saved by", "state")]
    for step, path in step_directories(directory):
        checkpoint, fault = look_at(path, args.verify)
        if fault is not None and not path.exists():
            continue  # the run has deleted it meanwhile
        size = retention.directory_bytes(path)
        read += size
        damaged += fault is not None
        state = checkpoint.state if checkpoint else {}
        loss = losses.get(step)
        rows.append((
            str(step), f"{state['state']['tokens']:,}" if state else "?", "" if loss is None else f"{loss:.4f}",
            retention.mebibytes(size), f"{state['strategy']}, {state['world_size']} process(es)" if state else "?",
            ", ".join([fault or ("verified" if args.verify else "complete"), *_strange(checkpoint),
                       *(["best"] if step == best else []), *(["pinned"] if retention.pin_file(path).exists() else [])]),
        ))  # fmt: skip
    for path in sorted((directory / "quarantine").glob("*")):
        reason = path / "reason.txt"
        text = reason.read_text(encoding="utf-8", errors="replace").strip() if reason.is_file() else "no reason.txt"
        name, size = path.name.removeprefix("step-").lstrip("0"), retention.directory_bytes(path)
        rows.append((name, "", "", retention.mebibytes(size), "", f"in quarantine: {text}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [
            cell.ljust(w) if i == 4 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        print("  ".join([*cells, row[5]]))
    if len(rows) == 1:
        print(f"{directory} holds no checkpoint")
    for path in sorted(directory.glob(".tmp-step-*")):
        print(f"{path.name}: being written now, or left by a run that was killed (the next start removes it)")
    if args.verify:
        seconds = time.monotonic() - began
        print(f"read {retention.mebibytes(read)} in {seconds:.1f} s; {damaged or 'nothing'} damaged")
    return EXIT_DAMAGED if damaged else 0


def look_at(path: Path, verify: bool) -> tuple[Any, str | None]:
    """The checkpoint if its manifest can be read, and what is wrong with it, if anything is."""
    from kamui_dist.manifest import CheckpointError, check_files, check_sizes, open_checkpoint

    checkpoint = None
    try:
        checkpoint = open_checkpoint(path)
        check_sizes(checkpoint)
        if verify:
            check_files(path, checkpoint.manifest["files"])
    except CheckpointError as error:
        return checkpoint, f"DAMAGED: {str(error).replace(f'{path}/', '')}"
    except OSError as error:
        return checkpoint, f"UNREADABLE: {error.strerror}"
    return checkpoint, None


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("step", metavar="STEP", type=int, help="as `inspect checkpoints` shows it")


def run_pin(args: argparse.Namespace) -> int:
    """Keeps one checkpoint for ever, whatever checkpoint.keep says; also while the run goes on. It makes a file
    checkpoints/step-<STEP>.pinned beside the checkpoint."""
    from kamui_dist.retention import pin_file

    path = _step(args.run, args.step)
    pin_file(path).touch(mode=0o644)
    if not path.is_dir():  # deleted between the look and the pin
        pin_file(path).unlink(missing_ok=True)
        raise UserError(f"{path} has just been deleted")
    _, fault = look_at(path, verify=False)
    print(f"pinned: {path}" + (f" ({fault})" if fault else ""))
    return 0


add_unpin_arguments = add_pin_arguments


def run_unpin(args: argparse.Namespace) -> int:
    """Undoes pin: the checkpoint is kept or deleted as checkpoint.keep and the like say, at the next save."""
    from kamui_dist.retention import pin_file

    path = _checkpoints(args.run) / f"step-{args.step:08d}"
    if not pin_file(path).exists():
        raise UserError(f"step {args.step} of {args.run} is not pinned")
    pin_file(path).unlink(missing_ok=True)
    print(f"unpinned: {path}")
    return 0


def _checkpoints(run: str) -> Path:
    path = Path(run).expanduser().absolute()
    directory = path if path.name == "checkpoints" else path / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give a run directory, for example runs/demo")
    return directory


def _step(run: str, step: int) -> Path:
    from kamui_dist.manifest import step_directories

    found = dict(step_directories(_checkpoints(run)))
    if step not in found:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, found)) or 'none'}")
    return found[step]


def _strange(checkpoint: Any) -> list[str]:
    from kamui_dist.manifest import strangers

    names = strangers(checkpoint) if checkpoint else []
    return [f"beside its own files {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"] if names else []


def _deciding(record: dict[str, Any]) -> bool:
    """An evaluation's record of the set that decides which step is best."""
    return record["kind"] == "eval" and "best" in record
