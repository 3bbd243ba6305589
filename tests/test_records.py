"""`kamui-dist prepare` on JSON lines and parquet, in parallel: the same documents by every way, and every bad line."""

import codecs
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist.errors import UserError
from kamui_dist.prepare import corpus, encode, records
from kamui_dist.prepare.assemble import Assembler
from kamui_dist.prepare.encode import Encoder, Reading
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.prepare.workers import ordered_map
from kamui_dist.tokenizer import BytesTokenizer, train_bpe
from tests import tiny
from tests.corpora import (
    AUSTEN,
    all_bytes,
    docs,
    ends,
    fails,
    header,
    jsonl,
    many,
    run,
    square,
    stream,
    text_files,
    texts,
)

ALL = ["--tokenizer", "bytes", "--val-fraction", 0]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter([(AUSTEN / "persuasion.txt").read_text()[:100_000]]), 500).save(path)
    return path


# ---- the same documents from every kind of file


def test_kinds_of_files(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.chdir(tmp_path)
    contents = ["first\n", "é 日本 🎉 \u2028 <|endoftext|>", 'with "quotes"\t\n\nand lines', "x" * 5000]
    rows = [{"doc": {"body": text, "n": i}, "a.b": text} for i, text in enumerate(contents)]
    plain = jsonl(tmp_path / "k" / "plain.jsonl", rows)
    data = plain.read_bytes()
    (tmp_path / "k" / "z.jsonl.gz").write_bytes(gzip.compress(data[:300]) + gzip.compress(data[300:]))  # two members
    packed = zstandard.ZstdCompressor().compress(data[:500]) + zstandard.ZstdCompressor().compress(data[500:])
    (tmp_path / "k" / "z.jsonl.zst").write_bytes(packed)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "k" / "p.parquet", row_group_size=2)
    (tmp_path / "k" / "bom.jsonl").write_bytes(codecs.BOM_UTF8 + data.replace(b"\n", b"\r\n\r\n").rstrip())
    text_files(tmp_path / "txt", {f"{i}.txt": text for i, text in enumerate(contents)})
    assert run("prepare", "txt", *ALL, "--out", "t") == 0
    for name in ("plain.jsonl", "z.jsonl.gz", "z.jsonl.zst", "p.parquet", "bom.jsonl"):
        for field in ("doc.body", "a.b"):
            out = tmp_path / f"{name}-{field}"
            assert run("prepare", f"k/{name}", *ALL, "--text-field", field, "--out", out) == 0
            assert docs(out / "train") == texts(out / "train") == contents
            assert (stream(out / "train") == stream(tmp_path / "t" / "train")).all()
    # All of them, by a directory and by patterns; the header tells what came from where.
    assert run("prepare", "k", *ALL, "--text-field", "a.b", "--out", "d") == 0
    assert run("prepare", "k/*.jsonl*", "./**/p.parquet", *ALL, "--text-field", "a.b", "--out", "g") == 0
    assert sorted(docs(tmp_path / "d" / "train")) == sorted(docs(tmp_path / "g" / "train")) == sorted(contents * 5)
    sources = header(tmp_path / "g" / "train")["sources"]
    names = ["k/bom.jsonl", "k/plain.jsonl", "k/z.jsonl.gz", "k/z.jsonl.zst", f"{tmp_path.name}/k/p.parquet"]
    assert [source["name"] for source in sources] == names
    size = sum(len(text.encode()) + 1 for text in contents)
    assert [(source["documents"], source["tokens"]) for source in sources] == [(4, size)] * 5


