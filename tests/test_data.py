"""Shards, shuffle, batches: every window at its place, whoever reads it and however the run is cut."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import batches, shuffle
from kamui_dist.data import (
    DEPTH,
    IGNORE,
    Loader,
    TokenDataset,
    evaluation_batches,
    global_batch,
    rank_positions,
)
from kamui_dist.errors import UserError
from kamui_dist.prepare.shard_writer import ShardWriter, dtype_name
from kamui_dist.shards import DTYPES, HEADER

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """The order is worked out in blocks; with short ones the borders between them are passed, and tiny epochs cost little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_AHEAD", 32)
        yield


def write(directory: Path, ids, vocab_size: int = 257, shard_tokens: int = 1 << 30) -> TokenDataset:
    directory.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(directory, vocab_size, shard_tokens)
    writer.write(np.asarray(ids))
    header = {"separator": None, "documents": 1, "text_bytes": len(ids)}
    writer.close(tokenizer={"name": "bytes", "fingerprint": "f"}, **header)
    return TokenDataset(directory)


def loader(dataset, *, T=4, B=2, A=1, rank=0, ranks=1, seed=0, first=0, limit=None, vocab_size=None):
    return Loader(
        dataset,
        context_length=T,
        micro_batch=B,
        grad_accum_steps=A,
        rank=rank,
        ranks=ranks,
        seed=seed,
        first_sample=first,
        device=CPU,
        limit=limit,
        vocab_size=vocab_size,
    )


def windows_of(micro_batches, T: int) -> list[int]:
    """The windows in a step, for a data set whose token i is i: the first token says which window. Padding is left out."""
    out = []
    for inputs, targets in micro_batches:
        assert inputs.shape == targets.shape
        assert inputs.dtype == targets.dtype == torch.int64
        for x, y in zip(inputs, targets, strict=True):
            if (y == IGNORE).all():
                continue
            assert y.tolist() == list(range(int(x[0]) + 1, int(x[0]) + T + 1))
            assert x[1:].tolist() == y[:-1].tolist()
            out.append(int(x[0]) // T)
    return out


# ---- shuffle


@settings(deadline=None, max_examples=200)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key):
    assert np.array_equal(np.sort(shuffle.permute(np.arange(n), n, key)), np.arange(n))


def test_permute_is_a_bijection_for_every_small_n():
    for n in range(1, 300):
        assert sorted(shuffle.permute(np.arange(n), n, 12345).tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 2**48), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_of_large_n_is_injective_and_element_wise(n, key, data):
    first = data.draw(st.integers(0, n - 1))
    indices = np.unique(np.concatenate([np.arange(first, min(first + 500, n)), [0, n - 1]]))
    images = shuffle.permute(indices, n, key)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(indices)
    one = int(data.draw(st.sampled_from(indices.tolist())))
    assert shuffle.permute(np.array([one]), n, key)[0] == images[indices.tolist().index(one)]


def test_permute_golden_values():
    """The order is a contract: other values here mean that a resumed run sees other data than before."""
    first = np.arange(8)
    assert shuffle.permute(first, 8, 0).tolist() == [5, 6, 2, 0, 1, 7, 3, 4]
    assert shuffle.permute(first, 1000, 1).tolist() == [432, 634, 119, 364, 61, 169, 964, 106]
    big = shuffle.permute(first[:4], 2**48, 2**64 - 1)
    assert big.tolist() == [21441764610222, 279151326658116, 80501479567598, 273100357519847]
    assert shuffle.sample_windows(3, 8, 5, seed=7).tolist() == [2, 4, 3, 2, 1, 4, 0, 0]


