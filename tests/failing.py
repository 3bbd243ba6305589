"""Training runs that fail, each in its own way: real ones, of a small model on Jane Austen's bytes, seconds each.

    python -m tests.failing                     what there is
    python -m tests.failing NAME OUT_DIR        trains it; OUT_DIR/run is its run directory

Three more are as they should be: `healthy`, `healthy-noisy` with a quarter of the batch, `healthy-long` of 2,000 steps.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kamui_dist import distributed, knobs
from kamui_dist.config import Config
from kamui_dist.data import Loader
from kamui_dist.errors import EXIT_STOPPED
from kamui_dist.findings import Finding
from kamui_dist.metrics import Metrics
from kamui_dist.model import GPT, Attention, Block
from kamui_dist.prepare.shard_writer import ShardWriter
from kamui_dist.signals import REASONS, StopRequest
from kamui_dist.watch import Observation, Verdict, Watch
from tests import tiny
from tests.ranks import run_ranks

AUSTEN = Path(__file__).parent.parent / "data" / "austen"
LENGTH = 64
RANDOM = np.random.default_rng(0)
LOADED = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Run:
    broken: str  # what is wrong with it
    expected: str | None  # the finding
    along: tuple[str, ...] = ()  # what else may be found, for the same reason
    change: dict[str, Any] = field(default_factory=dict)  # of the healthy config, section__key
    loader: type[Loader] = Loader
    windows: int = 6000  # of training data
    novels: str = "emma"
    ranks: int = 1
    code: int = 0  # that training ends with


SHORT = {"train__steps": 130, "schedule__warmup": 30}
SHORTER = {"train__steps": 60, "schedule__warmup": 30}
SHORTEST = {"train__steps": 40, "schedule__warmup": 20}


# ---- broken models


def factory(model: type[GPT]) -> Callable[[knobs.Model], nn.Module]:
    """For model.factory: with the weights that ours begins with."""

    def build(cfg: knobs.Model) -> nn.Module:
        with torch.device("meta"):
            return model(cfg)

    return build


class Detached(GPT):
    """Its loss is a number that knows nothing of the weights."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        loss = super().forward(*args, **options)
        return loss.detach() + 0 * sum(p.sum() for p in self.parameters())


class Frozen(GPT):
    """Somebody froze all but the last norm's bias, and that goes nowhere."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__(cfg)
        self.requires_grad_(False)
        self.unused = nn.Linear(1, 1)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return super().forward(*args, **options) + 1e-3 * self.unused.weight.sum() ** 2


class HalfDead(GPT):
    """Nothing comes back through the second block's own parts: what they add is taken as a constant."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__(cfg)
        block = cast(Block, self.blocks[1])
        for part in (block.attention, block.mlp):
            part.register_forward_hook(lambda _module, _args, out: out.detach())


class Summed(GPT):
    """The loss is right, its gradient 100 times too large: an accumulation that forgets to divide."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        loss = super().forward(*args, **options)
        return 100 * loss - 99 * loss.detach()


class SeesAll(Attention):
    """The causal mask was forgotten."""

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        return self.o(F.scaled_dot_product_attention(*self.heads(x, rope)).transpose(1, 2).flatten(2))


class Leaking(GPT):
    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__(cfg)
        for block in self.blocks:
            block.attention = SeesAll(cfg)


class Unigram(nn.Module):
    """A model without capacity: how often each byte occurs is all that it can learn."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(cfg.vocab_size or 0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits.expand(y.numel(), -1), y.flatten(), reduction="sum")


class Slower(GPT):
    """On the last rank of several every pass takes 20 ms longer; on a single one, 50 ms after the first 70. At least: on a busy
    machine a pass takes long anyway, and then it is 4 times as long again.
    """

    passes = 0

    def forward(self, *args: Any, **options: Any) -> Tensor:
        self.passes += self.training
        began = time.perf_counter()
        loss = super().forward(*args, **options)
        own, ranks = time.perf_counter() - began, distributed.world_size()
        if ranks > 1 and distributed.rank() == ranks - 1:
            time.sleep(max(0.02, 4 * own))
        elif ranks == 1 and self.passes > 70:
            time.sleep(max(0.05, 4 * own))
        return loss


