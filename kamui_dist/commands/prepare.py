"""Turns text files into token shards to train on: OUT/train and OUT/val, and a copy of the tokenizer.

A file is one document; with --split a new document starts at each line in which the pattern is found. A separator token
ends each document. Whether a document is held out for validation depends on its content and --seed only, not on the
order of the files. OUT appears complete or not at all; prepared again from the same text with the same options, nothing
is done.

  kamui-dist prepare data/austen --tokenizer data/austen.json --split '^(CHAPTER|Chapter) ' --out data/austen-bpe
  kamui-dist prepare notes.txt --tokenizer bytes --val-fraction 0 --out data/notes
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kamui_dist import files
from kamui_dist.errors import UserError

if TYPE_CHECKING:
    from kamui_dist.corpus import Source
    from kamui_dist.tokenizer import Tokenizer

_TEMPORARY = ".preparing"
_BATCH_BYTES, _BATCH_TEXTS = 1 << 20, 256  # what is encoded at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="a .txt or .md file, or a directory of them (recursive, sorted)"
    )
    parser.add_argument("--tokenizer", required=True, metavar="bytes|FILE", help="bytes, or a tokenizer.json")
    parser.add_argument("--out", required=True, metavar="DIR", help="the directory to make")
    parser.add_argument(
        "--val-fraction", type=float, default=0.05, help="share of the documents to hold out; 0: none (default: 0.05)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the held-out split (default: 0)")
    parser.add_argument("--split", metavar="REGEX", help="a document starts at each line in which this is found")
    parser.add_argument(
        "--shard-tokens",
        type=_count,
        default="100M",
        metavar="N",
        help="tokens per file, e.g. 500K, 2G (default: 100M)",
    )
    parser.add_argument("--force", action="store_true", help="replace what an earlier prepare wrote to --out")


def run(args: argparse.Namespace) -> int:
    """Raises UserError for whatever the user can mend: inputs, options, an --out that holds something else, a full
    disk.
    """
    from kamui_dist import corpus
    from kamui_dist.tokenizer import load

    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction {args.val_fraction}: must be 0 (no held-out split) or more, and below 1")
    corpus.compile_split(args.split)
    tokenizer = load(args.tokenizer)
    out = Path(args.out).expanduser().resolve()  # a link is followed, so that the rename stays on one file system
    start = time.monotonic()
    try:
        sources = corpus.find(args.inputs)
        if sum(source.bytes for source in sources) == 0:
            raise UserError("the inputs are empty")
        recipe = _recipe(sources, tokenizer, args)
        if os.path.lexists(out) and _already_prepared(out, recipe, args.force):
            print(f"already prepared: {out}")
            return 0
        with _published(out) as directory:
            _write(directory, sources, tokenizer, recipe)
    except OSError as error:
        raise UserError(f"cannot prepare {out}: {error.filename or out}: {error.strerror}") from error
    _summary(out, time.monotonic() - start)
    return 0


def _recipe(sources: list[Source], tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    """All that the output depends on. Two runs with equal recipes write the same bytes."""
    listed = []
    for source in sources:
        with source.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listed.append({"file": source.name, "bytes": source.bytes, "sha256": digest})
    name = "bytes" if tokenizer.name == "bytes" else "tokenizer.json"  # the copy's name, whatever the original's
    return {
        "tokenizer": {"name": name, "fingerprint": tokenizer.fingerprint},
        "seed": args.seed,
        "split": args.split,
        "val_fraction": args.val_fraction,
        "shard_tokens": args.shard_tokens,
        "sources": listed,
    }


def _already_prepared(out: Path, recipe: dict[str, Any], force: bool) -> bool:
    """True if `out` is whole and made by `recipe`; False if it is to be written. Raises UserError if it must stay as it
    is.
    """
    from kamui_dist.shards import TokenDataset

    if not out.is_dir():
        raise UserError(f"--out {out} is a file; choose another --out")
    entries = {entry.name for entry in out.iterdir()}
    if not entries:
        return False
    # --force removes a directory, so it must be one that this command made and that holds nothing else.
    if "train" not in entries or entries - {"train", "val", "tokenizer.json"}:
        raise UserError(f"--out {out} holds other files and not a prepared data set; choose another --out")
    if force:
        return False
    try:
        parts = [TokenDataset(out / part, "--out") for part in ("train", "val") if part in entries]
    except UserError as error:
        raise UserError(f"{error} (--force prepares {out} anew)") from error
    found = {key: parts[0].header.get(key) for key in recipe}
    changed = [key for key in recipe if found[key] != recipe[key]]
    if "val" not in entries and recipe["val_fraction"] > 0:
        changed.append("val")
    if not changed:
        return True
    words = {"sources": "other text", "tokenizer": "another tokenizer", "val": "a val split that is gone"}
    told = [words.get(k) or f"--{k.replace('_', '-')} {found[k]} and not {recipe[k]}" for k in changed]
    raise UserError(f"{out} was prepared with {', '.join(told)}; --force replaces it, or choose another --out")


@contextlib.contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out` that becomes `out` by a rename if the body succeeds, and is removed if not.

    What killed runs left behind is removed first; a live run holds a lock on its own directory.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=_TEMPORARY))
    lock = (temporary / "lock").open("w")
    try:
        _try_lock(lock)
        inner = temporary / "data"
        inner.mkdir()
        yield inner
        if os.path.lexists(out):
            out.rename(temporary / "replaced")
        inner.rename(out)
        files.sync_directory(out.parent)
    finally:
        lock.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    for leftover in out.parent.glob(f".{out.name}.*{_TEMPORARY}"):
        with contextlib.suppress(OSError), (leftover / "lock").open("r+") as lock:
            if _try_lock(lock):
                shutil.rmtree(leftover, ignore_errors=True)


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks: nobody's leftovers are removed then.
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    return True


class _Part:
    """One split in the making."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        from kamui_dist.shard_writer import ShardWriter

        directory.mkdir()
        self.writer = ShardWriter(directory, tokenizer.vocab_size, shard_tokens)
        self.documents = 0
        self.text_bytes = 0


