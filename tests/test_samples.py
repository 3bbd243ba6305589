"""Text that the model writes: how tokens are drawn, at validations on any ranks, and by `kamui-dist sample`."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kamui_dist import cli, distributed, generate, optim, parallel, start
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.generate import Drawing, draw, text_after
from kamui_dist.plan import make_plan
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.samples import Sampler
from kamui_dist.shards import TokenDataset
from kamui_dist.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer
from tests import tiny
from tests.ranks import run_ranks

CPU = torch.device("cpu")
T = 16
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune " * 12
BYTES = BytesTokenizer()


def write_text(directory: Path, fingerprint: str = BYTES.fingerprint) -> Path:
    """TEXT as bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = BYTES.encode(TEXT)
    writer = ShardWriter(directory, BYTES.vocab_size, 1 << 30)
    writer.write(ids)
    writer.close(
        tokenizer={"name": "bytes", "fingerprint": fingerprint}, separator=256, documents=1, text_bytes=ids.size
    )
    return directory


def configured(data: Path, **overrides: Any) -> Config:
    values = {"data__val_path": str(data), "model__context_length": T, "model__vocab_size": 257, **overrides}
    return tiny.config(data.parent / "run", data, **values)


def model_of(cfg: Config, world: int = 1) -> nn.Module:
    plan = make_plan(cfg, world)
    mesh = distributed.make_mesh(CPU, plan.replicate, plan.shard)
    return parallel.parallelize(start.build_model(cfg), cfg, plan, mesh, CPU)


# ---- drawing


def test_the_likeliest_token_at_temperature_0() -> None:
    assert draw(torch.tensor([0.0, 3.0, 2.0]), Drawing(temperature=0), torch.Generator()) == 1


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probability() -> None:
    """Temperature, top-k and nucleus, against the shares of 4000 draws (standard deviation 0.008)."""
    probabilities = torch.tensor([0.5, 0.1, 0.25, 0.15])

    def shares(**how: Any) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        found = Counter(draw(probabilities.log(), Drawing(**how), generator) for _ in range(4000))
        return [found[i] / 4000 for i in range(4)]

    near = lambda values: pytest.approx(values, abs=0.04)  # noqa: E731
    assert shares(temperature=1, top_k=0) == near([0.5, 0.1, 0.25, 0.15])
    assert shares(temperature=1, top_k=2) == near([2 / 3, 0, 1 / 3, 0])
    assert shares(temperature=1, top_k=2)[1::2] == [0, 0]
    squares = probabilities**2 / (probabilities**2).sum()
    assert shares(temperature=0.5, top_k=0) == near(squares.tolist())
    assert shares(temperature=1, top_k=0, top_p=0.7) == near([2 / 3, 0, 1 / 3, 0])
    assert shares(temperature=1, top_k=0, top_p=0.5) == [1, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_model_that_has_diverged_still_writes_something(bad: float) -> None:
    for logits in (torch.full((5,), bad), torch.tensor([0.0, bad, 1.0])):
        for temperature in (0.0, 0.8, 1e-6):
            assert 0 <= draw(logits, Drawing(temperature=temperature), torch.Generator()) < 5


class Counting(nn.Module):
    """After id n comes n + 1, whatever came before; remembers how long its inputs were."""

    def __init__(self, vocab: int = 10) -> None:
        super().__init__()
        self.vocab, self.lengths = vocab, list[int]()

    def forward(self, x: torch.Tensor, y: None) -> torch.Tensor:
        self.lengths.append(x.shape[1])
        return 100.0 * nn.functional.one_hot((x + 1) % self.vocab, self.vocab)


def follow(model: nn.Module, prompt: list[int], count: int, vocab_size: int, **how: Any) -> list[int]:
    tokens = generate.tokens(
        model, prompt, context_length=4, vocab_size=vocab_size, how=Drawing(**how), generator=torch.Generator(), device=CPU,
        compute="fp32",
    )  # fmt: skip
    return list(itertools.islice(tokens, count))


def test_a_text_longer_than_the_context() -> None:
    model = Counting()
    assert follow(model, [3, 4], 7, 10, temperature=0) == [5, 6, 7, 8, 9, 0, 1]
    assert model.lengths == [2, 3, 4, 4, 4, 4, 4]


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    assert set(follow(Counting(vocab=10), [3], 50, 6)) <= set(range(6))


METASPACE = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
 "pre_tokenizer": {"type": "Metaspace", "replacement": "\\u2581", "prepend_scheme": "first", "split": true},
 "post_processor": null, "decoder": {"type": "Metaspace", "replacement": "\\u2581", "prepend_scheme": "first", "split": true},
 "model": {"type": "WordLevel", "vocab": {"\\u2581Mr.": 0, "\\u2581Darcy": 1, "\\u2581was": 2, "?": 3}, "unk_token": "?"}}"""


def test_the_space_before_the_first_word_is_kept() -> None:
    """Decoders of SentencePiece's kind leave it out at the beginning of a text, and the continuation is not one."""
    words: Tokenizer = JsonTokenizer(METASPACE, "tokenizer.json", "here")
    assert words.decode([2]) == "was"
    assert text_after(words, [0, 1], [2]) == " was"
    assert text_after(BYTES, list("né".encode()[:2]), list("né".encode()[2:])) == "\ufffd", (
        "half a character in the prompt"
    )