def test_patterns_suffixes_and_exclusion(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_files(tmp_path / "in", {"a.py": "a", "sub/b.PY": "b", "sub/c.txt": "c", "skip/d.py": "d", ".x/e.py": "e"})
    assert run("prepare", "in", *ALL, "--suffix", "py", "--exclude", "skip", "--out", "o") == 0
    assert docs(tmp_path / "o" / "train") == ["a", "b", "c"]
    assert run("prepare", "in/**/*", *ALL, "--suffix", ".py", "--exclude", "sub/*.txt", "--out", "p") == 0
    assert docs(tmp_path / "p" / "train") == ["a", "d", "b"]
    assert "no file of a known kind" in fails(capsys, "prepare", "in/*.rs", *ALL, "--out", "q")
    assert "--suffix" in fails(capsys, "prepare", "in/a.py", *ALL, "--out", "q")
    Path("odd[1].txt").write_text("a name with brackets is a name first")
    assert run("prepare", "odd[1].txt", *ALL, "--out", "r") == 0


def test_missing_packages_are_named(tmp_path, capsys, monkeypatch):
    for package in ("pyarrow", "zstandard", "sentencepiece"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, extra in (("a.jsonl.zst", "zst"), ("a.parquet", "parquet"), ("t.model", "sentencepiece")):
        (tmp_path / name).write_bytes(b"x")
        inputs = tmp_path / ("a.jsonl.zst" if extra == "sentencepiece" else name)
        tokenizer = tmp_path / name if extra == "sentencepiece" else "bytes"
        words = fails(capsys, "prepare", inputs, "--tokenizer", tokenizer, "--out", tmp_path / "o")
        assert f"pip install 'kamui-dist[{extra}]'" in words


# ---- what does not depend on how it is done


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=12),
    block=st.integers(1, 40),
    end=st.sampled_from([b"", b"\n", b"\n\n"]),
)
def test_lines_are_whole_in_any_block(tmp_path_factory, lines, block, end):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(json.dumps({"text": line}, ensure_ascii=False).encode() for line in lines) + end)
    source = corpus.find([path])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK_BYTES", block)
        found = list(records.blocks(source, []))
    assert b"".join(b.lines or b"" for b in found) == path.read_bytes()
    parsed = [(where, value) for b in found for where, value, _ in records.parse(b, "strict")]
    assert [value for _, value in parsed] == [{"text": line} for line in lines]
    assert [where for where, _ in parsed] == [f"{path}: line {i}" for i in range(1, len(lines) + 1)]


def assembled(directory: Path, sources, reading, function=None, **options) -> dict[str, bytes]:
    directory.mkdir()
    writers = {}
    for name in ("train", "val"):
        (directory / name).mkdir()
        writers[name] = ShardWriter(directory / name, 257, 100)
    encoder = Encoder(BytesTokenizer(), reading, "uint16")
    with Assembler(writers, len(sources), **options) as assembler:
        for encoded in map(encoder, encode.units(sources, reading)):
            assembler.add(encoded)
            if assembler.full:
                break
        assembler.close(
            {"sources": [{} for _ in sources], "separator": 256, "tokenizer": {"name": "bytes", "fingerprint": ""}}
        )
    return all_bytes(directory)


@settings(deadline=None, max_examples=40)
@given(
    files=st.lists(st.lists(st.text(st.sampled_from("ab\né日 "), max_size=30), max_size=8), min_size=1, max_size=4),
    unit=st.integers(1, 60),
    count=st.integers(1, 9),
    piece=st.integers(4, 9),
    dedup=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 12)),
)
def test_units_do_not_show_in_the_output(tmp_path_factory, files, unit, count, piece, dedup, limit):
    """Against an obvious reference: one document after the other, in one list."""
    folder = tmp_path_factory.mktemp("units")
    for i, contents in enumerate(files):
        if i % 2:
            jsonl(folder / "in" / f"{i}.jsonl", [{"text": text} for text in contents])
        else:
            text_files(folder / "in", {f"{i}-{j}.txt": text for j, text in enumerate(contents)} or {f"{i}.txt": ""})
    sources = corpus.find([folder / "in"])
    reading = Reading(val_fraction=0.4, seed=3)
    expected: dict[str, list[str]] = {"train": [], "val": []}
    seen: set[str] = set()
    for contents in files:
        for text in contents:
            if not text.strip() or (dedup and text in seen) or sum(map(len, expected.values())) == limit:
                continue
            seen.add(text)
            digests = corpus.Digests(3)
            digests.update(text.encode())
            expected["val" if int.from_bytes(digests.draw(), "little") / 2**64 < 0.4 else "train"].append(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", piece)
        patch.setattr(encode, "PIECE_BYTES", piece)
        whole = assembled(folder / "whole", sources, reading, dedup=dedup, max_documents=limit)
        patch.setattr(encode, "_UNIT_BYTES", unit)
        patch.setattr(encode, "_UNIT_TEXTS", count)
        patch.setattr(records, "BLOCK_BYTES", unit)
        assert assembled(folder / "parts", sources, reading, dedup=dedup, max_documents=limit) == whole
    for name, held in expected.items():
        part = folder / "parts" / name
        ids = b"".join(np.frombuffer(data, "<u2").tobytes() for file, data in whole.items() if f"{name}/0" in file)
        tokens = [t for text in held for t in (*text.encode(), 256)]
        assert np.frombuffer(ids, "<u2").tolist() == tokens
        if held:
            assert ends(part) == np.cumsum([len(text.encode()) + 1 for text in held]).tolist()


def test_any_number_of_workers_writes_the_same(tmp_path, bpe, monkeypatch):
    texts_ = many(40) | {"big.txt": (AUSTEN / "emma.txt").read_text()[:150_000]}
    text_files(tmp_path / "in", texts_)
    jsonl(tmp_path / "in" / "l.jsonl", [{"text": f"line {i % 700} " * 9} for i in range(3000)])
    monkeypatch.setattr(encode, "_UNIT_BYTES", 20_000)
    monkeypatch.setattr(records, "BLOCK_BYTES", 20_000)
    command = ["prepare", tmp_path / "in", "--tokenizer", bpe, "--dedup", "--split", "^CHAPTER", "--shard-tokens", "9K"]
    outputs = []
    for workers in (1, 2, 3):
        assert run(*command, "--workers", workers, "--out", tmp_path / f"{workers}") == 0
        outputs.append(all_bytes(tmp_path / f"{workers}"))
    assert outputs[0] == outputs[1] == outputs[2]
    assert header(tmp_path / "1" / "train")["skipped"]["duplicates"] == 2300
    assert len(outputs[0]) > 10


# ---- options


def test_dedup_limit_and_licence(tmp_path, capsys):
    same = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i % 5}"} for i in range(20)])
    copy = text_files(tmp_path, {"b.txt": "document 3"}) / "b.txt"  # equal across kinds of files
    command = ["prepare", same, copy, *ALL, "--dedup", "--licence", "CC0", "--out"]
    assert run(*command, tmp_path / "o") == 0
    assert docs(tmp_path / "o" / "train") == [f"document {i}" for i in range(5)]
    found = header(tmp_path / "o" / "train")
    assert (found["skipped"]["duplicates"], found["licence"], found["version"] > 0) == (16, "CC0", True)
    assert "left out: 16 duplicates" in capsys.readouterr().out
    assert run(*command, tmp_path / "p", "--max-documents", 3) == 0
    assert docs(tmp_path / "p" / "train") == [f"document {i}" for i in range(3)]
    assert "--max-documents 3 and not None" in fails(capsys, *command, tmp_path / "p")


