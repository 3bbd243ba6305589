"""Turns text into token shards to train on: OUT/train and OUT/val, and a copy of the tokenizer.

A text file is one document; with --split a new document starts at each line in which the pattern is found. A line of a
.jsonl file (also .gz, .zst) or a row of a .parquet file is one document, its text in --text-field; with --supervised it
is an example, a prompt with its completion or a chat, of which only the answers are targets. A separator token ends
each document. Whether a document is held out for validation depends on its content and --seed only. OUT appears
complete or not at all, and is the same to the byte whatever the number of workers; prepared again from the same text
with the same options, nothing is done.

  kamui-dist prepare data/austen --tokenizer data/austen.json --split '^(CHAPTER|Chapter) ' --out data/austen-bpe
  kamui-dist prepare 'crawl/**/*.jsonl.gz' --text-field body.text --dedup --tokenizer gpt2/vocab.bpe --out data/crawl
  kamui-dist prepare chats.jsonl --supervised --tokenizer model/tokenizer.json --out data/chats
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kamui_dist.errors import UserError

if TYPE_CHECKING:
    from kamui_dist.prepare.chat import Template
    from kamui_dist.prepare.corpus import Source
    from kamui_dist.prepare.encode import Reading
    from kamui_dist.tokenizer import Tokenizer

_BYTES_A_WORKER = 4 << 20  # a worker takes half a second to start: less text than this is not worth one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="a file, a directory (recursive, sorted), or a quoted pattern")
    add(
        "--tokenizer",
        required=True,
        metavar="bytes|FILE",
        help="bytes, a tokenizer.json, GPT-2's vocab.bpe, a .tiktoken or SentencePiece .model file, or their directory",
    )
    add("--out", required=True, metavar="DIR", help="the directory to make")
    add(
        "--val-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of the documents to hold out; 0: none (default: 0.05)",
    )
    add("--seed", type=int, default=0, help="of the held-out split (default: 0)")
    add("--split", metavar="REGEX", help="in plain text a document starts at each line in which this is found")
    add(
        "--suffix",
        action="append",
        default=[],
        metavar=".EXT",
        help="take files of this name as plain text too, e.g. .py; may be given several times",
    )
    exclude = "leave out files and directories of this name or path below the input; may be given several times"
    add("--exclude", action="append", default=[], metavar="PATTERN", help=exclude)
    add(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of a record with its text; a.b is field b of field a (default: text)",
    )
    add("--supervised", action="store_true", help="records are examples: prompt and completion, or messages")
    add(
        "--chat-template", metavar="FILE", help="Jinja template for messages (default: the tokenizer's, or a plain one)"
    )
    add("--no-separator", action="store_true", help="no token after each document")
    add(
        "--dedup",
        action="store_true",
        help="of identical documents take the first (about 100 bytes of memory a document)",
    )
    add("--max-documents", type=_count, metavar="N", help="stop after this many documents")
    add(
        "--on-bad-text",
        choices=("error", "replace"),
        default="error",
        help="text that is not UTF-8: name the place and stop, or put U+FFFD there and count (default: error)",
    )
    add("--skip-bad", action="store_true", help="leave out and count records that cannot be used, instead of stopping")
    add("--licence", metavar="NOTE", help="a note on the licence of the text, kept in the headers")
    add(
        "--shard-tokens",
        type=_count,
        default="100M",
        metavar="N",
        help="tokens per file, e.g. 500K, 2G (default: 100M)",
    )
    add(
        "--dtype",
        choices=("auto", "uint16", "uint32"),
        default="auto",
        help="of the ids (default: the narrowest that fits)",
    )
    add("--workers", type=_count, metavar="N", help="processes (default: one a core, fewer for little text)")
    add("--force", action="store_true", help="replace what an earlier prepare wrote to --out")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Raises UserError for whatever the user can mend: inputs, options, an --out that holds something else, a full
    disk.
    """
    from kamui_dist.prepare import corpus, encode
    from kamui_dist.prepare.publish import published
    from kamui_dist.prepare.recipe import already_prepared, make_recipe
    from kamui_dist.tokenizer import load

    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction {args.val_fraction}: must be 0 (no held-out split) or more, and below 1")
    if args.chat_template and not args.supervised:
        raise UserError("--chat-template is for messages: it needs --supervised")
    corpus.compile_split(args.split)
    tokenizer = load(args.tokenizer)
    out = Path(args.out).expanduser().resolve()  # a link is followed, so that the rename stays on one file system
    start = time.monotonic()
    try:
        sources = corpus.find(args.inputs, args.suffix, args.exclude)
        if sum(source.bytes for source in sources) == 0:
            raise UserError("the inputs are empty")
        template = _template(sources, tokenizer, args) if args.supervised else None
        workers = args.workers or _default_workers(sources)
        recipe = make_recipe(sources, tokenizer, template, args, workers)
        if os.path.lexists(out) and already_prepared(out, recipe, args.force):
            print(f"already prepared: {out}")
            return 0
        reading = encode.Reading(
            args.split, args.text_field, args.supervised, args.on_bad_text == "replace", args.skip_bad,
            not args.no_separator, args.seed, args.val_fraction,
        )  # fmt: skip
        with published(out, replace=args.force) as directory:
            _write(directory, sources, tokenizer, reading, template, recipe, workers)
    except OSError as error:
        raise UserError(f"cannot prepare {out}: {error.filename or out}: {error.strerror}") from error
    _summary(out, time.monotonic() - start)
    return 0