# ---- at validations


def sampler(cfg: Config, data: Path, module: nn.Module) -> Sampler:
    stream = TokenDataset(data)
    return Sampler(cfg, module, stream.tokenizer, stream, CPU)


@pytest.mark.slow
def test_the_same_step_writes_the_same_text(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    cfg = configured(data, eval__sample_tokens=40)
    module = model_of(cfg)
    writer = sampler(cfg, data, module)
    assert writer.prompt == TEXT[:T]
    texts = [writer.write(step) for step in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert sampler(cfg, data, module).write(1) == texts[0], "also after a restart"
    assert texts[0]
    assert writer.seconds > 0
    again = configured(data, eval__sample_tokens=40, run__seed=8)
    assert sampler(again, data, module).write(1) != texts[0]


def test_nothing_is_written_if_nothing_is_asked_for(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data", fingerprint="of nobody")
    writer = sampler(configured(data), data, Counting())
    assert (writer.prompt, writer.write(1)) == ("", None)


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    """Random numbers, modes and gradients are as before."""
    data = write_text(tmp_path / "data")
    cfg = configured(data, eval__sample_tokens=5, model__dropout=0.5)
    module = model_of(cfg).train()
    module.blocks[0].eval()  # type: ignore[index, union-attr]  # somebody's frozen part
    writer = sampler(cfg, data, module)
    modes = [m.training for m in module.modules()]
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    first, second = writer.write(1), writer.write(1)
    assert (torch.rand(3).tolist(), random.random()) == expected
    assert first == second, "no dropout"
    assert [m.training for m in module.modules()] == modes
    assert all(p.grad is None for p in module.parameters())


def test_prompts(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    asked = configured(data, eval__sample_tokens=3, eval__sample_prompt="Mr. Darcy")
    assert sampler(asked, data, model_of(asked)).prompt == "Mr. Darcy"
    nothing = configured(data, eval__sample_tokens=3, eval__sample_prompt="")
    writer = sampler(nothing, data, model_of(nothing))
    assert (writer.prompt, writer.ids) == ("", [256])
    long = configured(data, eval__sample_tokens=3, eval__sample_prompt=TEXT)
    assert sampler(long, data, model_of(long)).write(1) is not None


class Ending(nn.Module):
    """Writes "ab" and the end of a document, again and again."""

    def forward(self, x: torch.Tensor, y: None) -> torch.Tensor:
        after = torch.full((257,), ord("a"))
        after[ord("a")], after[ord("b")] = ord("b"), 256
        return 100.0 * nn.functional.one_hot(after[x], 257)


def test_a_text_goes_on_after_the_end_of_a_document(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    cfg = configured(data, eval__sample_tokens=7, eval__sample_prompt="x")
    assert sampler(cfg, data, Ending()).write(1) == "ab<|endoftext|>ab<|endoftext|>a"


def test_a_user_is_told_before_training_why_there_will_be_no_samples(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    cfg = configured(data, eval__sample_tokens=5)
    stream = TokenDataset(data)
    with pytest.raises(
        UserError, match=r"eval.sample_tokens = 5 needs a tokenizer, and .*data \(token shards\) names none"
    ):
        Sampler(cfg, Ending(), None, stream, CPU)
    with pytest.raises(UserError, match=r"eval.sample_tokens = 5: no tokenizer at .*gone.json"):
        Sampler(cfg, Ending(), str(tmp_path / "gone.json"), stream, CPU)
    (tmp_path / "other.json").write_text(METASPACE)
    with pytest.raises(UserError, match=r"other.json is not the tokenizer that .*data was prepared with"):
        Sampler(cfg, Ending(), str(tmp_path / "other.json"), stream, CPU)
    own = configured(data, eval__sample_tokens=5, model__factory="tests.tiny:lstm")
    with pytest.raises(
        UserError, match=r"returns logits \(B, T, V\); that of model.factory = 'tests.tiny:lstm' fails: Attr"
    ):
        sampler(own, data, tiny.LSTM(own.model))


def test_compiled_blocks_are_not_compiled_again(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    cfg = configured(data, eval__sample_tokens=12, eval__sample_prompt="a")
    module = model_of(cfg)
    writer = sampler(cfg, data, module)
    expected = writer.write(1)
    for block in module.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    x = torch.zeros(2, T, dtype=torch.int64)
    module(x, x)
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    assert before >= 1
    assert writer.write(1) == expected
    assert counters["stats"]["unique_graphs"] == before
    module(x, x)
    assert counters["stats"]["unique_graphs"] == before, "and those of training are still there"


def _on_ranks(data: Path, shard: int) -> tuple[Any, ...]:
    world = distributed.world_size()
    cfg = configured(data, eval__sample_tokens=20, parallel__shard=shard, parallel__replicate=world // shard)
    model = model_of(cfg, world)
    module = parallel.unwrap(model)
    writer = sampler(cfg, data, module)
    optimizer = optim.build(module, cfg.optim)
    x = torch.arange(2 * T).view(2, T)
    texts = []
    for step in range(2):  # an update after a text finds the weights as it left them
        held = {name: part.shape for name, part in parallel.local_weights(module).items()}
        texts.append(writer.write(step))
        assert {name: part.shape for name, part in parallel.local_weights(module).items()} == held
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.double().sum().item() for name, value in tiny.full_weights(model).items()}
    cfg.run.seed = 100 + distributed.rank()  # ranks that do not draw alike, as GPUs may
    apart = writer.write(3)
    broken = cfg.model_copy(update={"model": cfg.model.model_copy(update={"factory": "tests.tiny:lstm"})})
    try:
        sampler(broken, data, tiny.LSTM(cfg.model))
        fault = ""
    except UserError as error:
        fault = str(error)
    return texts, weights, apart, fault


@pytest.mark.slow
def test_all_ranks_write_one_text(tmp_path: Path) -> None:
    """DDP and FSDP as one process: same text, same weights after it; ranks that draw differently wait for nobody."""
    data = write_text(tmp_path / "data")
    [(texts, weights, apart, _)] = run_ranks(_on_ranks, 1, data, 1)
    for shard in (1, 2):
        for rank, (other, after, alone, fault) in enumerate(run_ranks(_on_ranks, 2, data, shard)):
            assert other == texts
            assert after == pytest.approx(weights, rel=1e-5)
            assert (alone == apart) == (rank == 0)
            assert fault.count("forward(inputs, None) returns logits") == 1


# ---- kamui-dist sample


@pytest.mark.slow
def test_the_command_continues_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_text(tmp_path / "data")
    cfg = configured(data, train__steps=30, optim__name="adamw", optim__lr=0.01, model__d_model=32, model__n_layers=1)
    assert tiny.run(cfg) == 0

    def wrote(*options: str) -> str:
        capsys.readouterr()
        assert cli.main(["sample", str(tmp_path / "run"), "--device", "cpu", "--prompt", "It is", *options]) == 0
        return capsys.readouterr().out

    text = wrote("--max-tokens", "30")
    assert re.fullmatch(r"(?s)It is.{1,30}\n", text)
    assert wrote("--max-tokens", "30") == text
    assert wrote("--max-tokens", "30", "--seed", "1") != text
    assert wrote("--max-tokens", "30", "--samples", "2").startswith(text + "-" * 40)
    likeliest = wrote("--max-tokens", "20", "--temperature", "0")
    assert likeliest == wrote("--max-tokens", "20", "--top-k", "1", "--seed", "5")

    asked = cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"sample_tokens": 30, "sample_prompt": "It is"})})
    module = model_of(asked)
    with torch.no_grad():
        for name, value in tiny.weights(tmp_path / "run").items():
            module.get_parameter(name).copy_(value)
    drawn = follow_as_the_command(module, asked)
    assert text == f"It is{drawn}\n", "the loop at validations is that of the command"


def follow_as_the_command(module: nn.Module, cfg: Config) -> str:
    ids = [int(i) for i in BYTES.encode("It is")]
    tokens = generate.tokens(
        module.eval(), ids, context_length=T, vocab_size=257, how=Drawing(), generator=torch.Generator().manual_seed(0),
        device=CPU, compute=cfg.run.precision,
    )  # fmt: skip
    return text_after(BYTES, ids, list(itertools.islice(tokens, 30)))