def test_no_separator_is_recorded(tmp_path, capsys):  # C11
    text_files(tmp_path / "in", {"a.txt": "one", "b.txt": "two!"})
    assert run("prepare", tmp_path / "in", *ALL, "--no-separator", "--out", tmp_path / "o") == 0
    assert "without a separator" in capsys.readouterr().out
    assert header(tmp_path / "o" / "train")["separator"] is None
    assert bytes(stream(tmp_path / "o" / "train").tolist()) == b"onetwo!"
    assert ends(tmp_path / "o" / "train") == [3, 7]
    assert "another separator" in fails(capsys, "prepare", tmp_path / "in", *ALL, "--out", tmp_path / "o")


def test_dtype_never_cuts_an_id(tmp_path, capsys):  # C01
    from tokenizers import Tokenizer, models, pre_tokenizers

    for size in (65_536, 70_000):
        vocab = {f"w{i}": i for i in range(size)}
        inner = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.save(str(tmp_path / f"{size}.json"))
    text_files(tmp_path / "in", {"a.txt": "w1 w65534 w65535 w65536 w69999"})
    command = ["prepare", tmp_path / "in", "--val-fraction", 0]
    for size, dtype, wanted in ((65_536, "uint16", "auto"), (65_536, "uint32", "uint32"), (70_000, "uint32", "auto")):
        out = tmp_path / f"{size}-{wanted}"
        assert run(*command, "--tokenizer", tmp_path / f"{size}.json", "--dtype", wanted, "--out", out) == 0
        assert header(out / "train")["dtype"] == dtype
        high = [65536, 69999] if size == 70_000 else [0, 0]
        assert stream(out / "train").tolist() == [1, 65534, 65535, *high]
    words = ["--tokenizer", tmp_path / "70000.json", "--dtype", "uint16", "--out", tmp_path / "x"]
    assert "70000 ids does not fit uint16" in fails(capsys, *command, *words)
    assert not (tmp_path / "x").exists()


