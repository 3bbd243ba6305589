"""Mixtures: whose turn it is, in closed form, against counting one by one; and whole runs on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import batches, distributed, mixture, shuffle
from kamui_dist.data import Loader
from kamui_dist.errors import EXIT_STOPPED
from kamui_dist.foreign import open_stream
from kamui_dist.mixture import TrainingData, Turns, source_seed
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.shards import TokenDataset
from kamui_dist.tokenizer import BytesTokenizer
from tests import tiny
from tests.ranks import run_ranks
from tests.test_data import write

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)
AHEAD = 32


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """The order is worked out in blocks; with short ones the borders between them are passed, and tiny epochs cost little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_AHEAD", AHEAD)
        yield


def one_by_one(weights: list[float], n: int) -> list[tuple[int, int]]:
    """The obvious reference: every node of the tree counts what it has handed out, with exact fractions."""
    turns = Turns(weights)
    taken: dict[int, int] = {}
    out = []
    for _ in range(n):
        node = turns._root
        while node.source is None:
            assert node.left is not None
            assert node.right is not None
            q = taken.get(id(node), 0)
            taken[id(node)] = q + 1
            share = Fraction(node.share, 1 << 38)
            due = int(q * share + Fraction(1, 2)), int((q + 1) * share + Fraction(1, 2))
            node = node.left if due[1] > due[0] else node.right
        local = taken.get(id(node), 0)
        taken[id(node)] = local + 1
        out.append((node.source, local))
    return out


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, n=st.integers(1, 300))
def test_turns_equal_counting_one_by_one(weights, n):
    turns = Turns(weights)
    sources, local = turns.place(np.arange(n))
    assert list(zip(sources.tolist(), local.tolist(), strict=True)) == one_by_one(weights, n)
    for k in (0, 1, n // 2, n):
        assert turns.counts(k) == np.bincount(sources[:k], minlength=len(weights)).tolist()


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS)
def test_shares_are_right_at_every_prefix(weights):
    """Never two windows off; from 2,000 windows on therefore within one a thousand, at every length."""
    turns = Turns(weights)
    sources, _ = turns.place(np.arange(5000))
    k = np.arange(1, 5001)
    for i, share in enumerate(turns.shares):
        assert np.abs(np.cumsum(sources == i) - share * k).max() < 2


@settings(deadline=None)
@given(weights=WEIGHTS, first=st.integers(0, 2**47), count=st.integers(1, 50))
def test_a_far_place_is_where_counting_from_the_start_would_come_to(weights, first, count):
    turns = Turns(weights)
    sources, local = turns.place(np.arange(first, first + count).reshape(-1, 1))
    seen = turns.counts(first)
    assert sum(seen) == first
    for i, share in enumerate(turns.shares):
        assert abs(seen[i] - share * first) < 2 + first * 2.0**-37
    for source, place in zip(sources.ravel().tolist(), local.ravel().tolist(), strict=True):
        assert place == seen[source]
        seen[source] += 1


def test_a_tiny_weight_gets_its_turns():
    turns = Turns([1.0, 1e-7])
    assert turns.counts(10**9)[1] == pytest.approx(100, abs=1)
    sources, _ = turns.place(np.arange(20_000_000 - 10_000_000, 20_000_000))
    assert (sources == 1).sum() == 1


def make_sources(base: Path) -> TrainingData:
    streams: list[Any] = [write(base / "a", np.arange(41)), write(base / "b", np.arange(100, 113))]
    return TrainingData(streams, ["a", "b"], [3.0, 1.0], 4)


def test_each_source_is_in_epochs_of_its_own(tmp_path):
    data = make_sources(tmp_path)
    assert data.windows_of == [10, 3]
    sources, windows = data.place(np.arange(160), 7)
    for i, name in enumerate(data.names):
        mine = windows[sources == i]
        expected = shuffle.sample_windows(0, len(mine), data.windows_of[i], source_seed(7, name))
        assert mine.tolist() == expected.tolist()
    assert data.seen(160) == {"a": 120, "b": 40}
    # The values are a contract: a resumed run sees what it would have seen.
    assert sources[:12].tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert windows[:12].tolist() == [3, 2, 9, 2, 6, 1, 7, 1, 5, 0, 4, 0]