@pytest.mark.slow
def test_permute_spreads_evenly():
    """Over the keys, each pair of indices goes to each pair of images about equally often (chi-square), also where the
    grid is odd or not full, and all orders of four come up."""
    keys = 1500
    for n in (5, 8, 9):
        images = np.stack([shuffle.permute(np.arange(n), n, shuffle.epoch_key(0, k)) for k in range(keys)])
        expected, degrees = keys / (n * (n - 1)), n * (n - 1) - 1
        for i, j in combinations(range(n), 2):
            counts = np.bincount(images[:, i] * n + images[:, j], minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
            chi2 = ((counts - expected) ** 2 / expected).sum()
            assert chi2 < degrees + 6 * np.sqrt(2 * degrees), (n, i, j, counts)
    orders = Counter(tuple(shuffle.permute(np.arange(4), 4, shuffle.epoch_key(1, k)).tolist()) for k in range(2400))
    assert len(orders) == 24  # even and odd permutations both
    assert min(orders.values()) > 50  # 100 expected


@settings(deadline=None)
@given(n=st.integers(1, 60), seed=st.integers(0, 9), first=st.integers(0, 200), count=st.integers(0, 200))
def test_sample_windows_equals_the_obvious_reference(n, seed, first, count):
    def epoch(e):
        return shuffle.permute(np.arange(n), n, shuffle.epoch_key(seed, e)).tolist()

    stream = [w for e in range((first + count) // n + 1) for w in epoch(e)]
    assert shuffle.sample_windows(first, count, n, seed).tolist() == stream[first : first + count]


def test_each_epoch_has_its_own_order():  # C06
    orders = [shuffle.sample_windows(e * 32, 32, 32, seed=0).tolist() for e in range(4)]
    assert all(sorted(order) == list(range(32)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert shuffle.sample_windows(0, 32, 32, seed=1).tolist() != orders[0]


# ---- reading


def test_window_arithmetic(tmp_path):  # C08
    dataset = write(tmp_path / "a", np.arange(33))
    assert dataset.windows(16) == 2
    rows = dataset.read(np.array([0, 1]), 16)
    assert rows.shape == (2, 17)
    assert rows.dtype == np.int64
    assert rows[0].tolist() == list(range(17))
    assert rows[1].tolist() == list(range(16, 33))
    assert write(tmp_path / "b", np.arange(32)).windows(16) == 1
    with pytest.raises(UserError, match=r"data.path: .* holds 16 tokens.*17"):
        write(tmp_path / "c", np.arange(16)).windows(16)


@settings(deadline=None, max_examples=60)
@given(tokens=st.integers(2, 120), T=st.integers(1, 20), shard=st.integers(1, 40), wide=st.booleans())
def test_windows_cross_shard_borders(tmp_path_factory, tokens, T, shard, wide):
    if tokens <= T:
        return
    stream = np.random.default_rng(tokens).integers(0, 70000 if wide else 257, tokens)
    dataset = write(tmp_path_factory.mktemp("d"), stream, 70000 if wide else 257, shard)
    n = dataset.windows(T)
    ids = np.random.default_rng(1).permutation(n)
    assert dataset.read(ids, T).tolist() == [stream[w * T : w * T + T + 1].tolist() for w in ids]


def test_wide_vocabulary_is_stored_wide(tmp_path):  # C01
    assert dtype_name(65536) == "uint16"
    assert dtype_name(65537) == "uint32"
    dataset = write(tmp_path, [65535, 65536, 69999], vocab_size=70000)
    assert dataset.header["dtype"] == "uint32"
    assert dataset.read(np.array([0]), 2).tolist() == [[65535, 65536, 69999]]
    with pytest.raises(UserError, match="70000"):
        ShardWriter(tmp_path, 70000, 10).write(np.array([70000]))


def sparse_header(directory: Path, tokens_of_shards: list[int], dtype: str = "uint16") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shards = [{"file": f"{i:05d}.bin", "tokens": n, "sha256": ""} for i, n in enumerate(tokens_of_shards)]
    for shard in shards:
        with (directory / str(shard["file"])).open("wb") as file:
            file.truncate(int(str(shard["tokens"])) * DTYPES[dtype].itemsize)
    header = {
        "format": "kamui_dist tokens",
        "version": 1,
        "dtype": dtype,
        "vocab_size": 100,
        "separator": None,
        "tokens": sum(tokens_of_shards),
        "documents": 1,
        "text_bytes": 1,
        "tokenizer": {"name": "bytes", "fingerprint": "f"},
        "shards": shards,
    }
    (directory / HEADER).write_text(json.dumps(header))


def test_offsets_beyond_4_gib(tmp_path):  # C03
    tokens = int(4.5 * 2**30) // 2
    tokens -= (tokens - 1) % 16  # so that the last token ends a window
    sparse_header(tmp_path, [tokens])
    last = np.arange(1, 18, dtype="<u2")
    with (tmp_path / "00000.bin").open("r+b") as file:
        file.seek((tokens - 17) * 2)
        file.write(last.tobytes())
    dataset = TokenDataset(tmp_path)
    n = dataset.windows(16)
    assert n == (tokens - 1) // 16
    assert dataset.read(np.array([n - 1, 0]), 16).tolist() == [last.tolist(), [0] * 17]


def test_ten_thousand_shards(tmp_path):
    sparse_header(tmp_path, [100_000_000] * 10_000)  # 10**12 tokens
    start = time.perf_counter()
    dataset = TokenDataset(tmp_path)
    n = dataset.windows(1024)
    assert time.perf_counter() - start < 2
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir())) if open_files.exists() else 0
    rows = dataset.read(shuffle.sample_windows(0, 400, n, seed=0), 1024)
    assert rows.shape == (400, 1025)
    if before:
        assert len(list(open_files.iterdir())) - before <= 64


def test_random_reads_do_not_grow_the_process(tmp_path):  # J02
    resource = pytest.importorskip("resource")
    sparse_header(tmp_path, [128 * 2**20])  # 256 MB
    dataset = TokenDataset(tmp_path)
    n = dataset.windows(1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for k in range(0, 4000, 8):
        dataset.read(shuffle.sample_windows(k, 8, n, seed=0), 1024)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_fingerprint_is_of_the_tokens_not_of_the_place(tmp_path):  # B43
    one = write(tmp_path / "a", np.arange(50), shard_tokens=20)
    (tmp_path / "a").rename(tmp_path / "b")
    assert TokenDataset(tmp_path / "b").fingerprint == one.fingerprint
    assert write(tmp_path / "c", np.arange(50) + 1, shard_tokens=20).fingerprint != one.fingerprint
    assert write(tmp_path / "d", np.arange(50), shard_tokens=25).fingerprint != one.fingerprint


# ---- what may be wrong with a directory


def test_missing_directories_are_named(tmp_path, monkeypatch):  # G06
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"data.val_path: no such directory: {tmp_path}/nowhere"):
        TokenDataset("nowhere", "data.val_path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no dataset.json in .*/empty.*kamui-dist prepare"):
        TokenDataset("empty")
    write(tmp_path / "parent" / "train", np.arange(9))
    with pytest.raises(UserError, match="parent/train"):
        TokenDataset("parent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "int8.*uint16, uint32"),
        ({"dtype": "uint32"}, r"00000.bin has 100 bytes.*50 tokens of uint32 = 200"),  # C02
        ({"tokens": 49}, "tokens is 49, but the shards have 50"),
        ({"tokens": -1}, "tokens -1"),
        ({"tokens": "50"}, "tokens '50'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": None}, "vocab_size None"),
        ({"tokenizer": {"name": "bytes"}}, "tokenizer"),
        ({"shards": [{"file": "../x", "tokens": 50, "sha256": ""}]}, "shards"),
        ({"shards": None}, "shards"),
        ({"version": 9}, "version 9.*reads versions 1 and 2"),
        ({"format": None}, "not a header of token shards"),
        ({"separator": "x"}, "separator"),
    ],
)
def test_bad_headers(tmp_path, change, message):
    write(tmp_path, np.arange(50))
    header = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps(header | change))
    with pytest.raises(UserError, match=message) as caught:
        TokenDataset(tmp_path)
    assert str(caught.value).startswith(f"data.path: {tmp_path}")
    assert "\n" not in str(caught.value)