# ---- bad input: one line, exit code 2, nothing left


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json", "line 3 is not JSON: Expecting property name"),
        (b'{"text": "cut of', "line 3 is not JSON: Unterminated string"),
        (b"[" * 100_000, "line 3 is not JSON: "),
        (b'["a list"]', "line 3 is not a JSON object"),
        (b'{"body": "x"}', "line 3 has no field 'text'; it has body"),
        (b'{"text": null}', "line 3: the field 'text' is not text but null"),
        (b'{"text": {"text": "x"}}', "line 3: the field 'text' is not text but dict"),
    ],
)
def test_bad_records(tmp_path, capsys, line, says):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n{"text": " "}\n')
    told = fails(capsys, "prepare", path, *ALL, "--out", tmp_path / "o")
    assert f"{path}: {says}" in told
    assert "--skip-bad" in told
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert run("prepare", path, *ALL, "--skip-bad", "--out", tmp_path / "o") == 0
    assert "left out: 1 document with nothing but white space, 1 bad record\n" in capsys.readouterr().out
    assert docs(tmp_path / "o" / "train") == ["one", "two"]
    skipped = header(tmp_path / "o" / "train")["skipped"]
    assert (skipped["bad_records"], skipped["empty"]) == (1, 1)
    path.write_bytes(line + b"\n")
    assert "no record can be used: 1" in fails(capsys, "prepare", path, *ALL, "--skip-bad", "--out", tmp_path / "p")


def test_bad_text(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xc3\xa9"}\n{"text": "ab\xffc\xe2\x82"}\n')
    text = text_files(tmp_path, {"b.txt": ""}) / "b.txt"
    text.write_bytes(b"ab\xffc\xe2\x82")
    assert f"{path}: line 2 is not UTF-8: byte 0xff at offset 27\n" in fails(
        capsys, "prepare", path, *ALL, "--out", tmp_path / "o"
    )
    assert f"{text} is not UTF-8: byte 0xff at offset 2\n" in fails(
        capsys, "prepare", text, *ALL, "--out", tmp_path / "o"
    )
    assert run("prepare", path, text, *ALL, "--on-bad-text", "replace", "--out", tmp_path / "o") == 0
    assert "replaced: 4 places that were not UTF-8" in capsys.readouterr().out
    assert docs(tmp_path / "o" / "train") == ["é", "ab\ufffdc\ufffd", "ab\ufffdc\ufffd"]
    assert header(tmp_path / "o" / "train")["skipped"]["replaced_characters"] == 4
    # Equal after replacing is equal.
    assert run("prepare", path, text, *ALL, "--on-bad-text", "replace", "--dedup", "--out", tmp_path / "p") == 0
    assert docs(tmp_path / "p" / "train") == ["é", "ab\ufffdc\ufffd"]
    # A JSON escape can write half of a character, which no file can hold.
    path.write_bytes(b'{"text": "ok"}\n{"text": "a\\ud83d b \\ud83c\\udf89"}\n')
    told = fails(capsys, "prepare", path, *ALL, "--out", tmp_path / "q")
    assert f"{path}: line 2: the text has half a character, U+D83D, at its character 1" in told
    assert run("prepare", path, *ALL, "--on-bad-text", "replace", "--out", tmp_path / "q") == 0
    assert docs(tmp_path / "q" / "train") == ["ok", "a\ufffd b 🎉"]


@settings(deadline=None, max_examples=80)
@given(data=st.binary(max_size=60), piece=st.integers(4, 12), block=st.integers(1, 9))
def test_replacing_is_pythons(tmp_path_factory, data, piece, block):
    """Whatever the bytes and wherever they are cut; only a byte order mark at the start goes."""
    path = tmp_path_factory.mktemp("bad") / "a.txt"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", piece)
        patch.setattr(corpus, "BLOCK_BYTES", block)
        found = list(corpus.documents(corpus.find([path])[0], None, 0, corpus.REPLACE))
        text = "".join(piece for d in found for piece in corpus.pieces(d, corpus.REPLACE))
    expected = data.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    assert text == expected
    if found:
        digests = corpus.Digests(0)
        digests.update(expected.encode())
        assert (found[0].digest, found[0].key) == (digests.draw(), digests.key())
        genuine = data.removeprefix(codecs.BOM_UTF8).count("\ufffd".encode())
        assert found[0].replaced == expected.count("\ufffd") - genuine
        assert found[0].blank == (not expected.strip())


def test_damaged_files(tmp_path, capsys):
    zstandard, pyarrow = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    data = jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 50} for i in range(500)]).read_bytes()
    (tmp_path / "a.jsonl").unlink()
    gz, zst = gzip.compress(data), zstandard.ZstdCompressor().compress(data)
    table = pyarrow.Table.from_pylist([{"body": "x", "n": 1}])
    pyarrow.parquet.write_table(table, tmp_path / "good.parquet")
    whole = (tmp_path / "good.parquet").read_bytes()
    for name, content, says in (
        ("cut.jsonl.gz", gz[:-20], "damaged or cut off"),
        ("bad.jsonl.gz", b"not gzip", "damaged or cut off"),
        ("cut.jsonl.zst", zst[:-20], "damaged or cut off"),
        ("bad.jsonl.zst", b"not zstd", "damaged"),
        ("cut.parquet", whole[:-20], "not a parquet file that can be read"),
        ("field.parquet", whole, "has no column text; it has body, n"),
    ):
        (tmp_path / name).write_bytes(content)
        told = fails(capsys, "prepare", tmp_path / name, *ALL, "--out", tmp_path / "o")
        assert f"{tmp_path / name}" in told
        assert says in told
    assert "is not text but int" in fails(
        capsys, "prepare", tmp_path / "good.parquet", *ALL, "--text-field", "n", "--out", tmp_path / "o"
    )
    assert not (tmp_path / "o").exists()