def test_one_source_keeps_the_order_of_a_data_set(tmp_path):
    dataset = write(tmp_path, np.arange(5 * 4 + 1))
    data = TrainingData([dataset], ["whatever"], [0.3], 4)
    assert data.fingerprint == dataset.fingerprint
    sources, windows = data.place(np.arange(3, 11), 7)
    assert windows.tolist() == shuffle.sample_windows(3, 8, 5, 7).tolist() == [2, 4, 3, 2, 1, 4, 0, 0]
    assert not sources.any()


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(B=st.integers(1, 4), A=st.integers(1, 3), ranks=st.integers(1, 3), first=st.integers(0, 50))
def test_the_loader_reads_what_the_positions_say(tmp_path_factory, B, A, ranks, first):
    data = make_sources(tmp_path_factory.mktemp("m"))
    G = A * B * ranks
    sources, windows = data.place(np.arange(first, first + 3 * G), 5)
    expected = sorted((s, (100 if s else 0) + w * 4) for s, w in zip(sources.tolist(), windows.tolist(), strict=True))
    seen = []
    for rank in range(ranks):
        with Loader(
            data, context_length=4, micro_batch=B, grad_accum_steps=A, rank=rank, ranks=ranks, seed=5, first_sample=first,
            device=torch.device("cpu"),
        ) as loader:  # fmt: skip
            for _ in range(3):
                micro_batches = loader.next()
                assert loader.sources is not None
                assert loader.sources.shape == (A, B)
                for (x, y), row in zip(micro_batches, loader.sources, strict=True):
                    assert torch.equal(x[:, 1:], y[:, :-1])
                    seen += list(zip(row.tolist(), x[:, 0].tolist(), strict=True))
    assert sorted(seen) == expected


def test_what_changed_is_named(tmp_path):
    before = json.loads(json.dumps(make_sources(tmp_path / "1").identity))  # as a checkpoint keeps it
    now = make_sources(tmp_path / "2")
    other = TrainingData([now.streams[0], write(tmp_path / "c", np.arange(100, 130))], ["a", "b"], [3.0, 2.0], 4)
    assert mixture.changes(before, other.identity) == ["b: tokens 13 -> 30", "b: weight 1.0 -> 2.0"]
    assert other.fingerprint != now.fingerprint
    swapped = TrainingData(now.streams[::-1], ["b", "a"], [1.0, 3.0], 4)
    assert mixture.changes(before, swapped.identity) == ["the sources are in another order"]
    assert swapped.fingerprint != now.fingerprint
    fewer = TrainingData([write(tmp_path / "d", np.arange(1, 42))], ["a"], [3.0], 4)
    assert mixture.changes(before, fewer.identity) == ["source b is gone", "a: as many tokens, but other ones"]


# ---- whole runs


def mixture_config(run: Path, base: Path, **overrides: Any) -> Any:
    sources = [
        {"path": str(base / "austen"), "weight": 2, "name": "austen"},
        {"path": str(base / "gpt.bin"), "weight": 1, "name": "gpt", "separator": 10},
        {"path": str(base / "chat"), "weight": 1, "name": "chat"},
    ]
    args = {"data__path": None, "data__sources": sources, "train__micro_batch": 2, "train__steps": 12, **overrides}
    return tiny.config(run, base / "austen", **args)


class TracingSources(Loader):
    """Which (source, window) this rank was given, and how many targets, by the tokens alone: `seen`."""

    seen: list[Any] = []  # noqa: RUF012

    def next(self) -> list[tuple[torch.Tensor, ...]]:
        micro_batches = super().next()
        assert self.sources is not None
        for (x, y, *_), sources in zip(micro_batches, self.sources, strict=True):
            for tokens, targets, source in zip(x.tolist(), y, sources.tolist(), strict=True):
                TracingSources.seen.append((source, tuple(tokens), int((targets != -100).sum())))
        return micro_batches


def stopping(at: int) -> type[Loader]:
    class Stopping(TracingSources):
        calls = 0

        def next(self) -> list[tuple[torch.Tensor, ...]]:
            self.calls += 1
            if self.calls == at and distributed.rank() == 0:
                signal.raise_signal(signal.SIGTERM)
            return super().next()

    return Stopping


def traced(cfg: Any, loader: type[Loader] = TracingSources) -> tuple[int, list[Any]]:
    """Exit code, and for every step the sorted samples of all ranks, of the steps that were trained on."""
    from kamui_dist.signals import StopRequest

    TracingSources.seen = []
    stop = StopRequest().install()
    code = tiny.run(cfg, stop, loader)
    return code, distributed.gather_objects(TracingSources.seen)


def on_ranks(jobs: list[tuple[Any, int | None]]) -> list[Any]:
    batches._AHEAD = AHEAD
    return [traced(cfg, TracingSources if at is None else stopping(at)) for cfg, at in jobs]


