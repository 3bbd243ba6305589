"""Made-up training logs that look like real ones: a power law in the learning rate spent so far, correlated noise, a loss that
is now and then off by more, norms that fall and scatter."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from kamui_dist.watch import Facts, Observation

GPT2 = Facts(50257, 20_000, 6e-4, 700, None, 1.0, 10**7, 512, True)


def healthy(
    seed: int, facts: Facts = GPT2, *, floor: float = 3.0, noise: float = 0.03, correlation: float = 0.2,
    power: float = 0.3, constant: bool = False,
) -> Iterator[Observation]:  # fmt: skip
    """All of a run, step by step. noise: standard deviation of the loss, in nats; constant: the learning rate, after warmup."""
    assert None not in (facts.vocab_size, facts.steps, facts.lr, facts.warmup)
    vocab, steps, peak, warmup = facts.vocab_size or 0, facts.steps or 0, facts.lr or 0.0, facts.warmup or 0
    dice, error, nothing = random.Random(seed), 0.0, math.log(vocab)
    for step in range(1, steps + 1):
        x = max(0.0, (step - warmup) / (steps - warmup))
        lr = peak * min(1.0, step / warmup) * (1.0 if constant else 0.1 + 0.45 * (1 + math.cos(math.pi * x)))
        spent = step**2 / (2 * warmup) if step <= warmup else step - warmup / 2
        error = correlation * error + math.sqrt(1 - correlation**2) * dice.gauss(0, noise)
        outlier = dice.gauss(0, 2 * noise) if dice.random() < 0.01 else 0.0
        loss = floor + (1.01 * nothing - floor) * (1 + spent / 15) ** -power + (error + outlier if step > 1 else 0.0)
        norm = (0.3 + 2 / (1 + spent / 20)) * math.exp(dice.gauss(0, 0.15))
        norm *= dice.uniform(1.2, 2.5) if dice.random() < 0.005 else 1.0
        seconds = 0.3 * math.exp(dice.gauss(0, 0.02))
        yield Observation(
            step, loss, norm, lr, True, None if step == 1 else seconds, 0.001 * dice.random(),
            None if step == 1 else 5e5 / seconds, 30.0 - max(0, 5 - step), dice.randrange(8), 0.2 * dice.uniform(1, 1.2), 0.2,
        )  # fmt: skip
