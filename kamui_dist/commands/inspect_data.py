"""`kamui-dist inspect data`: what an update of a run trains on.

  kamui-dist inspect data CONFIG [section.key=value ...] --step S [--rank R --world-size N] [--text]

prints the windows that update S trains on, in the order of the global batch: the position in the run, the source and its epoch,
the window, the file and the byte where it begins, and the documents in it; --text adds what it says. S counts from 1, as in
metrics.jsonl. CONFIG is a config file, or a run directory: its config.toml is read, and if it was resumed with another global
batch, the records of its starts say where update S began. --rank R shows only what that rank reads, and in which micro-batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kamui_dist import config
from kamui_dist.commands.words import take_anywhere
from kamui_dist.errors import UserError
from kamui_dist.plan import Plan, make_plan

if TYPE_CHECKING:  # imported where they are used, so that --help answers at once
    import numpy as np

    from kamui_dist.mixture import TrainingData
    from kamui_dist.stream import TokenStream
    from kamui_dist.tokenizer import Tokenizer


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a config file, or a run directory")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for training")
    take_anywhere(parser, "overrides")
    parser.add_argument("--step", type=int, required=True, metavar="S", help="the update, from 1 on")
    parser.add_argument("--rank", type=int, metavar="R", help="only what this data-parallel rank reads")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: of the run, else 1)")
    parser.add_argument("--text", action="store_true", help="print the text of every window")


def run_data(args: argparse.Namespace) -> int:
    """Prints the windows that an update trains on, in the order of the global batch."""
    from kamui_dist import rollback
    from kamui_dist.sources import open_datasets

    directory = Path(args.config) if Path(args.config).is_dir() else None
    path = Path(args.config) if directory is None else directory / "config.toml"
    cfg, _ = config.load(path, args.overrides)
    if args.step < 1:
        raise UserError(f"--step {args.step}: updates count from 1")
    starts = _starts(directory or Path(cfg.run.dir or ""))
    begun = next((r for r in reversed(starts) if r["step"] < args.step), None)
    ranks = args.world_size or (begun["world_size"] if begun else None) or _fixed(cfg)
    data, _ = open_datasets(cfg)
    gaps = rollback.gaps(rollback.read(directory or Path(cfg.run.dir or "")))
    plan = make_plan(cfg, ranks, data.windows)
    batch = begun["global_batch"] if begun else plan.global_batch
    first = (begun["samples"] + (args.step - 1 - begun["step"]) * batch) if begun else (args.step - 1) * batch
    if args.rank is not None and not 0 <= args.rank < ranks:
        raise UserError(f"--rank {args.rank}: ranks of {ranks} are 0 to {ranks - 1}; give --world-size")
    known = "as recorded" if begun else "as planned"
    if cfg.train.overfit_one_batch:
        first, known = 0, "train.overfit_one_batch: always the first"
    if cfg.train.steps is not None and args.step > cfg.train.steps:
        known += f"; the run ends at {cfg.train.steps}"
    end = first + batch if plan.total_samples is None else min(first + batch, plan.total_samples)
    print(f"update {args.step}: samples {first} to {max(first, end) - 1} of the run, global batch {batch} ({known}), seed"
          f" {cfg.run.seed}")  # fmt: skip
    _print_windows(cfg, data, plan, ranks, batch, first, end, gaps, args)
    return 0


def _starts(run_dir: Path) -> list[dict[str, int]]:
    """The records of a run's starts that say which sample each began at; none of a run that has not begun."""
    from kamui_dist.history import read_records

    found = read_records(run_dir / "metrics.jsonl")
    return [r for r in found if r["kind"] in ("start", "resume") and "samples" in r and "global_batch" in r]


def _fixed(cfg: config.Config) -> int:
    return max(cfg.parallel.replicate, 1) * max(cfg.parallel.shard, 1)


def _print_windows(
    cfg: config.Config, data: TrainingData, plan: Plan, ranks: int, batch: int, first: int, end: int,
    gaps: list[tuple[int, int]], args: argparse.Namespace,
) -> None:  # fmt: skip
    import numpy as np

    from kamui_dist.batches import positions_of, rank_positions

    micro = cfg.train.micro_batch
    if args.rank is None:
        samples = np.arange(first, first + batch, dtype=np.int64)
        labels = [""] * batch
    else:
        if batch % (micro * ranks):
            raise UserError(
                f"the global batch of update {args.step} ({batch}) is no multiple of train.micro_batch x ranks ({micro} x {ranks})"
            )
        accum = batch // (micro * ranks)
        samples = rank_positions(first, micro, accum, args.rank, ranks).reshape(-1)
        labels = [f"rank {args.rank} micro-batch {m} row {b}  " for m in range(accum) for b in range(micro)]
    positions = positions_of(samples, gaps)
    sources, windows = data.place(positions, cfg.run.seed)
    _, local = data.turns.place(positions)
    tokenizers: dict[int, Tokenizer | None] = {}
    for label, sample, source, window, k in zip(
        labels, samples.tolist(), sources.tolist(), windows.tolist(), local.tolist(), strict=True
    ):
        if sample >= end:
            print(f"{label}sample {sample}: padding, beyond train.epochs")
            continue
        stream, T = data.streams[source], cfg.model.context_length
        path, offset = stream.locate(window * T)
        name = f"{data.names[source]} " if data.mixed else ""
        print(f"{label}sample {sample}: {name}epoch {k // data.windows_of[source]} window {window}, {path} byte {offset}, "
              f"tokens {window * T} to {window * T + T}{_documents(stream, window * T, T)}")  # fmt: skip
        if args.text:
            if source not in tokenizers:
                tokenizers[source] = _tokenizer(data, stream)
            print(_text(tokenizers[source], stream.read(np.array([window]), T, cfg.model.vocab_size)[0]))


def _documents(stream: TokenStream, first: int, length: int) -> str:
    """Which documents the inputs of a window are of, if there is an index."""
    if stream.ends is None:
        return ""
    begin, end = stream.ends.rank(first), stream.ends.rank(first + length - 1)
    return f", document {begin}" if begin == end else f", documents {begin} to {end}"


def _tokenizer(data: TrainingData, stream: TokenStream) -> Tokenizer | None:
    from kamui_dist import tokenizer

    path = stream.tokenizer or data.tokenizer
    return None if path is None else tokenizer.load(path)


def _text(tokenizer: Tokenizer | None, ids: np.ndarray) -> str:
    text = " ".join(map(str, ids.tolist())) if tokenizer is None else tokenizer.decode(ids.tolist())
    return "".join(f"    | {line}\n" for line in text.splitlines() or [""]).rstrip("\n")