def by_step(parts: list[list[Any]], batch: int = 16) -> list[list[Any]]:
    ranks = len(parts)
    a_step = batch // ranks
    steps = [[sample for part in parts for sample in part[s : s + a_step]] for s in range(0, len(parts[0]), a_step)]
    return [sorted(step) for step in steps]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A passage of Austen as bytes, a nanoGPT file, and supervised examples whose answers alone are targets."""
    base = tmp_path_factory.mktemp("sources")
    tokenizer = BytesTokenizer()
    told = {"tokenizer": {"name": "bytes", "fingerprint": tokenizer.fingerprint}, "separator": 256}
    text = next(p for p in sorted((ROOT / "data/austen").glob("*.txt"))).read_text(encoding="utf-8")[5000:5700]
    (base / "austen").mkdir()
    writer = ShardWriter(base / "austen", 257, 250)
    writer.write(tokenizer.encode(text), ends=np.array([300, len(text.encode())]))
    writer.close(documents=2, text_bytes=len(text.encode()), **told)
    np.random.default_rng(0).integers(0, 256, 200).astype("<u2").tofile(base / "gpt.bin")
    (base / "chat").mkdir()
    masked = ShardWriter(base / "chat", 257, 100, loss_mask=True)
    for k in range(20):
        ids = np.concatenate([tokenizer.encode(f"How much is {k}?"), tokenizer.encode(f"It is {k}."), [256]])
        mask = np.zeros(len(ids), dtype=bool)
        mask[-len(f"It is {k}.") - 1 :] = True
        masked.write(ids, mask, np.array([len(ids)]))
    masked.close(documents=20, text_bytes=1, **told)
    return base


def test_what_a_start_knows_of_the_tokens(sources: Path) -> None:
    one, many = open_stream(sources / "austen"), [open_stream(sources / name) for name in ("austen", "chat")]
    text = one.read(np.arange(one.windows(16)), 16)
    alone = TrainingData([one], ["a"], [1.0], 16)
    share = np.unique(text[:, 1:], return_counts=True)[1] / text[:, 1:].size
    assert alone.repeats == float((text[:, 1:] == text[:, :-1]).mean())
    assert alone.entropy == pytest.approx(-(share * np.log(share)).sum() + (len(share) - 1) / (2 * text[:, 1:].size))
    # Of supervised data only what is a target; and by the weights.
    chat = TrainingData([many[1]], ["c"], [1.0], 16)
    mixed = TrainingData(many, ["a", "c"], [3.0, 1.0], 16)
    mask = many[1].read_mask(np.arange(many[1].windows(16)), 16)
    assert mask is not None
    assert many[1].sample(16, 999).counts.sum() == mask.sum() < mask.size
    assert mixed.repeats == pytest.approx(0.75 * alone.repeats + 0.25 * chat.repeats)
    assert max(alone.entropy, chat.entropy) < mixed.entropy + 0.5
    assert len({alone.digest, chat.digest, mixed.digest}) == 3
    uniform = TrainingData([open_stream(sources / "gpt.bin")], ["g"], [1.0], 8)
    assert uniform.entropy < np.log(256)


def same_numbers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Counts exactly, losses to the rounding of fp32."""
    if "val_loss" in one:
        return one["set"] == other["set"] and one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)
    rows = [(one, other)] + [(source, other["sources"][name]) for name, source in one["sources"].items()]
    return all(
        a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        and (a["tokens"], a.get("targets")) == (b["tokens"], b.get("targets"))
        for a, b in rows
    )


