"""Attention within documents, positions that restart, and targets that do not count: against each document on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import attention, knobs
from kamui_dist.batches import evaluation_batches
from kamui_dist.data import IGNORE, Loader
from kamui_dist.documents import document_starts
from kamui_dist.errors import UserError
from kamui_dist.foreign import open_stream
from kamui_dist.model import GPT, init_weights
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.shards import HEADER, TokenDataset
from tests import tiny
from tests.test_data import write
from tests.test_foreign import megatron


def write_documents(
    directory: Path, lengths: list[int], mask: Any = None, shard_tokens: int = 1 << 30, separator: int | None = None
) -> TokenDataset:
    """Token i is i; as many documents as lengths. mask: of every token."""
    ids = np.arange(sum(lengths))
    directory.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(directory, max(257, len(ids)), shard_tokens, loss_mask=mask is not None)
    writer.write(ids, None if mask is None else np.asarray(mask), np.cumsum(lengths))
    writer.close(
        tokenizer={"name": "bytes", "fingerprint": "f"},
        separator=separator,
        documents=len(lengths),
        text_bytes=len(ids),
    )
    return TokenDataset(directory)


def reference(first: int, length: int, ends: list[int]) -> tuple[list[int], list[bool]]:
    """Token by token: where in the window the document of each input begins, and whether its target is of the same one."""
    starts, valid = [], []
    for t in range(length):
        document = sum(e <= first + t for e in ends)
        begin = max([0, *(e for e in ends[:document])])
        starts.append(max(0, begin - first))
        valid.append(sum(e <= first + t + 1 for e in ends) == document)
    return starts, valid


@settings(deadline=None, max_examples=80)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), T=st.integers(1, 16), data=st.data())
def test_windows_of_documents_equal_the_reference(tmp_path_factory, lengths, T, data):
    lengths[-1] += T + 1
    dataset = write_documents(tmp_path_factory.mktemp("d"), lengths, shard_tokens=data.draw(st.integers(3, 50)))
    assert dataset.ends is not None
    ends = np.cumsum(lengths).tolist()
    windows = np.arange(dataset.windows(T))
    rows = dataset.read_raw(windows, T)
    starts = dataset.read_documents(windows, T, rows)
    for w in windows.tolist():
        expected, valid = reference(w * T, T, ends)
        assert starts[w, :T].tolist() == expected
        assert (starts[w, 1:] == starts[w, :-1]).tolist() == valid
    assert [dataset.ends.rank(p) for p in range(sum(lengths))] == [
        sum(e <= p for e in ends) for p in range(sum(lengths))
    ]


def test_the_border_targets_are_exactly_those(tmp_path):  # C10
    dataset = write_documents(tmp_path / "a", [5, 7, 5])
    x, y, documents = next(iter(evaluation_batches(dataset, 16, 1, 0, 1, document_mask=True)))
    assert torch.where(y[0] == IGNORE)[0].tolist() == [4, 11]
    assert x[0].tolist() == list(range(16))
    assert documents[0].tolist() == [0] * 5 + [5] * 7 + [12] * 4
    # The same from a separator alone, and from Megatron's index.
    separated = write(tmp_path / "b", np.where(np.isin(np.arange(17), [4, 11]), 99, np.arange(17)))
    separated.separator = 99
    parts = [np.arange(5), np.arange(5, 12), np.arange(12, 17)]
    for other in (separated, open_stream(megatron(tmp_path / "m", parts, 8, "<u2"))):
        _, targets, starts = next(iter(evaluation_batches(other, 16, 1, 0, 1, document_mask=True)))
        assert torch.equal(starts, documents)
        assert torch.where(targets[0] == IGNORE)[0].tolist() == [4, 11]


def test_a_long_index_is_searched_where_it_lies(tmp_path):
    """10**8 documents in a sparse file of 800 MB: opened and searched without reading it."""
    count = 10**8
    dataset = write_documents(tmp_path, [1000])
    path = tmp_path / "documents.bin"
    with path.open("wb") as file:
        file.truncate(8 * count)  # all end at 0 but the last few
        file.seek(8 * (count - 3))
        file.write(np.array([10, 20, 1000], dtype="<u8").tobytes())
    header = json.loads((tmp_path / HEADER).read_text())
    header |= {"documents": count, "documents_index": header["documents_index"] | {"bytes": 8 * count}}
    (tmp_path / HEADER).write_text(json.dumps(header))
    dataset = TokenDataset(tmp_path)
    assert dataset.ends is not None
    assert [dataset.ends.rank(p) for p in (0, 9, 10, 500)] == [count - 3, count - 3, count - 2, count - 1]


def test_what_is_wrong_with_an_index_or_a_mask(tmp_path):
    write_documents(tmp_path / "a", [5, 7, 5])
    (tmp_path / "a" / "documents.bin").write_bytes(b"12345678")
    with pytest.raises(UserError, match=r"documents.bin has 8 bytes, but its header says 3 documents = 24 bytes"):
        TokenDataset(tmp_path / "a")
    write_documents(tmp_path / "b", [9, 9], mask=np.ones(18), shard_tokens=10)
    (tmp_path / "b" / "00001.mask").write_bytes(b"1")
    with pytest.raises(UserError, match=r"00001.mask has 1 bytes, but dataset.json says 8 tokens of uint8 = 8 bytes"):
        TokenDataset(tmp_path / "b")
    (tmp_path / "b" / "00001.mask").unlink()
    with pytest.raises(UserError, match=r"cannot open the mask .*00001.mask"):
        TokenDataset(tmp_path / "b")
    masked = write_documents(tmp_path / "c", [9, 9], mask=np.zeros(18))
    header = masked.header | {"target_tokens": 0}
    (tmp_path / "c" / HEADER).write_text(json.dumps(header))
    with pytest.raises(UserError, match="all 18 tokens are masked; there is nothing to learn from"):
        TokenDataset(tmp_path / "c")
    plain = write(tmp_path / "d", np.arange(30))
    with pytest.raises(UserError, match=r"data.document_mask needs to know where documents end, and .*/d has neither"):
        Loader(plain, context_length=4, micro_batch=1, grad_accum_steps=1, rank=0, ranks=1, seed=0, first_sample=0,
               device=torch.device("cpu"), document_mask=True)  # fmt: skip


def test_masked_tokens_are_no_targets(tmp_path):
    mask = np.random.default_rng(0).random(41) < 0.4
    dataset = write_documents(tmp_path / "a", [20, 21], mask=mask, shard_tokens=17)
    for x, y in evaluation_batches(dataset, 8, 2, 0, 1):
        for row, target in zip(x, y, strict=True):
            if (target == IGNORE).all() and not row.any():
                continue
            first = int(row[0])
            assert target.tolist() == [i if mask[i] else IGNORE for i in range(first + 1, first + 9)]
    # Mask and borders are part of what the data are.
    prints = {dataset.fingerprint, write_documents(tmp_path / "b", [20, 21], mask=~mask, shard_tokens=17).fingerprint}
    prints |= {
        write_documents(tmp_path / "c", [20, 21]).fingerprint,
        write_documents(tmp_path / "d", [21, 20]).fingerprint,
    }
    assert len(prints) == 4


# ---- the model


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_packed_window_equals_its_documents_alone(position, checkpointing, kv_heads):
    """Loss and every gradient, to 1e-5; and what is in another document does not matter at all."""
    cfg = knobs.Model(
        n_layers=2, n_heads=2, n_kv_heads=kv_heads, d_model=16, context_length=16, vocab_size=40, vocab_multiple=1,
        position=position, checkpointing=checkpointing, init_std=0.3, qk_norm=True,
    )  # fmt: skip
    model = GPT(cfg)
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 40, (2, 16), generator=generator)
    y = torch.randint(0, 40, (2, 16), generator=generator)
    borders = [[(0, 5), (5, 12), (12, 16)], [(0, 1), (1, 16)]]
    ends = torch.zeros(2, 15, dtype=torch.bool)
    for b, parts in enumerate(borders):
        for _, end in parts[:-1]:
            ends[b, end - 1] = True
    documents = torch.from_numpy(document_starts(ends.numpy()))  # (2, 16)

    packed = model(x, y, documents)
    packed.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = sum(model(x[b : b + 1, i:j], y[b : b + 1, i:j]) for b, parts in enumerate(borders) for i, j in parts)
    alone.backward()
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad - gradients[name]).abs().max() <= 1e-5 * max(1.0, float(p.grad.abs().max())), name

    each = model(x, y, documents, per_sequence=True)
    assert each.shape == (2,)
    assert float(each.sum().detach()) == pytest.approx(packed.item(), rel=1e-6)
    with torch.no_grad():
        before = model(x, documents=documents)
        x[0, 3] = (x[0, 3] + 1) % 40
        after = model(x, documents=documents)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, 3:5], after[0, 3:5])


def test_one_document_a_window_is_the_model_without_a_mask():
    cfg = knobs.Model(n_layers=1, n_heads=2, d_model=8, context_length=8, vocab_size=20, position="rope")
    model = GPT(cfg)
    init_weights(model, 1)
    x = torch.arange(8)[None]
    assert torch.allclose(model(x), model(x, documents=torch.zeros_like(x)), atol=1e-6)
    each = model(x, x.masked_fill(x > 4, -100), per_sequence=True)
    assert float(each) == pytest.approx(float(F.cross_entropy(model(x)[0, :5], x[0, :5], reduction="sum")), rel=1e-6)


def test_the_block_mask_of_flex_attention_shows_the_same_tokens():
    """Its kernel runs on CUDA only; here the uncompiled one says whether the mask is right, forward."""
    from torch.nn.attention.flex_attention import flex_attention

    documents = torch.tensor([[0] * 50 + [50] * 100 + [150] * 50, [0] * 199 + [199]])
    q, k, v = (torch.randn(2, heads, 200, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    expected = attention.attend(q, k, v, attention.document_mask(documents, 16, 0.0), 0.0, grouped=True)
    flexible = flex_attention(q, k, v, block_mask=attention._block_mask(documents), enable_gqa=True)
    assert isinstance(flexible, torch.Tensor)
    assert torch.allclose(flexible, expected, atol=1e-5)


# ---- runs


def test_a_run_with_documents_and_validation(tmp_path, capsys):
    lengths = np.random.default_rng(1).integers(3, 12, 60).tolist()
    data = tmp_path / "data"
    write_documents(data, lengths)
    cfg = tiny.config(
        tmp_path / "run", data, data__document_mask=True, data__val_path=str(data), eval__every=2, eval__batches=0
    )
    assert tiny.run(cfg) == 0
    assert "attention within documents" in capsys.readouterr().out
    records = tiny.records(tmp_path / "run")
    assert all(r["targets"] < 16 * tiny.T for r in records)
    ends = np.cumsum(lengths)
    windows = (sum(lengths) - 1) // tiny.T
    borders = [e for e in ends.tolist() if e <= windows * tiny.T]
    dataset = TokenDataset(data)
    counted = sum(
        int((y != IGNORE).sum()) for _, y, _ in evaluation_batches(dataset, tiny.T, 4, 0, 1, document_mask=True)
    )
    assert counted == windows * tiny.T - len(borders)
    factory = tiny.config(tmp_path / "no", data, data__document_mask=True, model__factory="tests.tiny:lstm")
    with pytest.raises(
        UserError, match=r"data.document_mask needs a model with forward\(inputs, targets, documents\).*LSTM"
    ):
        tiny.run(factory)