def test_damaged_files(tmp_path):
    write(tmp_path, np.arange(50), shard_tokens=30)
    shard = tmp_path / "00001.bin"
    whole = shard.read_bytes()
    for size in (0, 10, 39, 41):  # short, empty, an odd number of bytes, long
        shard.write_bytes((whole + b"x")[:size])
        with pytest.raises(UserError, match=f"{shard} has {size} bytes"):
            TokenDataset(tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard}: No such file"):
        TokenDataset(tmp_path)
    for text in ("", "{", "[]", "\udcff"):
        (tmp_path / HEADER).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=f"data.path: {tmp_path}/dataset.json"):
            TokenDataset(tmp_path)


def test_file_cut_after_opening_is_an_error(tmp_path):
    dataset = write(tmp_path, np.arange(50))
    os.truncate(tmp_path / "00000.bin", 60)
    assert dataset.read(np.array([0]), 16)[0, -1] == 16
    with pytest.raises(UserError, match=rf"{tmp_path}/00000.bin ends at byte 60, before the 100 bytes"):
        dataset.read(np.array([0, 1, 2]), 16)


def test_token_beyond_the_vocabulary(tmp_path):  # C17
    ids = np.zeros(50, dtype=np.int64)
    ids[37] = 64
    write(tmp_path, ids, vocab_size=65, shard_tokens=20)
    header = json.loads((tmp_path / HEADER).read_text()) | {"vocab_size": 64}
    (tmp_path / HEADER).write_text(json.dumps(header))
    dataset = TokenDataset(tmp_path)
    with pytest.raises(UserError, match=r"00001.bin holds token id 64 at byte 34.*64 ids"):
        dataset.read(np.array([0, 2]), 16)
    with loader(dataset, B=20) as batches, pytest.raises(UserError, match="token id 64"):
        batches.next()
    # The model's vocabulary is the bound too; vocabularies of 1 and 2 work.
    assert write(tmp_path / "one", np.zeros(9), vocab_size=1).read(np.array([0]), 4).tolist() == [[0] * 5]
    two = write(tmp_path / "two", np.arange(9) % 2, vocab_size=2)
    with loader(two, vocab_size=1) as batches, pytest.raises(UserError, match=r"token id 1 at byte .*1 ids"):
        batches.next()
    with pytest.raises(UserError, match="token id 1"):
        list(evaluation_batches(two, 4, 2, 0, 1, None, vocab_size=1))


