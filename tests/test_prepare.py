"""Tokenizers, `kamui-dist tokenizer`, `kamui-dist prepare`: text in, tokens out, complete or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kamui_dist
from kamui_dist.cli import main
from kamui_dist.data import TokenDataset
from kamui_dist.errors import UserError
from kamui_dist.prepare import corpus
from kamui_dist.tokenizer import BytesTokenizer, JsonTokenizer, load, train_bpe
from tests.corpora import AUSTEN, all_bytes, docs, fails, many, run, text_files

SAMPLE = "It is a truth universally acknowledged,\n\n  that a single man -- é 日本 🎉 \t\x00 <|endoftext|> must"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = (AUSTEN / "persuasion.txt").read_text()[:100_000]
    train_bpe(iter([text]), 500).save(path)
    return path


# ---- tokenizers


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back(bpe, text):
    for tokenizer in (load("bytes"), load(bpe)):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32
        assert tokenizer.decode(ids) == text
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size
        assert not (ids == tokenizer.separator).any()


def test_text_cannot_write_a_separator(bpe):
    for tokenizer in (load("bytes"), load(bpe)):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.separator is not None
        assert tokenizer.separator not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.decode([*ids, tokenizer.separator]) == "a<|endoftext|>b"


def test_bytes():
    tokenizer = load("bytes")
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_save_and_load(bpe, tmp_path):
    first = load(bpe)
    first.save(tmp_path / "copy.json")
    second = load(tmp_path / "copy.json")
    assert second.fingerprint == first.fingerprint != BytesTokenizer.fingerprint
    assert second.encode(SAMPLE).tolist() == first.encode(SAMPLE).tolist()
    assert load(bpe.parent).fingerprint == first.fingerprint  # a directory that holds one
    # White space in the file does not matter, its content does.
    content = json.loads(bpe.read_text())
    (tmp_path / "dense.json").write_text(json.dumps(content))
    assert load(tmp_path / "dense.json").fingerprint == first.fingerprint


def test_foreign_tokenizer_json(bpe, tmp_path):
    """Truncation, padding and a post-processor that adds special tokens are in many published files; text must pass
    whole.
    """
    from tokenizers import Tokenizer, models, processors

    inner = Tokenizer.from_file(str(bpe))
    plain = load(bpe).encode(SAMPLE).tolist()
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(tmp_path / "t.json"))
    assert load(tmp_path / "t.json").encode(SAMPLE).tolist() == plain
    # Ids with holes: the vocabulary is up to the highest one.
    holes = JsonTokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 999}, unk_token="a")).to_str(), "t", "t")
    assert (holes.vocab_size, holes.separator) == (1000, None)


def test_missing_and_broken_tokenizers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no tokenizer at {tmp_path}/none.json.*bytes"):
        load("none.json")
    for content in (b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        Path("broken.json").write_bytes(content)
        with pytest.raises(UserError, match=f"{tmp_path}/broken.json") as caught:
            load("broken.json")
        assert "\n" not in str(caught.value)


def test_tokenizer_command(tmp_path, capsys):
    inputs = text_files(tmp_path / "in", {"a.txt": (AUSTEN / "emma.txt").read_text()[:50_000]})
    out = tmp_path / "new" / "tokenizer.json"
    assert run("tokenizer", inputs, "--vocab-size", 400, "--out", out) == 0
    assert re.search(r"400 ids, [\d.]+ s", capsys.readouterr().out)
    content = out.read_bytes()
    assert load(out).vocab_size == 400
    assert run("tokenizer", inputs, "--vocab-size", 400, "--out", out) == 0
    assert "already there" in capsys.readouterr().out
    # Another process, other hash seeds: the same file.
    again = tmp_path / "again.json"
    command = [sys.executable, "-m", "kamui_dist.cli", "tokenizer", inputs, "--vocab-size", "400", "--out", again]
    subprocess.run(command, check=True, timeout=60)
    assert again.read_bytes() == content
    assert "--force" in fails(capsys, "tokenizer", inputs, "--vocab-size", 300, "--out", out)
    assert out.read_bytes() == content
    assert run("tokenizer", inputs, "--vocab-size", 300, "--out", out, "--force") == 0
    assert load(out).vocab_size == 300
    assert "257" in fails(capsys, "tokenizer", inputs, "--vocab-size", 256, "--out", out)
    (inputs / "a.txt").write_bytes(b"abc\xff")
    assert "a.txt is not UTF-8: byte 0xff at offset 3" in fails(capsys, "tokenizer", inputs, "--out", tmp_path / "x")
    (inputs / "a.txt").write_bytes(b"")
    assert "empty" in fails(capsys, "tokenizer", inputs, "--out", tmp_path / "x")
    assert sorted(p.name for p in out.parent.iterdir()) == ["tokenizer.json"]


# ---- prepare: what comes out


def test_documents_separators_and_header(tmp_path, bpe, capsys):  # C11
    texts = {
        "b.txt": "Second.\n",
        "a.md": SAMPLE,
        "sub/c.txt": "Third",
        "d.pdf": "no",
        ".hidden.txt": "no",
        ".git/x.md": "no",
    }
    inputs = text_files(tmp_path / "in", texts)
    out = tmp_path / "out"
    assert run("prepare", inputs, "--tokenizer", bpe, "--val-fraction", 0, "--out", out) == 0
    assert re.search(r"train +3 documents", capsys.readouterr().out)
    assert docs(out / "train") == [SAMPLE, "Second.\n", "Third"]
    assert not (out / "val").exists()
    header = json.loads((out / "train" / "dataset.json").read_text())
    assert header["dtype"] == "uint16"
    assert header["text_bytes"] == sum(len(texts[n].encode()) for n in ("a.md", "b.txt", "sub/c.txt"))
    assert [source["name"] for source in header["sources"]] == ["in/a.md", "in/b.txt", "in/sub/c.txt"]
    assert header["tokenizer"] == {"name": "tokenizer.json", "fingerprint": load(bpe).fingerprint}
    assert (header["seed"], header["split"]) == (0, None)
    assert load(out).fingerprint == load(bpe).fingerprint
    assert run("prepare", inputs, "--tokenizer", "bytes", "--val-fraction", 0, "--out", tmp_path / "raw") == 0
    assert docs(tmp_path / "raw" / "train") == [SAMPLE, "Second.\n", "Third"]
    assert sorted(p.name for p in (tmp_path / "raw").iterdir()) == ["train"]


def test_split_at_headings(tmp_path, capsys):
    text = "Title\r\n\r\nCHAPTER I\r\none\nCHAPTER II\ntwo\nsee CHAPTER I\n\nCHAPTER III"
    inputs = text_files(tmp_path / "in", {"a.txt": text, "b.txt": "\ufeffCHAPTER I\nb", "blank.txt": " \n\n"})
    out = tmp_path / "out"
    options = ["--tokenizer", "bytes", "--val-fraction", 0, "--shard-tokens", 7]
    assert run("prepare", inputs, *options, "--split", "^CHAPTER [IVX]+$", "--out", out) == 0
    assert "left out: 1 document with nothing but white space" in capsys.readouterr().out
    chapters = [
        "Title\r\n\r\n",
        "CHAPTER I\r\none\n",
        "CHAPTER II\ntwo\nsee CHAPTER I\n\n",
        "CHAPTER III",
        "CHAPTER I\nb",
    ]
    assert docs(out / "train") == chapters
    sizes = [shard["tokens"] for shard in json.loads((out / "train" / "dataset.json").read_text())["shards"]]
    assert set(sizes[:-1]) == {7}
    assert "not a regular expression" in fails(capsys, "prepare", inputs, *options, "--split", "(", "--out", out)


def test_austen_has_269_chapters(tmp_path):
    split = corpus.compile_split("^(CHAPTER|Chapter) [0-9IVXL]+$")
    found = [d for source in corpus.find([AUSTEN]) for d in corpus.documents(source, split, 0)]
    assert len(found) == 269 + 6  # and a title page each
    assert sum(d.end - d.start for d in found) == sum(f.stat().st_size for f in AUSTEN.glob("*.txt"))


def test_large_documents_come_in_pieces(tmp_path, monkeypatch):
    for size in (4, 5, 7, 64):
        monkeypatch.setattr(corpus, "PIECE_BYTES", size)
        for text in (SAMPLE, "日本語" * 20, "a\n" * 50, "🎉"):
            text_files(tmp_path, {"a.txt": text})
            (document,) = corpus.documents(corpus.find([tmp_path / "a.txt"])[0], None, 0)
            parts = list(corpus.pieces(document))
            assert "".join(parts) == text
            assert max(len(part.encode()) for part in parts) <= 2 * size + 3
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    text_files(tmp_path / "in", {"a.txt": SAMPLE, "b.txt": "日本語" * 20})
    options = ["--tokenizer", "bytes", "--val-fraction", 0, "--out", tmp_path / "out"]
    assert run("prepare", tmp_path / "in", *options) == 0
    assert docs(tmp_path / "out" / "train") == [SAMPLE, "日本語" * 20]  # one separator each, at the end


def test_held_out_split_depends_on_content_only(tmp_path):
    texts = many(60)
    one = text_files(tmp_path / "one", texts)
    # Other names, other order, other documents around them.
    other = text_files(
        tmp_path / "two", {f"x/{99 - i}.md": text for i, text in enumerate(texts.values())} | {"z.txt": "z"}
    )
    options = ["--tokenizer", "bytes", "--val-fraction", 0.2, "--out"]
    assert run("prepare", one, *options, tmp_path / "a") == 0
    assert run("prepare", other, *options, tmp_path / "b") == 0
    held_out = set(docs(tmp_path / "a" / "val"))
    assert 3 < len(held_out) < 25
    assert set(docs(tmp_path / "b" / "val")) - {"z"} == held_out
    assert set(docs(tmp_path / "a" / "train")) == set(texts.values()) - held_out
    assert run("prepare", one, *options, tmp_path / "c", "--seed", 1) == 0
    assert set(docs(tmp_path / "c" / "val")) != held_out
    train, val = (TokenDataset(tmp_path / "a" / part) for part in ("train", "val"))
    assert train.documents + val.documents == 60
    assert train.fingerprint != val.fingerprint


# ---- prepare: again, otherwise, interrupted


def test_prepared_twice(tmp_path, bpe, capsys):
    inputs = text_files(tmp_path / "in", many(30))
    out = tmp_path / "out"
    command = ["prepare", inputs, "--tokenizer", bpe, "--val-fraction", 0.3, "--out", out]
    assert run(*command) == 0
    before, stamp = all_bytes(out), (out / "train" / "dataset.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run(*command) == 0
    assert capsys.readouterr().out == f"already prepared: {out}\n"
    assert (out / "train" / "dataset.json").stat().st_mtime_ns == stamp
    # The same text at another place is the same text; the output of a fresh run is the same to the byte.
    (tmp_path / "moved").mkdir()
    inputs.rename(tmp_path / "moved" / "in")
    command[1] = tmp_path / "moved" / "in"
    assert run(*command) == 0
    assert run(*command[:-1], tmp_path / "fresh") == 0
    assert all_bytes(tmp_path / "fresh") == before
    # Anything else is refused, and what is there stays.
    assert "--seed 0 and not 1" in fails(capsys, *command, "--seed", 1)
    assert "--split None and not x" in fails(capsys, *command, "--split", "x")
    assert "another tokenizer" in fails(capsys, *command, "--tokenizer", "bytes")
    text_files(command[1], {"new.txt": "new"})
    assert re.search("other text.*--force", fails(capsys, *command))
    assert all_bytes(out) == before
    assert run(*command, "--force") == 0
    assert "new" in docs(out / "train") + docs(out / "val")
    assert run(*command) == 0
    # A damaged one is not "already prepared".
    os.truncate(out / "train" / "00000.bin", 10)
    assert re.search("00000.bin has 10 bytes.*--force", fails(capsys, *command))
    assert run(*command, "--force") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "moved", "out"]


def test_other_peoples_directories_are_never_replaced(tmp_path, capsys):
    inputs = text_files(tmp_path / "in", many(3))
    options = ["--tokenizer", "bytes", "--val-fraction", 0, "--force", "--out"]
    home = text_files(tmp_path / "home", {"precious": "x", "train/y": "y"})
    assert "other files" in fails(capsys, "prepare", inputs, *options, home)
    assert "is a file" in fails(capsys, "prepare", inputs, *options, home / "precious")
    assert all_bytes(home) == {"precious": b"x", "train/y": b"y"}
    (tmp_path / "empty").mkdir()
    assert run("prepare", inputs, *options, tmp_path / "empty") == 0
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert run("prepare", inputs, *options, tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()


@pytest.mark.slow
def test_killed_while_it_writes(tmp_path, capsys):
    inputs, out = text_files(tmp_path / "in", {"a.txt": "some words and a line\n" * 20_000}), tmp_path / "out"
    # SIGSTOP in the middle makes the moment of the kill certain.
    code = """
