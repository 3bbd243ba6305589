"""Tokenizers from other people's files: exactly what transformers and tiktoken make of them, from files made here."""

import base64
import hashlib
import json
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import bpe_files
from kamui_dist.errors import UserError
from kamui_dist.tokenizer import load, train_bpe
from tests.corpora import AUSTEN, fails, run, text_files, texts

# What the patterns disagree on: contractions, digits, line ends, white space before words, marks, other scripts.
TEXT = "I'LL we've  don't\n\n\nx1234567 éa\u0301 日本語 🎉👩\u200d👩 \t end \r\n  ...//\n ǅabc ABCdef <|endoftext|> \u00a0\x00 "
CHUNK = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.text(st.sampled_from("ab'sSt lLvVeE019.\r\n\t /é日"), max_size=20),
    st.sampled_from(("the ", "and", " was", "aaaa", "ingly", "  "), ),
)  # fmt: skip
TEXTS = st.lists(CHUNK, max_size=6).map("".join)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """vocab.bpe and encoder.json in GPT-2's form, and the same as merges.txt and vocab.json."""
    folder = tmp_path_factory.mktemp("gpt2")
    trained = folder / "t.json"
    train_bpe(iter([(AUSTEN / "persuasion.txt").read_text()[:200_000] + TEXT * 3]), 700).save(trained)
    model = json.loads(trained.read_text())["model"]
    # The separator last, as GPT-2 has it.
    vocab = {token: i - 1 for token, i in model["vocab"].items() if i > 0} | {"<|endoftext|>": len(model["vocab"]) - 1}
    merges = "#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in model["merges"])
    trained.unlink()
    for merges_name, vocab_name in (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json")):
        (folder / merges_name).write_text(merges)
        (folder / vocab_name).write_text(json.dumps(vocab))
    return folder


@pytest.fixture(scope="module")
def ranks(pair) -> dict[bytes, int]:
    letters = {letter: byte for byte, letter in enumerate(bpe_files._byte_letters())}
    vocab = json.loads((pair / "encoder.json").read_text())
    return {bytes(letters[c] for c in token): i for token, i in vocab.items() if token != "<|endoftext|>"}


def rank_file(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.fixture(scope="module")
def transformers_gpt2(pair):
    return pytest.importorskip("transformers").GPT2Tokenizer(
        vocab=str(pair / "vocab.json"), merges=str(pair / "merges.txt")
    )


@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_gpt2_is_transformers(pair, transformers_gpt2, text):
    ours = load(pair / "vocab.bpe")
    for words in (text, TEXT):
        plain = words.replace("<|endoftext|>", "")  # which transformers takes for the token, and we do not
        assert ours.encode(plain).tolist() == transformers_gpt2.encode(plain, add_special_tokens=False)
        assert ours.decode(ours.encode(words)) == words


def test_gpt2_by_any_name(pair, tmp_path, capsys):
    first = load(pair / "vocab.bpe")
    assert (first.vocab_size, first.separator) == (700, 699)
    assert first.special_tokens == {"<|endoftext|>": 699}
    assert 699 not in first.encode(TEXT)
    address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("vocab.bpe", "encoder.json"):  # as tiktoken's cache has them
        (tmp_path / hashlib.sha1((address + name).encode()).hexdigest()).write_bytes((pair / name).read_bytes())
    for path in (pair, pair / "encoder.json", pair / "merges.txt", pair / "vocab.json", tmp_path):
        assert load(path).fingerprint == first.fingerprint
    assert pickle.loads(pickle.dumps(first)).encode(TEXT).tolist() == first.encode(TEXT).tolist()
    text_files(tmp_path / "in", {"a.txt": TEXT})
    out = tmp_path / "out"
    assert run("prepare", tmp_path / "in", "--tokenizer", pair, "--val-fraction", 0, "--out", out) == 0
    assert texts(out / "train") == [TEXT]
    assert load(out).fingerprint == first.fingerprint
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "vocab.bpe").write_text("#version: 0.2\na b\n")
    words = ["prepare", tmp_path / "in", "--out", tmp_path / "o", "--tokenizer", tmp_path / "one"]
    assert f"no tokenizer at {tmp_path}/one/encoder.json" in fails(capsys, *words)
    (tmp_path / "one" / "encoder.json").write_text('{"a": 0, "b": 1}')
    assert "vocab.bpe: line 2 ('a b') is no merge" in fails(capsys, *words)
    (tmp_path / "one" / "encoder.json").write_text("[]")
    assert "encoder.json is not an object" in fails(capsys, *words)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# As tiktoken_ext/openai_public.py writes them (possessive), so that ours are compared with the real ones.
PATTERNS = {
    "r50k_base": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k_base": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k_base": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


@pytest.fixture(scope="module", params=PATTERNS)
def both(request, ranks, tmp_path_factory):
    tiktoken = pytest.importorskip("tiktoken")
    theirs = tiktoken.Encoding(
        request.param,
        pat_str=PATTERNS[request.param],
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )
    return theirs, load(rank_file(tmp_path_factory.mktemp("ranks") / f"{request.param}.tiktoken", ranks))


@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_ranks_are_tiktoken(both, text):
    theirs, ours = both
    for words in (text, TEXT):
        assert ours.encode(words).tolist() == theirs.encode_ordinary(words)
        assert ours.decode(ours.encode(words)) == words
    assert (ours.separator, ours.vocab_size) == (theirs.eot_token, theirs.n_vocab)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_ranks_are_tiktoken(tmp_path_factory, data):
    """Vocabularies that no training makes: tokens whose parts are not all tokens, several ways to build one."""
    tiktoken = pytest.importorskip("tiktoken")
    longer = data.draw(st.lists(st.text("ab", min_size=2, max_size=4), max_size=8, unique=True))
    ranks = {bytes([i]): i for i in range(256)} | {token.encode(): 256 + i for i, token in enumerate(longer)}
    theirs = tiktoken.Encoding("x", pat_str=PATTERNS["r50k_base"], mergeable_ranks=ranks, special_tokens={})
    ours = load(rank_file(tmp_path_factory.mktemp("r") / "r50k_base.tiktoken", ranks))
    text = data.draw(st.text("ab ", max_size=14))
    assert ours.encode(text).tolist() == theirs.encode_ordinary(text)


def test_rank_files_that_are_not_known(ranks, tmp_path):
    path = rank_file(tmp_path / "mine.tiktoken", ranks)
    with pytest.raises(UserError, match=r"mine.tiktoken has 699 ranks and is no encoding.*cl100k_base.tiktoken"):
        load(path)
    rank_file(tmp_path / "r50k_base.tiktoken", {t: r for t, r in ranks.items() if t != b"Q"})
    with pytest.raises(UserError, match="damaged: no token for byte 0x51"):
        load(tmp_path / "r50k_base.tiktoken")
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"IQ== 0\noops\n")
    with pytest.raises(UserError, match="line 2 is not a token in base64"):
        load(tmp_path / "r50k_base.tiktoken")
    with pytest.raises(UserError, match=r"several tokenizers \(mine.tiktoken, r50k_base.tiktoken\)"):
        load(tmp_path)


def test_a_whole_published_encoding_is_known_by_its_length(tmp_path):
    """What tiktoken's cache holds has a sha1 for a name."""
    tokens = [bytes([i]) for i in range(256)] + [b"%05d" % i for i in range(50_000)]
    tokenizer = load(
        rank_file(tmp_path / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", {t: i for i, t in enumerate(tokens)})
    )
    assert (tokenizer.vocab_size, tokenizer.separator) == (50_257, 50_256)


def test_sentencepiece(tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((AUSTEN / "emma.txt").read_text().splitlines()[:2000]),
        model_writer=model, vocab_size=500, byte_fallback=True, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    path = tmp_path / "m" / "own.model"
    path.parent.mkdir()
    path.write_bytes(model.getvalue())
    ours, theirs = load(path), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    text = "It is a  truth 日本 </s> acknowledged"
    assert ours.encode(text).tolist() == theirs.encode(text)
    assert ours.separator is not None
    assert ours.decode([*ours.encode(text), ours.separator]) == text
    assert (ours.vocab_size, ours.separator, ours.special_tokens["</s>"]) == (500, theirs.eos_id(), theirs.eos_id())
    assert theirs.eos_id() not in ours.encode(text)
    assert load(path.parent).fingerprint == pickle.loads(pickle.dumps(ours)).fingerprint == ours.fingerprint
    text_files(tmp_path / "in", {"a.txt": text, "b.txt": "more"})
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        words = ["--tokenizer", path, "--val-fraction", 0, "--workers", workers, "--out", out]
        assert run("prepare", tmp_path / "in", *words) == 0
        assert sorted(p.name for p in out.iterdir()) == ["tokenizer.model", "train"]
        assert texts(out / "train") == [text, "more"]
        assert np.fromfile(out / "train" / "00000.bin", "<u2")[-1] == ours.separator
        assert run("prepare", tmp_path / "in", *words) == 0
    path.write_bytes(b"nothing")
    assert "own.model is not a SentencePiece model" in fails(
        capsys, "prepare", tmp_path / "in", "--tokenizer", path, "--out", tmp_path / "x"
    )
