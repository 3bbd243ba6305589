"""What a prepared directory was made of: how `kamui-dist prepare` knows its own work again. No torch."""

from __future__ import annotations

import argparse
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kamui_dist.errors import UserError
from kamui_dist.prepare.chat import Template
from kamui_dist.prepare.corpus import Source
from kamui_dist.prepare.shard_writer import dtype_name
from kamui_dist.shards import TokenDataset
from kamui_dist.tokenizer import Tokenizer


def make_recipe(
    sources: list[Source], tokenizer: Tokenizer, template: Template | None, options: argparse.Namespace, workers: int
) -> dict[str, Any]:
    """All that the output depends on: what goes into the headers. Two runs with equal recipes write the same bytes.

    options: of the command. workers: threads to read the sources with. Raises OSError, and UserError for a dtype that is
    too narrow for the vocabulary.
    """
    dtype = dtype_name(tokenizer.vocab_size, options.dtype)

    def digest(source: Source) -> str:
        with source.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(workers) as pool:  # hashing lets other threads run
        digests = list(pool.map(digest, sources))
    return {
        "tokenizer": {"name": copy_name(tokenizer), "fingerprint": tokenizer.fingerprint},
        "separator": None if options.no_separator else tokenizer.separator,
        "dtype": dtype,
        "seed": options.seed,
        "split": options.split,
        "val_fraction": options.val_fraction,
        "shard_tokens": options.shard_tokens,
        "text_field": options.text_field,
        "supervised": options.supervised,
        "chat_template": template.source if template is not None else None,
        "dedup": options.dedup,
        "max_documents": options.max_documents,
        "on_bad_text": options.on_bad_text,
        "skip_bad": options.skip_bad,
        "licence": options.licence,
        "sources": [
            {"name": source.name, "bytes": source.bytes, "sha256": sha256}
            for source, sha256 in zip(sources, digests, strict=True)
        ],
    }


def copy_name(tokenizer: Tokenizer) -> str:
    """Of the tokenizer's copy in the output, whatever the original's name."""
    return tokenizer.name if tokenizer.name in ("bytes", "tokenizer.model") else "tokenizer.json"


def already_prepared(out: Path, recipe: dict[str, Any], force: bool) -> bool:
    """True if `out` is whole and made by `recipe`; False if it is to be written. Raises UserError if it must stay as it
    is.
    """
    if not out.is_dir():
        raise UserError(f"--out {out} is a file; choose another --out")
    entries = {entry.name for entry in out.iterdir()}
    if not entries:
        return False
    # --force removes a directory, so it must be one that this command made and that holds nothing else.
    if "train" not in entries or entries - {"train", "val", "tokenizer.json", "tokenizer.model"}:
        raise UserError(f"--out {out} holds other files and not a prepared data set; choose another --out")
    if force:
        return False
    try:
        parts = [TokenDataset(out / part, "--out") for part in ("train", "val") if part in entries]
    except UserError as error:
        raise UserError(f"{error} (--force prepares {out} anew)") from error
    header = parts[0].header
    if "skipped" not in header:
        raise UserError(f"{out} was prepared by an older version of this program; --force replaces it")
    found = {key: header.get(key) for key in recipe}
    keys = ("name", "bytes", "sha256")
    found["sources"] = [{key: source.get(key) for key in keys} for source in header["sources"]]
    changed = [key for key in recipe if found[key] != recipe[key]]
    if "val" not in entries and recipe["val_fraction"] > 0:
        changed.append("val")
    if not changed:
        return True
    words = {
        "sources": "other text",
        "tokenizer": "another tokenizer",
        "separator": "another separator (--no-separator)",
        "chat_template": "another chat template",
        "val": "a val split that is gone",
    }
    told = [words.get(k) or f"--{k.replace('_', '-')} {found[k]} and not {recipe[k]}" for k in changed]
    raise UserError(f"{out} was prepared with {', '.join(told)}; --force replaces it, or choose another --out")
