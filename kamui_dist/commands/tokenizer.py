"""Trains a byte-level BPE tokenizer on text (the inputs of `kamui-dist prepare`) and writes it as a tokenizer.json, which
`kamui-dist prepare` and the Hugging Face libraries read. Every text comes back exactly; <|endoftext|> separates
documents. The same text gives the same file.

  kamui-dist tokenizer data/austen --vocab-size 4096 --out data/austen.json
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from kamui_dist.errors import UserError

_SMALLEST = 257  # 256 bytes and the separator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, a directory, or a quoted pattern")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of token ids (default: 4096)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field of a record with its text (default: text)"
    )
    parser.add_argument(
        "--suffix", action="append", default=[], metavar=".EXT", help="take such files as plain text too"
    )
    parser.add_argument("--force", action="store_true", help="replace another tokenizer at --out")


def run(args: argparse.Namespace) -> int:
    """Raises UserError for inputs that cannot be read, a vocabulary that is too small, or a different file at --out."""
    from kamui_dist.prepare import corpus, encode
    from kamui_dist.tokenizer import load, train_bpe

    if not _SMALLEST <= args.vocab_size <= 1 << 24:
        raise UserError(f"--vocab-size {args.vocab_size}: must be {_SMALLEST} (bytes and separator) to {1 << 24}")
    out = Path(args.out).expanduser().absolute()
    if out.is_dir():
        raise UserError(f"--out {out} is a directory; name a file in it: {out / 'tokenizer.json'}")
    start = time.monotonic()
    sources = corpus.find(args.inputs, args.suffix)
    reading = encode.Reading(text_field=args.text_field)

    try:
        if sum(source.bytes for source in sources) == 0:
            raise UserError("the inputs are empty")
        # Read once before the training, since an error inside the library's iterator is wrapped.
        for _ in encode.texts(sources, reading):
            pass
        trained = train_bpe(encode.texts(sources, reading), args.vocab_size)
        if out.exists() and not args.force:
            if load(out).fingerprint != trained.fingerprint:
                raise UserError(f"{out} is another tokenizer; --force replaces it, or choose another --out")
            print(f"already there: {out} ({trained.vocab_size} ids)")
            return 0
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        os.close(handle)
        try:
            trained.save(partial)
            Path(partial).chmod(0o644)
            Path(partial).rename(out)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write or read {error.filename or out}: {error.strerror}") from error
    if trained.vocab_size < args.vocab_size:
        print(f"the text has pairs for {trained.vocab_size} ids only, fewer than --vocab-size {args.vocab_size}")
    print(f"{out}: {trained.vocab_size} ids, {time.monotonic() - start:.1f} s")
    return 0
