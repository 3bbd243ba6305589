"""Other people's byte-level BPE files as a `tokenizer.json`, so that one fast implementation encodes them all.

GPT-2's pair: `vocab.bpe` (the merges in order) and `encoder.json` (token to id); Hugging Face names the same two
`merges.txt` and `vocab.json`, and tiktoken's cache has them under the sha1 of the address that they came from.
A tiktoken rank file has one line a token, its bytes in base64 and its rank; what text is cut by before, and which
special tokens there are, is not in it, and so is known here for the published ones by name or length.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from kamui_dist.errors import UserError

SEPARATOR = "<|endoftext|>"
# sha1 of https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{vocab.bpe,encoder.json}
_CACHED = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
PAIRS = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"), _CACHED)

# tiktoken_ext/openai_public.py, in the form without possessive quantifiers (the same pieces, in either engine).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class _Encoding(NamedTuple):
    ranks: int  # how many the published file has
    pattern: str | None  # None: GPT-2's, which the library has built in
    special: dict[str, int]


_FILL_IN = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
_ENCODINGS = {
    "r50k_base": _Encoding(50256, None, {SEPARATOR: 50256}),
    "p50k_base": _Encoding(50280, None, {SEPARATOR: 50256}),
    "cl100k_base": _Encoding(100256, _CL100K, {SEPARATOR: 100257, **_FILL_IN}),
    "o200k_base": _Encoding(199998, _O200K, {SEPARATOR: 199999, "<|endofprompt|>": 200018}),
}
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|$)")


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """The merges and the vocabulary, if `path` is one of two such files."""
    for pair in PAIRS:
        if path.name in pair:
            return path.with_name(pair[0]), path.with_name(pair[1])
    return None


def is_ranks(data: bytes) -> bool:
    return _RANK_LINE.match(data) is not None


def from_merges(merges_file: Path, vocab_file: Path) -> str:
    """The tokenizer.json of GPT-2's two files. Raises OSError, and UserError for files that do not belong together."""
    try:
        vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").split("\n")
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{vocab_file} and {merges_file} are not a BPE vocabulary and its merges: {error}") from error
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise UserError(f"{vocab_file} is not an object of token: id")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or any(token not in vocab for token in (*pair, "".join(pair))):
            raise UserError(f"{merges_file}: line {number} ({line!r}) is no merge of two tokens of {vocab_file}")
        merges.append(pair)
    special = {SEPARATOR: vocab[SEPARATOR]} if SEPARATOR in vocab else {}
    return _tokenizer_json(vocab, merges, None, special, ignore_merges=False)


def from_ranks(path: Path, data: bytes) -> str:
    """The tokenizer.json of a tiktoken rank file. Raises UserError for one that is damaged, or of no known encoding."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"{path}: line {number} is not a token in base64 and its rank") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise UserError(
            f"{path} is damaged: {f'no token for byte {missing[0]:#04x}' if missing else 'a rank comes twice'}"
        )
    name = path.name.removesuffix(".tiktoken")
    encoding = next(
        (e for known, e in _ENCODINGS.items() if known == name or (name not in _ENCODINGS and e.ranks == len(ranks))),
        None,
    )
    if encoding is None:
        raise UserError(
            f"{path} has {len(ranks)} ranks and is no encoding that is known here; name it after the one whose pattern it"
            f" uses: {', '.join(f'{known}.tiktoken' for known in _ENCODINGS)}"
        )
    # An encoding of that name in another size (cut down for tests, say) has its separator after the ranks.
    special = encoding.special if encoding.ranks == len(ranks) else {SEPARATOR: max(ranks.values()) + 1}
    letters = _byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # tiktoken joins any two neighbours whose bytes together are a token, that of the lowest rank first: so each way to
    # cut a token in two is a merge.
    merges = []
    for token in sorted(ranks, key=lambda t: ranks[t]):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [[names[le], names[ri]] for le, ri in sorted(cuts, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))]
    vocab = {names[token]: rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    return _tokenizer_json(vocab, merges, encoding.pattern, special, ignore_merges=True)


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte (bytes_to_unicode in openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def _tokenizer_json(
    vocab: dict[str, int], merges: list[list[str]], pattern: str | None, special: dict[str, int], ignore_merges: bool
) -> str:
    # Written out and not serialised by the library, since the fingerprint shall not change with the library's version.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level if pattern is None else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
