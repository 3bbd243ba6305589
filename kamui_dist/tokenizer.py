"""Text to token ids and back behind one interface: raw bytes, any Hugging Face `tokenizer.json`, what `bpe_files.py`
makes one of (GPT-2's two files, a tiktoken rank file), or a SentencePiece model. Nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kamui_dist import bpe_files
from kamui_dist.errors import UserError

SEPARATOR = "<|endoftext|>"
# A tokenizer.json does not say which token ends a document, so the names in use are tried, in this order.
_SEPARATOR_NAMES = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """What the rest of the project uses of a tokenizer."""

    name: str  # "bytes" or the file's name
    vocab_size: int  # highest id + 1
    separator: int | None  # the end-of-document token; None: the vocabulary has none
    special_tokens: dict[str, int]  # name -> id: what a chat template may write and text may not
    fingerprint: str  # sha256 (hex) of the content: equal fingerprints encode alike

    def encode(self, text: str) -> np.ndarray:
        """uint32 (tokens,). A special token's name inside the text is encoded as text, never as the special id."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores where the tokenizer can."""

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are left out; bytes that are not UTF-8 come out as U+FFFD."""

    def save(self, path: str | Path) -> None:
        """Writes a file that `load` reads back with the same fingerprint. Nothing to write for "bytes": load it by
        name.
        """


class BytesTokenizer:
    """Ids 0 to 255 are the UTF-8 bytes, 256 is the separator."""

    name = "bytes"
    vocab_size = 257
    separator: int | None = 256
    special_tokens: dict[str, int] = {SEPARATOR: 256}  # noqa: RUF012 - never changed
    fingerprint = hashlib.sha256(b"kamui_dist bytes: 256 byte values, separator 256").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, path: str | Path) -> None:
        pass


class JsonTokenizer:
    """A `tokenizer.json`. `content` is the file's text; `name` appears in headers; `where` in errors.

    Raises UserError if the content is not a tokenizer.
    """

    def __init__(self, content: str, name: str, where: str) -> None:
        import tokenizers

        try:
            parsed = json.loads(content)
            inner = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{where} is not a tokenizer.json: {_first_line(error)}") from error
        # A tokenizer.json may carry the truncation of the model that it was made for: text would be lost without a
        # word.
        inner.no_truncation()
        inner.no_padding()
        # Text from the outside must not be able to write a separator.
        inner.encode_special_tokens = True
        vocab = inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"{where} has an empty vocabulary")
        self._inner = inner
        self._content, self._where = content, where
        self.name = name
        added = inner.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in sorted(added.items()) if token.special}
        self.vocab_size = max(vocab.values()) + 1  # ids may have holes, so this is not the number of tokens
        self.separator: int | None = next((vocab[s] for s in _SEPARATOR_NAMES if s in vocab), None)
        # Over the file's own JSON and not the library's re-serialisation, which changes with the library's version.
        canonical = json.dumps(parsed, sort_keys=True, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self._content, encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:  # other processes get the content, whatever became of the file
        return JsonTokenizer, (self._content, self.name, self._where)


class SentencePieceTokenizer:
    """A SentencePiece model. `content` is the file's bytes. Like the model itself it puts a space before each text.

    Raises UserError if the content is no model, or the package is missing.
    """

    name = "tokenizer.model"

    def __init__(self, content: bytes, where: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            hint = "pip install 'kamui-dist[sentencepiece]'"
            raise UserError(f"{where}: a .model file needs the sentencepiece package: {hint}") from None
        try:
            inner = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:
            raise UserError(f"{where} is not a SentencePiece model: {_first_line(error)}") from error
        self._inner, self._content, self._where = inner, content, where
        self.vocab_size = int(inner.get_piece_size())
        self.separator: int | None = inner.eos_id() if inner.eos_id() >= 0 else None
        self.special_tokens = {inner.id_to_piece(i): i for i in range(self.vocab_size) if inner.is_control(i)}
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text), dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode([i for i in map(int, ids) if not self._inner.is_control(i)]))

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self._content)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self._content, self._where)


def load(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer "bytes", or the one in a file or directory: a tokenizer.json, GPT-2's vocab.bpe and encoder.json (or
    merges.txt and vocab.json; either file names both), a .tiktoken rank file, a SentencePiece .model.

    Raises UserError with the absolute path if the file is missing, unreadable or not a tokenizer.
    """
    if str(name_or_path) == "bytes":
        return BytesTokenizer()
    path = Path(name_or_path).expanduser().absolute()
    try:
        if path.is_dir():
            path = _in_directory(path)
        elif path.name == "tokenizer.json" and not path.exists() and path.with_name("tokenizer.model").exists():
            path = path.with_name("tokenizer.model")  # `prepare` keeps its copy of a SentencePiece model there
        data = path.read_bytes()
        pair = bpe_files.pair_of(path)
        if pair is not None:
            return JsonTokenizer(bpe_files.from_merges(*pair), "tokenizer.json", str(path))
        if bpe_files.is_ranks(data):  # tiktoken's own, and what it keeps in its cache under other names
            return JsonTokenizer(bpe_files.from_ranks(path, data), "tokenizer.json", str(path))
        if path.suffix == ".model":
            return SentencePieceTokenizer(data, str(path))
        return JsonTokenizer(data.decode(), path.name, str(path))
    except FileNotFoundError as error:
        missing = error.filename or path
        raise UserError(f"no tokenizer at {missing}; give a tokenizer.json, or the name bytes") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {_first_line(error)}") from error


def _in_directory(directory: Path) -> Path:
    if (directory / "tokenizer.json").exists():
        return directory / "tokenizer.json"
    names = [pair[0] for pair in bpe_files.PAIRS if (directory / pair[0]).exists()]
    found = [directory / names[0]] if names else sorted((*directory.glob("*.tiktoken"), *directory.glob("*.model")))
    if len(found) > 1:
        raise UserError(f"{directory} holds several tokenizers ({', '.join(f.name for f in found)}); name one of them")
    return found[0] if found else directory / "tokenizer.json"


def train_bpe(texts: Iterator[str], vocab_size: int) -> JsonTokenizer:
    """A byte-level BPE (Radford et al. 2019, section 2.2) with `vocab_size` ids: the separator, 256 bytes, merges.

    Every byte is in the alphabet, so any text comes back exactly. The same texts give the same tokenizer. Small texts
    may run out of pairs: then vocab_size is smaller than asked for.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner: Any = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return JsonTokenizer(inner.to_str(pretty=True) + "\n", "tokenizer.json", "the trained tokenizer")


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