class Hoarding(GPT):
    """Remembers what it has seen: 4 MiB a pass."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__(cfg)
        self.kept: list[bytearray] = []

    def forward(self, *args: Any, **options: Any) -> Tensor:
        self.kept.append(bytearray(b"1") * 2**22)
        return super().forward(*args, **options)


detached, frozen, half_dead = map(factory, (Detached, Frozen, HalfDead))
summed, leaking = map(factory, (Summed, Leaking))
slower, hoarding = map(factory, (Slower, Hoarding))
unigram = Unigram


# ---- broken data


class Unshifted(Loader):
    """The targets are the inputs."""

    def next(self) -> LOADED:
        return [(x, x, *rest) for x, _, *rest in super().next()]


class Poisoned(Loader):
    """Batches 100 to 102 are random bytes."""

    def __init__(self, *args: Any, first_sample: int = 0, **options: Any) -> None:
        super().__init__(*args, first_sample=first_sample, **options)
        self.batch = first_sample // 16

    def next(self) -> LOADED:
        self.batch += 1
        batches = super().next()
        if not 100 <= self.batch < 103:
            return batches
        random = np.random.default_rng(self.batch)
        rows = [torch.from_numpy(random.integers(0, 256, (len(x), LENGTH + 1))) for x, *_ in batches]
        return [(row[:, :-1], row[:, 1:]) for row in rows]


class Slow(Loader):
    """Reading a batch takes 20 ms more than anybody thought of, and at least half of what a step takes; the wait is told as the
    loader tells its own.
    """

    left = 0.0  # when the batch before was given

    def next(self) -> LOADED:
        wait = max(0.02, (time.perf_counter() - self.left) / 2) if self.left else 0.02
        time.sleep(wait)
        batches = super().next()
        self.data_seconds += wait
        self.left = time.perf_counter()
        return batches


class RandomTargets(Loader):
    def next(self) -> LOADED:
        return [(x, torch.from_numpy(RANDOM.integers(0, 256, y.shape)), *rest) for x, y, *rest in super().next()]


def here(name: str) -> str:
    return f"tests.failing:{name}"


RUNS = {
    "healthy": Run("nothing", None),
    "healthy-noisy": Run("nothing; batches of 4", None, change={"train__global_batch": 4, "train__micro_batch": 4}),
    "healthy-long": Run("nothing; 2,000 steps on six novels", None, windows=60_000, novels="*", change={"train__steps": 2000,
                        "eval__every": 200}),
    "detached": Run("the loss is detached from the weights", "not-learning",
                    change={"model__factory": here("detached")} | SHORTEST),
    "frozen": Run("all weights that matter are frozen", "not-learning", change={"model__factory": here("frozen")} | SHORT),
    "lr-zero": Run("optim.lr is 0", "not-learning", change={"optim__lr": 0.0} | SHORTEST),
    "vanishing": Run("initial weights of 1e-9 under SGD: the loss is ln(vocabulary) for ever", "not-learning",
                     change={"model__init_std": 1e-9, "model__norm": "rmsnorm", "model__bias": False, "optim__name": "sgd",
                             "optim__lr": 1e-3} | SHORT),
    "random-targets": Run("targets that have nothing to do with the inputs: the loss is ln(vocabulary) for ever",
                          "not-learning", loader=RandomTargets, change=SHORT),
    "lr-over-1000": Run("optim.lr over 1000", "slow-learning", change={"optim__lr": 1e-5} | SHORT),
    "lr-x100": Run("optim.lr times 100: falls, then explodes", "divergence", ("spike", "large-norm"),
                   change={"optim__lr": 1.0, "train__steps": 130}),
    "lr-x30": Run("optim.lr times 30: falls in warmup, and sits still above that", "plateau", ("spike", "large-norm"),
                  change={"optim__lr": 0.3, "train__steps": 240}),
    "dead-layers": Run("the second block is detached from the loss", "dead-layers",
                       change={"model__factory": here("half_dead"), "log__detail_every": 20} | SHORTEST),
    "large-norm": Run("the gradient is a sum over 100 passes where a mean belongs", "large-norm",
                      change={"model__factory": here("summed")} | SHORTER),
    "clipping": Run("optim.grad_clip a tenth of what is usual", "clipping", change={"optim__grad_clip": 0.1} | SHORTER),
    "overfitting": Run("8 KB of text, seen 27 times", "overfitting", windows=128, change={"train__steps": 220}),
    "leak": Run("the causal mask was forgotten", "leak", change={"model__factory": here("leaking")} | SHORTEST),
    "unshifted": Run("the targets are not shifted", "leak", ("overfitting", "spike"), loader=Unshifted, change=SHORTER),
    "unshifted-tied": Run("the targets are not shifted, and the model begins as one that copies", "leak", ("overfitting",),
                          loader=Unshifted, change={"model__tie_embeddings": True} | SHORTEST),
    "bad-init": Run("model.init_std times 50", "bad-init", ("large-norm",), change={"model__init_std": 1.0} | SHORTEST),
    "spike": Run("three batches of random bytes", "spike", loader=Poisoned, change={"train__steps": 140}),
    "nan": Run("SGD with a learning rate of 1e6 and no clipping", "non-finite", ("spike", "large-norm"), code=70,
               change={"optim__name": "sgd", "optim__lr": 1e6, "optim__grad_clip": 0.0} | SHORT),
    "plateau": Run("a model that can only learn how often each byte occurs", "plateau",
                   change={"model__factory": here("unigram"), "optim__lr": 0.1, "train__steps": 500}),
    "data-starvation": Run("reading takes longer than training", "data-starvation", loader=Slow, change=SHORTEST),
    "slow-rank": Run("the last of 2 ranks takes at least 20 ms longer", "slow-rank", ranks=2,
                     change={"model__factory": here("slower")} | SHORTER),
    "throughput-drop": Run("from step 70 on every pass takes at least 50 ms longer", "throughput-drop",
                           change={"model__factory": here("slower"), "train__steps": 110}),
    "memory-growth": Run("4 MiB a step are never given back", "memory-growth",
                         change={"model__factory": here("hoarding")} | SHORT),
}  # fmt: skip


def write_text(directory: Path, text: bytes) -> Path:
    if not directory.exists():
        directory.mkdir(parents=True)
        writer = ShardWriter(directory, 256, 1 << 30)
        writer.write(np.frombuffer(text, np.uint8).astype(np.int64))
        writer.close(tokenizer={"name": "bytes", "fingerprint": "b"}, separator=None, documents=1, text_bytes=len(text))
    return directory


def config(name: str, directory: Path, ranks: int = 1) -> Config:
    """The config of a run in `directory`, for which the data are made."""
    run = RUNS[name]
    # Without its layout: of 4 short windows one with a line in _i_ _t_ _a_ _l_ _i_ _c_ _s_, or of blanks, is a real spike.
    text = b" ".join(re.sub(rb"[\s_]+", b" ", path.read_bytes()) for path in sorted(AUSTEN.glob(f"{run.novels}.txt")))
    train = write_text(directory / "train", text[-run.windows * LENGTH - 1 :])
    val = write_text(directory / "val", text[: 64 * LENGTH + 1])
    healthy = {
        "model__n_layers": 2, "model__n_heads": 2, "model__d_model": 64, "model__d_ff": 256, "model__context_length": LENGTH,
        "model__init_std": 0.02, "model__tie_embeddings": False, "data__val_path": str(val), "optim__name": "adamw",
        "optim__lr": 1e-2, "optim__weight_decay": 0.1, "optim__grad_clip": 1.0, "schedule__kind": "cosine",
        "schedule__warmup": 60,
        "train__steps": 300, "train__micro_batch": 16 // ranks, "train__global_batch": 16, "eval__every": 20,
        "eval__batches": 4, "checkpoint__every": 100000, "checkpoint__best": False, "log__detail_every": 40,
    }  # fmt: skip
    return tiny.config(directory / "run", train, **(healthy | run.change))


def train(name: str, directory: Path, stop_at: int = 0) -> Path:
    """Trains it, in this process or on ranks of its own; returns its run directory. stop_at: asked to stop in this update."""
    if RUNS[name].ranks > 1:
        on_ranks(name, directory, RUNS[name].ranks)
    else:
        code, *_ = on_this_rank(name, directory, stop_at)
        assert code == (EXIT_STOPPED if stop_at else RUNS[name].code)
    return directory / "run"


def on_ranks(name: str, directory: Path, ranks: int) -> list[tuple[list[dict[str, Any]], list[str]]]:
    """Trains it on ranks of its own; returns of each rank what its watch has found, and what it was told."""
    config(name, directory)  # the data
    told = run_ranks(on_this_rank, ranks, name, directory)
    assert {code for code, *_ in told} == {RUNS[name].code}
    return [(found, seen) for _, found, seen in told]


def on_this_rank(name: str, directory: Path, stop_at: int = 0) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Exit code, findings as their records, and observations (their repr: NaN is not equal to itself)."""
    found: list[dict[str, Any]] = []
    seen: list[str] = []
    stop = StopRequest()

    class Watched(RUNS[name].loader):  # type: ignore[misc]
        asked = 0

        def next(self) -> LOADED:
            self.asked += 1
            if self.asked == stop_at:
                stop.code = REASONS.index("SIGTERM")
            return super().next()

    def telling(self: Metrics, findings: list[Finding]) -> None:
        found.extend(finding.record() for finding in findings)
        tell(self, findings)

    def looking(self: Watch, observation: Observation) -> Verdict:
        seen.append(repr(observation))
        return look(self, observation)

    tell, look = Metrics.findings, Watch.observe
    # Every rank calls them; what comes of it, rank 0 writes.
    with mock.patch.object(Metrics, "findings", telling), mock.patch.object(Watch, "observe", looking):
        return tiny.run(config(name, directory, distributed.world_size()), stop, Watched), found, seen


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("\n".join(f"{name:<20}{run.expected or '-':<18}{run.broken}" for name, run in RUNS.items()))
        sys.exit(0 if len(sys.argv) == 1 else 2)
    torch.set_num_threads(1)
    print(train(sys.argv[1], Path(sys.argv[2])))