def _default_workers(sources: list[Source]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + sum(source.bytes for source in sources) // _BYTES_A_WORKER)


def _template(sources: list[Source], tokenizer: Tokenizer, args: argparse.Namespace) -> Template:
    """The chat template, which is known to compile. Raises UserError if there is a fault in it, or in the inputs."""
    from kamui_dist.prepare import chat, encode

    encode.check_supervised(sources)
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    separator = None if tokenizer.separator is None else names.get(tokenizer.separator)
    template = chat.find_template(args.tokenizer, args.chat_template, separator or "")
    chat.Chat(template, tokenizer.special_tokens)
    return template


def _write(
    directory: Path,
    sources: list[Source],
    tokenizer: Tokenizer,
    reading: Reading,
    template: Template | None,
    recipe: dict[str, Any],
    workers: int,
) -> None:
    """Encodes all documents into directory/train and directory/val; headers last."""
    from kamui_dist.prepare import encode
    from kamui_dist.prepare.assemble import Assembler
    from kamui_dist.prepare.progress import Progress
    from kamui_dist.prepare.recipe import copy_name
    from kamui_dist.prepare.shard_writer import ShardWriter
    from kamui_dist.prepare.workers import ordered_map

    writers = {}
    for name in ("train", "val") if reading.val_fraction > 0 else ("train",):
        (directory / name).mkdir()
        writers[name] = ShardWriter(
            directory / name, tokenizer.vocab_size, recipe["shard_tokens"], reading.supervised, recipe["dtype"]
        )
    encoder = encode.Encoder(tokenizer, reading, writers["train"].dtype, template)
    total = sum(source.bytes for source in sources)
    with Assembler(writers, len(sources), recipe["dedup"], recipe["max_documents"]) as assembler:
        encoded = ordered_map(encoder, encode.units(sources, reading), workers)
        with Progress(total) as progress, contextlib.closing(encoded), _one_core():
            for unit in encoded:
                assembler.add(unit)
                progress.show(unit.read, assembler.documents, assembler.tokens)
                if assembler.full:
                    break
        assembler.check_not_empty(recipe)
        if tokenizer.name != "bytes":
            tokenizer.save(directory / copy_name(tokenizer))
        assembler.close(recipe)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """--workers says how many cores: the tokenizer in this process takes one too."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _summary(out: Path, seconds: float) -> None:
    from kamui_dist.shards import TokenDataset

    parts = {name: TokenDataset(out / name, "--out") for name in ("train", "val") if (out / name).exists()}
    for name, part in parts.items():
        masked = f" ({part.header['target_tokens']:,} targets)" if part.header.get("loss_mask") else ""
        print(
            f"{name:5} {part.documents:>10,} documents {part.tokens:>15,} tokens{masked} {part.text_bytes:>15,} bytes of"
            f" text, {part.text_bytes / part.tokens:.2f} bytes/token"
        )
    header = parts["train"].header
    words = {
        "empty": "document{s} with nothing but white space",
        "bad_records": "bad record{s}",
        "no_target": "example{s} without a target",
        "duplicates": "duplicate{s}",
    }
    told = [f"{n:,} {words[why].format(s='s' * (n > 1))}" for why, n in header["skipped"].items() if n and why in words]
    if told:
        print(f"left out: {', '.join(told)}")
    if replaced := header["skipped"]["replaced_characters"]:
        print(f"replaced: {replaced:,} place{'s' * (replaced > 1)} that were not UTF-8, by U+FFFD")
    if parts["train"].separator is None:
        print("note: documents follow each other without a separator token")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more, such as 1000000 or 100M")
    return value