# ---- which rank sees what


@pytest.mark.slow
def test_ranks_partition_the_step_and_the_partition_does_not_matter(tmp_path):  # C04, C07, B09
    T, G, steps, seed = 4, 8, 5, 3
    dataset = write(tmp_path, np.arange(16 * T + 1))  # 16 windows: two and a half epochs in 5 steps
    expected = [sorted(global_batch(dataset, s * G, G, T, seed).tolist()) for s in range(steps)]
    for ranks, B in ((1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)):
        loaders = [loader(dataset, T=T, B=B, A=G // (B * ranks), rank=r, ranks=ranks, seed=seed) for r in range(ranks)]
        for step in range(steps):
            parts = [windows_of(each.next(), T) for each in loaders]
            assert all(len(part) == G // ranks for part in parts)
            assert sorted(w for part in parts for w in part) == expected[step], (ranks, B, step)
        for each in loaders:
            each.close()
    assert sorted(expected[0] + expected[1]) == list(range(16))  # an epoch: each window once


@settings(deadline=None)
@given(first=st.integers(0, 2**40), B=st.integers(1, 5), A=st.integers(1, 5), ranks=st.integers(1, 6))
def test_rank_positions_cover_the_step(first, B, A, ranks):
    parts = [rank_positions(first, B, A, r, ranks) for r in range(ranks)]
    assert sorted(np.concatenate([p.ravel() for p in parts]).tolist()) == list(range(first, first + A * B * ranks))
    for micro in range(A):  # across ranks, a micro-batch is a contiguous part of the step
        row = np.concatenate([p[micro] for p in parts])
        assert row.tolist() == list(range(first + micro * B * ranks, first + (micro + 1) * B * ranks))


def test_resume_goes_on_at_the_next_sample(tmp_path):  # B01, B03, B04, B06, B10
    T = 4
    dataset = write(tmp_path, np.arange(10 * T + 1))

    def trace(first, steps, B):
        with loader(dataset, T=T, B=B, seed=1, first=first) as batches:
            return [w for _ in range(steps) for w in windows_of(batches.next(), T)]

    whole = trace(0, 15, 2)
    assert all(sorted(whole[e * 10 : e * 10 + 10]) == list(range(10)) for e in range(3))
    assert trace(0, 7, 2) + trace(14, 3, 2) + trace(20, 5, 2) == whole
    assert trace(0, 6, 3) + trace(18, 6, 2) == whole  # another global batch goes on at the next unseen window


def test_exact_epochs(tmp_path):
    T, ranks, B, A = 4, 2, 3, 2
    dataset = write(tmp_path, np.arange(7 * T + 1))
    limit = 3 * 7  # 3 epochs of 7 windows in global batches of 12
    loaders = [loader(dataset, T=T, B=B, A=A, rank=r, ranks=ranks, limit=limit) for r in range(ranks)]
    seen: Counter[int] = Counter()
    for _ in range(3):  # the third step is padding throughout
        steps = [each.next() for each in loaders]
        assert all(len(step) == A and step[0][0].shape == (B, T) for step in steps)
        seen.update(w for step in steps for w in windows_of(step, T))
    assert seen == dict.fromkeys(range(7), 3)
    assert all((targets == IGNORE).all() and (inputs == 0).all() for step in steps for inputs, targets in step)
    for each in loaders:
        each.close()


@pytest.mark.slow
def test_data_set_smaller_than_a_global_batch_and_than_the_ranks(tmp_path):  # C14
    T = 4
    dataset = write(tmp_path, np.arange(3 * T + 1))  # 3 windows
    parts = []
    for r in range(8):
        with loader(dataset, T=T, B=1, rank=r, ranks=8) as batches:
            parts.append([windows_of(batches.next(), T) for _ in range(3)])
    stream = [parts[r][s][0] for s in range(3) for r in range(8)]
    assert stream == shuffle.sample_windows(0, 24, 3, 0).tolist()
    assert Counter(stream) == dict.fromkeys(range(3), 8)


# ---- evaluation


def test_evaluation_with_uneven_ranks(tmp_path):
    T = 4
    dataset = write(tmp_path, np.arange(7 * T + 1))
    ranks = [list(evaluation_batches(dataset, T, 2, r, 2, None)) for r in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    assert all(x.shape == (2, T) for batches in ranks for x, _ in batches)
    assert sorted(w for batches in ranks for w in windows_of(batches, T)) == list(range(7))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), most=st.none() | st.integers(1, 50), B=st.integers(1, 5), ranks=st.integers(1, 9))
def test_evaluation_set_does_not_depend_on_the_ranks(tmp_path_factory, n, most, B, ranks):
    T = 2
    dataset = write(tmp_path_factory.mktemp("e"), np.arange(n * T + 1))
    parts = [list(evaluation_batches(dataset, T, B, r, ranks, most)) for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    chosen = sorted(w for part in parts for w in windows_of(part, T))
    assert chosen == sorted(windows_of(evaluation_batches(dataset, T, 1, 0, 1, most), T))
    assert len(set(chosen)) == len(chosen) == min(n, most or n)
    assert chosen[0] == 0
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1  # spread evenly


# ---- the thread


def test_loader_reports_its_threads_error_each_time(tmp_path):
    dataset = write(tmp_path, np.arange(200))
    with loader(dataset) as batches:
        deadline = time.monotonic() + 30
        while len(batches._shared.ready) < DEPTH:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.truncate(tmp_path / "00000.bin", 0)
        for _ in range(DEPTH):
            batches.next()  # what was read before the fault is still good
        for _ in range(2):
            with pytest.raises(UserError, match=r"00000.bin ends at byte"):
                batches.next()


def data_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Those of this test. before: of other tests of this process, whose loaders a traceback may keep."""
    return [t for t in threading.enumerate() if t.name == "kamui-data" and t not in before]


def test_loader_ends_its_thread(tmp_path, monkeypatch):
    before = set(threading.enumerate())
    dataset = write(tmp_path, np.arange(200))
    batches = loader(dataset)
    batches.next()
    assert batches.data_seconds >= 0
    assert len(data_threads(before)) == 1
    start = time.perf_counter()
    batches.close()
    batches.close()
    assert time.perf_counter() - start < 1
    assert not data_threads(before)
    with pytest.raises(RuntimeError, match="closed"):
        batches.next()

    dropped = loader(dataset)  # never closed: the thread goes with it
    dropped.next()
    del dropped
    gc.collect()
    assert not data_threads(before)

    # Closed by another thread while next() waits.
    release = threading.Event()
    read_raw = TokenDataset.read_raw
    monkeypatch.setattr(TokenDataset, "read_raw", lambda *a: release.wait(10) and read_raw(*a))
    waiting = loader(dataset)
    closer = threading.Timer(0.1, waiting.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        waiting.next()
    release.set()
    closer.join()
    assert not data_threads(before)


def test_data_seconds_is_the_wait(tmp_path, monkeypatch):
    dataset = write(tmp_path, np.arange(200))
    read_raw = TokenDataset.read_raw

    def slow(*args):
        time.sleep(0.1)
        return read_raw(*args)

    monkeypatch.setattr(TokenDataset, "read_raw", slow)
    with loader(dataset) as batches:
        batches.next()
        assert 0.05 < batches.data_seconds < 5


@pytest.mark.slow
def test_process_ends_with_an_open_loader(tmp_path):
    write(tmp_path, np.arange(200))
    code = f"""
import torch
from kamui_dist.data import Loader, TokenDataset
loader = Loader(TokenDataset({str(tmp_path)!r}), context_length=4, micro_batch=2, grad_accum_steps=1, rank=0, ranks=1,
                seed=0, first_sample=0, device=torch.device("cpu"))
loader.next()
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