@pytest.mark.slow
def test_a_mixture_is_the_same_on_any_number_of_ranks_and_after_any_stops(sources, tmp_path):
    # Beside a whole run on each number of ranks, one that is stopped after updates 2 and 4 (inside an epoch of every source) and
    # 9 (beyond one), and goes on with other ranks each time.
    traces, stopped = {}, []
    for ranks, at in ((2, 2), (4, 2), (1, 5)):
        jobs = [
            (mixture_config(tmp_path / f"{ranks}", sources), None),
            (mixture_config(tmp_path / "stopped", sources), at),
        ]
        (code, parts), (stopped_code, stopped_parts) = run_ranks(on_ranks, ranks, jobs)[0]
        assert (code, stopped_code) == (0, EXIT_STOPPED)
        traces[ranks] = by_step(parts)
        stopped += by_step(stopped_parts)
    packed = {
        "data__document_mask": True,
        "model__position": "rope",
        "eval__every": 6,
        "data__val_path": str(sources / "chat"),
    }
    jobs = [
        (mixture_config(tmp_path / "stopped", sources), None),
        (mixture_config(tmp_path / "fsdp", sources, parallel__shard=2, **packed), None),
    ]
    (code, parts), (fsdp_code, _) = run_ranks(on_ranks, 2, jobs)[0]
    assert (code, fsdp_code) == (0, 0)
    assert tiny.run(mixture_config(tmp_path / "packed", sources, **packed)) == 0
    for kind in ("step", "eval"):
        pairs = zip(tiny.records(tmp_path / "packed", kind), tiny.records(tmp_path / "fsdp", kind), strict=True)
        for one, other in pairs:
            assert same_numbers(one, other)
    trace = traces[1]
    assert trace == traces[2] == traces[4] == stopped + by_step(parts)

    records = tiny.records(tmp_path / "1")
    data = TrainingData(
        [open_stream(sources / p) for p in ("austen", "gpt.bin", "chat")],
        ["austen", "gpt", "chat"],
        [2.0, 1.0, 1.0],
        tiny.T,
    )
    epochs = {n: data.seen(12 * 16)[n] / w for n, w in zip(data.names, data.windows_of, strict=True)}
    assert epochs["gpt"] > 1.5, "the runs below are to cross an epoch"
    for step, record in enumerate(records, 1):
        seen = data.seen(16 * step)
        assert {n: s["tokens"] for n, s in record["sources"].items()} == {n: k * tiny.T for n, k in seen.items()}
    targets = sum(n for step in trace for _, _, n in step)
    assert targets == sum(r["targets"] for r in records) < 12 * 16 * tiny.T
    losses = [r["sources"]["chat"]["loss"] for r in records]
    assert all(loss is not None for loss in losses)

    for other_run in ("2", "4", "stopped"):
        for one, other in zip(records, tiny.records(tmp_path / other_run), strict=True):
            assert same_numbers(one, other)


def test_loss_by_source_is_that_of_its_own_targets(sources, tmp_path):
    """Against the model run on each window alone; and a model that cannot tell sequences apart still counts tokens."""
    cfg = mixture_config(tmp_path / "run", sources, train__steps=1, optim__lr=0.0)
    assert tiny.run(cfg) == 0
    [record] = tiny.records(tmp_path / "run")
    model = tiny.LAST_MODEL[0]
    data = TrainingData(
        [open_stream(sources / p) for p in ("austen", "gpt.bin", "chat")],
        ["austen", "gpt", "chat"],
        [2.0, 1.0, 1.0],
        tiny.T,
    )
    placed, windows = data.place(np.arange(16), 7)
    sums = {name: [0.0, 0] for name in data.names}
    for source, window in zip(placed.tolist(), windows.tolist(), strict=True):
        stream, ids = data.streams[source], np.array([window])
        row = torch.from_numpy(stream.read(ids, tiny.T))
        y = row[:, 1:].clone()
        mask = stream.read_mask(ids, tiny.T)
        if mask is not None:
            y[torch.from_numpy(~mask)] = -100
        with torch.no_grad():
            sums[data.names[source]][0] += float(model(row[:, :-1], y))
        sums[data.names[source]][1] += int((y != -100).sum())
    for name, (loss, count) in sums.items():
        assert record["sources"][name]["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert record["loss"] == pytest.approx(
        sum(s[0] for s in sums.values()) / sum(s[1] for s in sums.values()), rel=1e-5
    )
    assert record["targets"] == sum(s[1] for s in sums.values())

    cfg = mixture_config(tmp_path / "lstm", sources, train__steps=1, model__factory="tests.tiny:lstm")
    assert tiny.run(cfg) == 0
    assert tiny.records(tmp_path / "lstm")[0]["sources"] == {n: {"tokens": 8 * k} for n, k in data.seen(16).items()}


def test_a_changed_mixture_is_refused_by_name(sources, tmp_path, capsys):
    cfg = mixture_config(tmp_path / "run", sources, train__steps=1)
    assert tiny.run(cfg) == 0
    assert "gpt: 25.00% of the tokens; 24 windows of 8 in" in capsys.readouterr().out
    again = mixture_config(tmp_path / "run", sources, train__steps=2)
    again.data.sources[1].weight = 3
    with pytest.raises(Exception, match=r"data.sources: the data differ .*: gpt: weight 1.0 -> 3.0; .*allow_change"):
        tiny.run(again)
    again.data.allow_change = True
    assert tiny.run(again) == 0
    assert TokenDataset(sources / "chat").windows(8) > 10
