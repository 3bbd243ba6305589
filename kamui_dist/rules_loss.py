"""Rules of the watch on the loss over the whole run: spikes, divergence, plateaus, overfitting. Pure; imports no torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kamui_dist import knobs
from kamui_dist.findings import Sign
from kamui_dist.rules import Rule, Window

FAST = 16  # steps in the fast average, which is a median: one spike does not move it
PARTS = 8  # means that a plateau is judged by
MEMORISED = 0.1  # nats; below it there is nothing left to learn
LATE = 0.5  # a learning rate below this share of its peak is not high any more
CHANCE = 2.5  # standard deviations that a mean may be above what is expected of it
LOWEST_OF = 30  # means at least; the lowest of so many is 2 standard deviations below their middle
TOO_HIGH = (
    "a learning rate too high to settle, or data that have become harder.",
    "lower optim.lr, by 3 to 10 times, and lengthen schedule.warmup.",
)
NEVER_FELL = (
    "it has never fallen: a learning rate far too high, or a loss or gradient with the wrong sign.",
    "lower optim.lr by 10 times or more; see that the model returns the cross-entropy, which is above 0, and not its negative.",
)
MARGIN = 0.01  # a validation loss above the best by this share of it is worse, not noise


@dataclass
class Level(Rule):
    """The healthy losses and norms of late, and what stands out against them.

    The tradition: a loss above spike_factor times their mean. Sharper: a robust z-score of the loss above spike_z, and a norm
    above spike_norm_factor times its median; for that the window has to be half full. Neither ever enters the window, but what
    is only sharper and lasts for a quarter of it is no spike but another level: half a window of it is taken in unasked (and
    divergence watches it).
    """

    cfg: knobs.Watch
    losses: Window = field(init=False)
    norms: Window = field(init=False)
    since: int | None = None  # the first of these spikes in a row
    row: int = 0  # how many
    unasked: int = 0  # losses to take in, of another level

    def __post_init__(self) -> None:
        self.losses, self.norms = Window(self.cfg.window), Window(self.cfg.window)

    def average(self, loss: float, last: int = 0) -> float:
        """Of the healthy losses so far, or of the last so many; the first loss is its own."""
        return self.losses.mean(last) if len(self.losses) else loss

    def judge(self, step: int, loss: float, norm: float | None, average: float) -> tuple[bool, Sign | None]:
        """Whether the loss, which is finite, is a spike by the tradition; and what is told of it."""
        factor, told = self.cfg.spike_factor, None
        tradition = bool(len(self.losses)) and loss > factor * average > 0
        if loss < MEMORISED:
            pass  # a multiple of next to nothing
        elif tradition:
            told = f"loss {loss:.4g} is more than {factor:g} x its average {average:.4g}."
        elif loss > average and not self.unasked:
            told = self._sharper(loss, norm)
        if told and not tradition and self.row >= self.cfg.window // 4:
            told, self.unasked = None, self.cfg.window // 2
        if told is None:
            self.row, self.since, self.unasked = 0, None, max(0, self.unasked - 1)
            self.losses.add(loss)
            if norm is not None and math.isfinite(norm):
                self.norms.add(norm)
            return tradition, None
        self.since, self.row = self.since or step, self.row + 1
        return tradition, Sign(told, self.since)

    def _sharper(self, loss: float, norm: float | None) -> str | None:
        enough = max(16, self.cfg.window // 2)
        if norm is None or min(len(self.losses), len(self.norms)) < enough:
            return None
        usual = self.norms.median()
        if not norm > self.cfg.spike_norm_factor * usual:
            return None
        middle, spread = self.losses.median(), max(self.losses.spread(), 1e-3)
        z = (loss - middle) / spread
        if z <= self.cfg.spike_z:
            return None
        return (
            f"loss {loss:.4g} is {z:.1f} robust deviations above its median {middle:.4g}, "
            f"and gradient norm {norm:.3g} is {norm / usual if usual else math.inf:.1f} x its median."
        )


@dataclass
class Divergence(Rule):
    """The median of the last 16 losses (spikes too) above the best average by divergence_nats, and by twice the noise, for
    divergence_steps. The average is over the last half of the run so far, at most `window`; of fresh weights the first loss
    counts, too. During warmup the limit is twice as high."""

    cfg: knobs.Watch
    warmup: int
    fresh: bool
    best: float | None = None
    began: float | None = None  # loss of step 1
    since: int | None = None
    count: int = 0
    noise: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=FAST))
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=FAST))  # of `recent`

    def judge(self, step: int, loss: float, losses: Window, average: float) -> Sign | None:
        """`losses`, `average`: healthy ones, those before this step."""
        if self.since is None and len(losses) >= FAST:
            full = self.count >= 2 * losses.size
            slow = average if full else losses.mean(max(FAST, self.count // 2))
            self.best = slow if self.best is None else min(self.best, slow)
            if self.count % FAST == 0:
                self.noise = losses.noise()
        if step == 1:
            self.began, self.best = loss, loss if self.fresh else self.best
        self.count += 1
        self.recent.append(loss)
        self.steps.append(step)
        if self.best is None or len(self.recent) < FAST // 2:
            return None
        limit = max(self.cfg.divergence_nats, 2 * self.noise) * (2 if step <= self.warmup else 1)
        fast = self.fast()
        if fast <= self.best + limit:
            self.since = None
            return None
        if self.since is None:
            above = sum(value > self.best + limit for value in self.recent)
            # A median notices it when half its values have changed. (An older state has no steps.)
            self.since = self.steps[-min(above, len(self.steps))]
        if step - self.since < self.cfg.divergence_steps:
            return None
        return self._sign(fast, limit)

    def fast(self) -> float:
        return statistics.median(self.recent) if self.recent else -math.inf

    def _never_fell(self) -> bool:
        return self.began is not None and self.best is not None and self.best > self.began - MEMORISED

    def _sign(self, fast: float, limit: float) -> Sign:
        return Sign(
            f"the loss is about {fast:.4g}, it was {self.best:.4g} at its best: above it by more than {limit:.2g} nats "
            f"since step {self.since}.", self.since, *(NEVER_FELL if self._never_fell() else ()),
        )  # fmt: skip


@dataclass
class Plateau(Rule):
    """A straight line through the means of 8 parts of `span` steps falls by less than plateau_nats, one standard error included,
    which has to be smaller than that itself: noise that could hide an improvement keeps the rule silent. Over a span shorter
    than plateau_steps more is asked, by the root of the ratio, since a loss falls faster early and is noisier over fewer steps.
    Or the mean of these steps, and that of the last part, is above that of an earlier part by as much, and by more than chance: the
    loss has been lower, be it in warmup, and does not come back. Only while the learning rate is at least half its peak, after
    warmup, and where there is something left to learn."""

    cfg: knobs.Watch
    span: int
    warmup: int
    peak_lr: float | None
    decay_from: int | None
    begins: int | None = None
    total: float = 0.0
    count: int = 0
    parts: deque[float] = field(default_factory=lambda: deque(maxlen=PARTS))
    highest: float = 0.0  # learning rate seen
    block: list[float] = field(default_factory=list)  # of all steps, as long as a part: [first step, sum, number]
    blocks: deque[list[float]] = field(default_factory=lambda: deque(maxlen=PARTS))  # [first step, mean, number]
    low: list[float] | None = None  # the lowest before `blocks`, which are the latest
    last: int = 0  # losses in the last part: few, in a log that has not all steps

    def add(self, step: int, loss: float, lr: float | None) -> bool:
        """A healthy loss. Whether there is now something to judge."""
        self._remember(step, loss)
        if lr is None or step <= self.warmup or (self.decay_from is not None and step > self.decay_from):
            return self._forget()
        self.highest = max(self.highest, lr)
        if lr < LATE * (self.peak_lr or self.highest) or lr == 0:
            return self._forget()
        self.begins = step if self.begins is None else self.begins
        self.total, self.count = self.total + loss, self.count + 1
        if step - self.begins + 1 < max(1, self.span // PARTS):
            return False
        self.parts.append(self.total / self.count)
        self.last = self.count
        self.begins, self.total, self.count = step + 1, 0.0, 0
        return len(self.parts) == PARTS

    def _remember(self, step: int, loss: float) -> None:
        first, total, count = self.block or (step, 0.0, 0)
        self.block = [first, total + loss, count + 1]
        if step - first + 1 >= max(1, self.span // PARTS):
            if len(self.blocks) == PARTS and (self.low is None or self.blocks[0][1] < self.low[1]):
                self.low = self.blocks[0]
            self.blocks.append([first, self.block[1] / self.block[2], self.block[2]])
            self.block = []

    def _forget(self) -> bool:
        self.begins, self.total, self.count = None, 0.0, 0
        self.parts.clear()
        return False

    def sign(self, step: int, lr: float | None, noise: float) -> Sign | None:
        """noise: standard deviation of a loss."""
        if self.parts[-1] < MEMORISED:
            return None
        fall, error = _fall(self.parts)
        asked = self.cfg.plateau_nats * max(1.0, (self.cfg.plateau_steps / self.span) ** 0.5)
        now = math.fsum(self.parts) / len(self.parts)
        began = max(1, step - self.span)
        chance = max(3 * error, self._chance(step, noise))
        if self.low is not None and min(now, self.parts[-1]) - self.low[1] > max(asked, chance):
            return Sign(
                f"the loss is {now:.4f} in the last {self.span} steps, with lr {lr or 0.0:.2e}; it was {self.low[1]:.4f} from step "
                f"{self.low[0]} on, and has not come back to it.", began, *TOO_HIGH,
            )  # fmt: skip
        if fall + error >= asked or error >= asked:
            return None
        return Sign(
            f"the loss fell by {fall:.4f} (+- {error:.4f}) nats in the last {self.span} steps, to {self.parts[-1]:.4f}, with "
            f"lr {lr or 0.0:.2e}; less than {asked:.4f} is a plateau.", began,
        )  # fmt: skip

    def _chance(self, step: int, noise: float) -> float:
        """How far the last part may by chance be above the lowest block of all so far, which lies the lower the more there are."""
        part = max(1, self.span // PARTS)
        lowest = statistics.NormalDist().inv_cdf(0.5 ** (1 / max(LOWEST_OF, step / part)))
        # A state without the number is an older one, of a run: it has all steps.
        of_low = self.low[2] if self.low and len(self.low) > 2 else part
        return noise * (lowest / of_low**0.5 + CHANCE / max(1, self.last) ** 0.5)


def _fall(means: Iterable[float]) -> tuple[float, float]:
    """How far a least-squares line through `means` falls over all of them, and its standard error."""
    y = list(means)
    n, x_mean, y_mean = len(y), (len(y) - 1) / 2, math.fsum(y) / len(y)
    square = math.fsum((x - x_mean) ** 2 for x in range(n))
    slope = math.fsum((x - x_mean) * (value - y_mean) for x, value in enumerate(y)) / square
    rest = math.fsum((value - y_mean - slope * (x - x_mean)) ** 2 for x, value in enumerate(y))
    return -slope * n, n * math.sqrt(rest / (n - 2) / square)


@dataclass
class Overfitting(Rule):
    """overfit_evals validations in a row without one better than the best, the last above it by more than 1 %, while the
    average of the training loss went on falling."""

    cfg: knobs.Watch
    best: float | None = None
    best_step: int = 0
    average: float = 0.0  # of the training loss, at the best validation
    above: int = 0
    latest: tuple[float, float] | None = None  # validation loss, and the average of the training loss then

    def judge(self, step: int, val_loss: float, average: float) -> Sign | None:
        if not (math.isfinite(val_loss) and math.isfinite(average)):
            return None
        self.latest = val_loss, average
        if self.best is None or val_loss <= self.best:
            self.best, self.best_step, self.average, self.above = val_loss, step, average, 0
            return None
        self.above += 1
        margin = MARGIN * max(1.0, self.best)
        if self.above < self.cfg.overfit_evals or val_loss < self.best + margin or average > self.average - margin / 2:
            return None
        return Sign(
            f"validation loss {val_loss:.4f} is above its best {self.best:.4f} of step {self.best_step}, {self.above} "
            f"validations ago; the training loss fell from {self.average:.4f} to {average:.4f} meanwhile.", self.best_step + 1,
        )  # fmt: skip