def _write(directory: Path, sources: list[Source], tokenizer: Tokenizer, recipe: dict[str, Any]) -> None:
    """Encodes all documents into directory/train and directory/val; headers last."""
    from kamui_dist import corpus

    split, val_fraction, seed = corpus.compile_split(recipe["split"]), recipe["val_fraction"], recipe["seed"]
    names = ("train", "val") if val_fraction > 0 else ("train",)
    parts = {name: _Part(directory / name, tokenizer, recipe["shard_tokens"]) for name in names}
    separator = [] if tokenizer.separator is None else [tokenizer.separator]
    progress = _Progress(sum(source.bytes for source in sources))
    waiting: list[tuple[_Part, str, bool]] = []  # text to encode, and whether it ends a document
    blank = 0

    def flush() -> None:
        encoded = tokenizer.encode_batch([text for _, text, _ in waiting])
        for (part, text, ends), ids in zip(waiting, encoded, strict=True):
            part.writer.write(ids)
            if ends:
                part.writer.write(_array(separator))
            part.text_bytes += len(text.encode())
        waiting.clear()
        progress.show(sum(p.documents for p in parts.values()), sum(p.writer.tokens for p in parts.values()))

    try:
        with progress:
            waiting_bytes = 0
            for source in sources:
                for document in corpus.documents(source, split, seed):
                    if document.blank:
                        blank += 1
                        continue
                    # A uniform number in [0, 1) from (seed, content): equal documents never stand on both sides.
                    held_out = int.from_bytes(document.digest, "little") < val_fraction * 2.0**64
                    part = parts["val" if held_out else "train"]
                    part.documents += 1
                    read = document.start
                    for text in corpus.pieces(document):
                        size = len(text.encode())
                        read += size
                        waiting.append((part, text, read == document.end))
                        waiting_bytes += size
                        progress.bytes += size
                        if waiting_bytes >= _BATCH_BYTES or len(waiting) >= _BATCH_TEXTS:
                            flush()
                            waiting_bytes = 0
            flush()
        _check_not_empty(parts, recipe)
        if tokenizer.name != "bytes":
            tokenizer.save(directory / "tokenizer.json")
        for name in reversed(names):  # train's header last: it is what makes a directory look prepared
            parts[name].writer.close(
                part=name,
                separator=tokenizer.separator,
                documents=parts[name].documents,
                text_bytes=parts[name].text_bytes,
                blank_documents=blank,
                **recipe,
            )
    except BaseException:
        for part in parts.values():
            part.writer.abandon()
        raise


def _array(ids: list[int]) -> Any:
    import numpy as np

    return np.array(ids, dtype=np.uint32)


def _check_not_empty(parts: dict[str, _Part], recipe: dict[str, Any]) -> None:
    documents = sum(part.documents for part in parts.values())
    if documents == 0:
        raise UserError("the inputs hold nothing but white space")
    for name, part in parts.items():
        if part.documents == 0:
            more = "" if recipe["split"] else " cut the text into documents with --split REGEX,"
            raise UserError(
                f"none of {documents} document{'s' * (documents > 1)} came into the {name} split (--val-fraction"
                f" {recipe['val_fraction']}, --seed {recipe['seed']});{more} choose another --seed or --val-fraction,"
                " or set --val-fraction 0 for no validation split"
            )


class _Progress:
    """A bar on a terminal; else a line each ten seconds. On stderr: stdout carries the result."""

    def __init__(self, total_bytes: int) -> None:
        self.bytes, self.total_bytes = 0, max(total_bytes, 1)
        self._start = self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.percentage:3.0f}% {task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=self.total_bytes)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, documents: int, tokens: int) -> None:
        now = time.monotonic()
        rate = tokens / max(now - self._start, 1e-9)
        text = f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(0, completed=self.bytes, description=text)
        elif now - self._told >= 10:
            self._told = now
            print(f"{100 * self.bytes / self.total_bytes:.0f}% {text}", file=sys.stderr, flush=True)


def _summary(out: Path, seconds: float) -> None:
    from kamui_dist.shards import TokenDataset

    parts = {name: TokenDataset(out / name, "--out") for name in ("train", "val") if (out / name).exists()}
    for name, part in parts.items():
        print(
            f"{name:5} {part.documents:>10,} documents {part.tokens:>15,} tokens {part.text_bytes:>15,} bytes of text,"
            f" {part.text_bytes / part.tokens:.2f} bytes/token"
        )
    blank = parts["train"].header["blank_documents"]
    if blank:
        print(f"left out: {blank:,} document{'s' * (blank > 1)} with nothing but white space")
    if parts["train"].separator is None:
        print("note: this tokenizer has no end-of-document token, so documents follow each other without a separator")
    tokens = sum(part.tokens for part in parts.values())
    rate = tokens / max(seconds, 1e-9)
    print(f"{out}: vocabulary {parts['train'].vocab_size:,}, {seconds:.1f} s ({rate:,.0f} tokens/s)")


def _count(text: str) -> int:
    """A whole number of 1 or more, with K, M or G for thousands, millions, billions."""
    scale = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper())
    try:
        value = int(text) if scale is None else round(float(text[:-1]) * scale)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 1000000 or 100M")
    return value
