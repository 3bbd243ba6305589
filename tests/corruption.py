"""Damages a checkpoint at random places, and counts how often that is seen before anything is loaded.

    python -m tests.corruption                                        a checkpoint of 2 ranks made for it (FSDP, AdamW)
    python -m tests.corruption runs/demo/checkpoints/step-00001000    your own; it is copied first, never touched
        [--flips 200] [--truncations 50] [--seed 0]

Each trial damages one file (every file is as likely, manifest.json too; then every byte of it), asks what a start of training
asks before it loads (`checkpoint.newest`: manifest, names, sizes, SHA-256 of every file), sees it in quarantine, and mends it.
Exit code 0 if all was seen, and the undamaged copy was accepted before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from kamui_dist import checkpoint, distributed
from kamui_dist.errors import UserError
from tests.ranks import run_ranks


def make(root: Path) -> None:
    """On every rank: a small model and its AdamW state, sharded, as root/step-00000001."""
    from tests.test_checkpoint import Model, adamw, shard, train

    model = shard(Model(), "fsdp" if distributed.world_size() > 1 else "plain")
    optimizer = adamw(model)
    train(model, optimizer)
    checkpoint.save(root, 1, checkpoint.training_tensors(model, optimizer), {"step": 1, "losses": [1.0, float("inf")]})


def seen(path: Path) -> bool:
    """Asks as a start does. What is found damaged has been moved to quarantine, and is brought back for the next trial."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return checkpoint.newest(path.parent) is None
    except UserError:  # the only one was damaged: refused to start from zero
        moved = path.parent / "quarantine" / path.name
        (moved / "reason.txt").unlink()
        moved.rename(path)
        moved.parent.rmdir()
        return True


def damage(path: Path, flips: int, truncations: int, seed: int) -> tuple[int, list[str]]:
    """Damages `path` (a copy!) in place and mends it, again and again. Returns how often that was seen, and what was not."""
    generator = random.Random(seed)
    files = sorted(path.iterdir())
    missed = []
    assert not seen(path), f"{path} is damaged before the first trial"
    for trial in range(flips + truncations):
        file = generator.choice(files)
        size = file.stat().st_size
        position = generator.randrange(size)
        with file.open("r+b") as handle:
            if trial < flips:
                handle.seek(position)
                [byte] = handle.read(1)
                handle.seek(position)
                handle.write(bytes([byte ^ generator.randrange(1, 256)]))
            else:
                handle.seek(position)
                tail = handle.read()
                handle.truncate(position)
        if not seen(path):
            missed.append(
                f"{'flip' if trial < flips else 'truncation'} at byte {position} of {file.name} ({size} bytes)"
            )
        with file.open("r+b") as handle:
            handle.seek(position)
            handle.write(bytes([byte]) if trial < flips else tail)
    assert not seen(path), f"{path} was not mended"
    return flips + truncations - len(missed), missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a checkpoint directory, step-<number>")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--truncations", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="kamui-corruption-", dir=os.environ.get("TMPDIR")))
    try:
        if args.checkpoint is None:
            run_ranks(make, 2, scratch)
            path = scratch / "step-00000001"
        else:
            path = Path(shutil.copytree(args.checkpoint, scratch / args.checkpoint.resolve().name))
        count, missed = damage(path, args.flips, args.truncations, args.seed)
        files = sorted(path.iterdir())
        size = sum(file.stat().st_size for file in files)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for line in missed:
        print(f"not seen: {line}")
    print(
        f"{count} of {args.flips + args.truncations} detected before anything was loaded ({args.flips} single-byte flips, "
        f"{args.truncations} truncations, over {len(files)} files of {size:,} bytes, seed {args.seed}, torch {torch.__version__}, "
        f"{time.monotonic() - began:.0f} s)"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