import os, signal, sys
from kamui_dist.prepare import shard_writer
from kamui_dist.cli import main
write = shard_writer.ShardWriter.write
def slow(self, *args):
    write(self, *args)
    if self.tokens > 200_000:
        os.kill(os.getpid(), signal.SIGSTOP)
shard_writer.ShardWriter.write = slow
main(sys.argv[1:])
"""
    command = ["prepare", str(inputs), "--tokenizer", "bytes", "--val-fraction", "0", "--shard-tokens", "50K"]
    command += ["--split", "^some", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-c", code, *command])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        leftovers = list(tmp_path.glob(".out.*.preparing"))
        assert len(leftovers) == 1
        assert not out.exists()
        # While it lives, its directory is left alone by another run.
        assert run(*command[:-1], tmp_path / "out") == 0
        assert leftovers[0].exists()
    finally:
        process.kill()
        process.wait()
    before = all_bytes(out)
    assert run(*command, "--force") == 0  # the killed run's directory is removed by the next run
    assert all_bytes(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_ctrl_c_leaves_nothing(tmp_path):
    text_files(tmp_path / "in", {"a.txt": "some words and a line\n" * 400_000})
    command = [sys.executable, "-m", "kamui_dist.cli", "prepare", tmp_path / "in", "--tokenizer", "bytes"]
    command += ["--val-fraction", "0", "--split", "^some", "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".out.*.preparing/data/train/*.bin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_disk_full(tmp_path):
    text_files(tmp_path / "in", {"a.txt": "some words and a line\n" * 20_000})
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2); "
    code += "from kamui_dist.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["prepare", tmp_path / "in", "--tokenizer", "bytes", "--val-fraction", "0", "--out", tmp_path / "out"]
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == f"error: cannot prepare {tmp_path}/out: {tmp_path}/out: File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# ---- prepare: bad input


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = text_files(tmp_path / "in", {"a.txt": "é" * 700_000})
    options = ["--tokenizer", "bytes", "--val-fraction", 0, "--out", tmp_path / "out"]
    assert f"no such file or directory: {tmp_path}/none.txt" in fails(capsys, "prepare", "none.txt", *options)
    assert "a.txt is among the inputs twice" in fails(capsys, "prepare", inputs, "in/a.txt", *options)
    text_files(tmp_path / "other", {"x.bin": "x", "y.txt": ""})
    assert "x.bin is of no known kind (.txt, .md, .jsonl" in fails(capsys, "prepare", "other/x.bin", *options)
    assert "the inputs are empty" in fails(capsys, "prepare", "other", *options)
    (tmp_path / "other" / "y.txt").write_text(" \n\t\n")
    assert "nothing but white space" in fails(capsys, "prepare", "other", *options)
    (tmp_path / "other" / "y.txt").unlink()
    assert f".jsonl.zst, .parquet) in {tmp_path}/other" in fails(capsys, "prepare", "other", *options)
    assert "--val-fraction 1.0" in fails(capsys, "prepare", "in", *options, "--val-fraction", 1)
    assert re.search(
        "1 document came into the val split.*--split", fails(capsys, "prepare", "in", *options, "--val-fraction", 0.1)
    )
    assert "no tokenizer at" in fails(capsys, "prepare", "in", *options, "--tokenizer", "none.json")
    # Invalid bytes, within a block, across the border of two blocks, and at the end.
    good = "é".encode()
    for content, offset in (
        (good * 3 + b"\xff" + good, 6),
        (good * 600_000 + b"\xe2\x82" + b"a", 1_200_000),
        (b"x" * ((1 << 20) - 1) + b"\xe2\x82(", (1 << 20) - 1),
        (good * 10 + b"\xc3", 20),
    ):
        Path("in/a.txt").write_bytes(content)
        for split in ([], ["--split", "^x"]):
            assert f"at offset {offset}\n" in fails(capsys, "prepare", "in", *options, *split)
    Path("in/a.txt").write_text("fine")
    Path("file").write_text("")
    assert "cannot prepare" in fails(capsys, "prepare", "in", *options, "--out", "file/out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in", "other"]
    with pytest.raises(SystemExit) as caught:
        run("prepare", "in", *options, "--shard-tokens", "many")
    assert caught.value.code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable(tmp_path, capsys):
    text_files(tmp_path / "in", many(1))
    (tmp_path / "closed").mkdir(mode=0o500)
    command = ["prepare", tmp_path / "in", "--tokenizer", "bytes", "--val-fraction", 0]
    assert "Permission denied" in fails(capsys, *command, "--out", tmp_path / "closed" / "out")


# ---- the entry


def test_entry(capsys):
    for words in (["--version"], ["--help"], ["prepare", "--help"], ["tokenizer", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"kamui-dist {kamui_dist.__version__}" in out
    assert "--val-fraction" in out
    assert main([]) == 2
    for words in (["nothing"], ["prepare"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2


def test_prepare_needs_no_torch(tmp_path):
    text_files(tmp_path / "in", many(2))
    code = "import sys; from kamui_dist.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    command = ["prepare", tmp_path / "in", "--tokenizer", "bytes", "--val-fraction", "0", "--out", tmp_path / "out"]
    subprocess.run([sys.executable, "-c", code, *command], check=True, timeout=60)


def test_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kamui_dist.cli", "prepare", "--help"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert "Traceback" not in result.stderr