def test_the_first_fault_in_the_order_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 100)
    monkeypatch.setattr(encode, "_UNIT_BYTES", 100)
    jsonl(tmp_path / "a.jsonl", [{"text": "x" * 20} for _ in range(200)])
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"oops\n" * 50)
    (tmp_path / "b.txt").write_bytes(b"fine\n" * 100 + b"\xff")
    command = ["prepare", tmp_path / "a.jsonl", tmp_path / "b.txt", *ALL, "--out", tmp_path / "o"]
    for workers in (1, 3):
        assert "line 201 is not JSON" in fails(capsys, *command, "--workers", workers)
    # What stands after the last document that is asked for is not read.
    assert run(*command, "--max-documents", 200) == 0


# ---- workers


def collect(results, into: list) -> None:
    for value in results:
        into.append(value)


@pytest.mark.slow
def test_ordered_map():
    def failing():
        yield 5
        raise UserError("from the items")

    for workers in (1, 3):
        assert list(ordered_map(square, iter(range(40)), workers)) == [x * x for x in range(40)]
        found: list[int] = []
        with pytest.raises(UserError, match="minus one"):
            collect(ordered_map(square, iter([2, 3, -1, 4]), workers), found)
        with pytest.raises(UserError, match="from the items"):
            collect(ordered_map(square, failing(), workers), found)
        assert found == [4, 9, 25]
    with pytest.raises(UserError, match=r"ended by itself \(exit code 9\)"):
        list(ordered_map(square, iter([1, -2, 3]), 2))
    numbers = iter(range(10_000))
    results = ordered_map(square, numbers, 2)
    assert next(results) == 0
    assert next(numbers) <= 10  # it reads ahead a little, never the corpus
    results.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path, how):
    """Killed in the middle, then the same command again."""
    jsonl(tmp_path / "in" / "a.jsonl", [{"text": "some words and a line " * 200} for _ in range(3_000)])
    command = [sys.executable, "-m", "kamui_dist.cli", "prepare", tmp_path / "in", "--tokenizer", "bytes"]
    command += ["--val-fraction", "0", "--workers", "2", "--shard-tokens", "1M", "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    there = ".out.*.preparing/data/train/*.bin"
    tiny.wait_for(lambda: list(tmp_path.glob(there)), process, seconds=60, pause=0.005)
    children = [int(c) for c in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) >= 2
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert (process.returncode, err) == (130, "interrupted\n")
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert not (tmp_path / "out").exists()
    deadline = time.monotonic() + 30
    while any(alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    subprocess.run([str(word) for word in command], check=True, timeout=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert header(tmp_path / "out" / "train")["documents"] == 3_000


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_another_runs_output_stays(tmp_path, capsys, monkeypatch):
    """Two runs to one place: the second to finish does not touch what the first made."""
    from kamui_dist.prepare import assemble

    text_files(tmp_path / "in", many(3))
    close = assemble.Assembler.close

    def late(self, recipe):
        monkeypatch.setattr(assemble.Assembler, "close", close)
        assert run("prepare", tmp_path / "in" / "000.txt", *ALL, "--out", tmp_path / "deep" / "out") == 0
        close(self, recipe)

    monkeypatch.setattr(assemble.Assembler, "close", late)
    assert run("prepare", tmp_path / "in", *ALL, "--out", tmp_path / "deep" / "out") == 2
    assert "was made by something else meanwhile" in capsys.readouterr().err
    assert docs(tmp_path / "deep" / "out" / "train") == ["document number 0\n"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    # A run that fails takes the directories along that it made.
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    fails(capsys, "prepare", tmp_path / "bad.txt", *ALL, "--out", tmp_path / "new" / "er" / "out")
    assert not (tmp_path / "new").exists()
