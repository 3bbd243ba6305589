"""Diagnosis on plain floats that all ranks share, so every rank comes to the same findings. Imports no torch.

    verdict = watch.observe(Observation(step, loss, norm, lr, ...))      before the update, which it may forbid
    findings = watch.validated(step, val_loss)
    findings = watch.detailed(step, record)                              a look into the layers (monitor.py)
    findings = replay(records, cfg, facts)                               the same over a metrics.jsonl

A loss is judged before it is added to any statistic; spikes and non-finite values are never added. The rules are in rules_*.py,
what they are called and what helps in findings.KINDS.

A finding is told once: again only after it was gone, and not within a window of steps, which doubles with every time up to 8
windows. Where its action is more than to tell, it is told whenever it begins, and for `skip` in every step that it concerns, SKIPS
times in a row. What lasts longer is no bad batch, and weights that stay as they are cannot end it: a warning says so, and updates
go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kamui_dist import knobs, rules_start
from kamui_dist.findings import ACTIONS, GRAVE, KINDS, Finding, Sign
from kamui_dist.observation import Facts, Observation, Verdict
from kamui_dist.rules import Rule
from kamui_dist.rules_loss import FAST, Divergence, Level, Overfitting, Plateau
from kamui_dist.rules_norm import Norms
from kamui_dist.rules_pace import Memory, SlowRank, Throughput, Waits
from kamui_dist.rules_start import Learning

__all__ = ["Facts", "Finding", "Observation", "Verdict", "Watch", "replay"]

SHORT = 5  # a window or a span is at most this fraction of a short run
LEAST = 16  # steps in a window of a short run
LEAST_SPAN = 64  # steps that a plateau takes at least
LEAST_START = 100  # steps before a loss that has not moved says anything
LONGEST_WAIT = 8  # windows between two findings of one kind
OVERFLOWED = (
    "the forward pass overflows or divides by zero: a learning rate too high, no target in the batch, a row all masked."
)
WITHOUT_SCALE = (  # of non-finite numbers where no scale of fp16 is looked for
    "a learning rate too high, or a batch without a target.",
    "if it goes on, lower optim.lr; run.debug=true names the operation.",
)
NOT_THE_SAME = (  # for data that are seen for the first time, and so not overfitted
    "training and validation do not see the same: validation data of another kind, wrong targets in training, too much dropout, "
    "or a model that is another one in eval mode.",
    "look at both data sets (kamui-dist inspect data CONFIG --step 1 --text), at model.dropout, and at what eval mode changes.",
)
ONLY_FREQUENCIES = (
    "the model has learnt how often each token occurs ({entropy:.3f} nats a token) and nothing else: targets that do not belong to "
    "the inputs, or attention that passes nothing on; else a model without capacity.",
    "look at the data (kamui-dist inspect data CONFIG --step 1 --text) and at where the model.factory takes its targets from; try "
    "train.overfit_one_batch=true.",
)
SKIPS = 5  # updates that `skip` leaves out in a row, for a finding that lasts
PACE = ("waits", "slow_rank", "throughput", "memory")  # rules on time and memory


@dataclass
class Watch:
    """All rules, and what they remember. state() is JSON for the checkpoint: at most a few numbers for each step of a window."""

    cfg: knobs.Watch
    facts: Facts
    skipped_in_a_row: int = 0
    # kind -> [it lasts (with `skip`: for so many steps), step when it was told, steps to wait]
    told: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cfg, facts, steps = self.cfg, self.facts, self.facts.steps or 1 << 60
        warmup, short = facts.warmup or 0, steps // SHORT
        size = min(cfg.window, max(LEAST, short))
        self.level, self.overfitting = Level(cfg), Overfitting(cfg)
        self.divergence = Divergence(cfg, warmup, facts.fresh)
        span = min(cfg.plateau_steps, max(LEAST_SPAN, short))
        self.plateau = Plateau(cfg, span, warmup, facts.lr, facts.decay_from)
        start = min(cfg.start_steps, max(LEAST_START, short)) + warmup // 2
        self.learning = Learning(facts.vocab_size, facts.fresh, start)
        self.norms = Norms(cfg, size, warmup=warmup)
        self._moved(size)

    def _moved(self, size: int) -> None:
        """Time and memory are judged anew: with other ranks, or another batch, they are others."""
        self.waits, self.slow_rank = Waits(self.cfg, size), SlowRank(self.cfg, size)
        self.throughput, self.memory = Throughput(self.cfg, size), Memory(self.cfg, max(LEAST, size // 2))

    def observe(self, seen: Observation) -> Verdict:
        step, loss, norm, lr, tell = seen.step, seen.loss, seen.norm, seen.lr, self._tell
        average, spike, found = self.level.average(loss), False, []
        self.skipped_in_a_row = 0 if seen.finite else self.skipped_in_a_row + 1
        if not seen.finite:
            found += self._non_finite(step, loss, norm)
        if math.isfinite(loss):
            found += tell("divergence", step, self.divergence.judge(step, loss, self.level.losses, average))
            spike, sign = self.level.judge(step, loss, norm, average)
            found += self._healthy(step, loss, lr) if sign is None else []
            redundant = self._lasts("divergence") and self.cfg.on_spike not in GRAVE
            found += tell("spike", step, None if redundant else sign)
        if seen.finite:
            found += self._learning(step, loss, norm, lr)
        if seen.finite and norm is not None and self.norms.add(step, norm):
            found += tell("large-norm", step, self.norms.large())
            found += tell("clipping", step, self.norms.clipped(self.facts.grad_clip))
        found += self._pace(seen)
        return Verdict(average, spike, found)

    def validated(self, step: int, val_loss: float) -> list[Finding]:
        """After a validation of the first set."""
        if not math.isfinite(val_loss):
            return self._blind(step, val_loss)
        self.told.pop("non-finite", None)
        average = max(self.level.average(math.nan, 2 * FAST), self.divergence.fast())
        sign, facts = self.overfitting.judge(step, val_loss, average), self.facts
        windows, batch = facts.windows or 0, facts.global_batch or 0
        if windows and windows <= batch:
            sign = None  # a single batch (train.overfit_one_batch) is meant to be overfitted
        elif sign and windows and step * batch < windows:
            sign = replace(sign, cause=NOT_THE_SAME[0], advice=NOT_THE_SAME[1], at_most="warn")
        return self._tell("overfitting", step, sign)

    def _blind(self, step: int, val_loss: float) -> list[Finding]:
        """Told once, until there is a number again."""
        known, action = self._lasts("non-finite"), self.cfg.on_non_finite
        self.told["non-finite"] = [1, step, 0]
        cause = "the model in eval mode, or a batch of the validation data: training did not see it in this step."
        advice = (
            "run the model in eval mode over the validation data with run.debug=true; nothing is best while it lasts."
        )
        message = f"validation loss {val_loss:.4g}."
        return [] if known or action == "off" else [Finding("non-finite", step, message, cause, advice, "warn")]

    def detailed(self, step: int, record: dict[str, Any]) -> list[Finding]:
        """After a look into the layers: `record` is that of kind "detail"."""
        before, now = self.learning.detail, rules_start.digest(record)
        self.learning.detail = now
        sign = rules_start.gap(record)
        found = self._tell("leak", step, sign) if sign else []
        return found + self._tell("dead-layers", step, rules_start.dead_layers(before, now))

    def _healthy(self, step: int, loss: float, lr: float | None) -> list[Finding]:
        found: list[Finding] = []
        facts, vocab = self.facts, self.facts.vocab_size
        if vocab and step == 1 and facts.fresh and (first := rules_start.first_loss(loss, vocab, facts.repeats)):
            found += self._tell(first[0], step, first[1])
        if vocab and facts.windows and facts.global_batch and step % 16 == 0 and step <= rules_start.EARLY:
            average = self.level.losses.mean(16)
            if sign := rules_start.too_good(
                step, average, vocab, facts.windows // facts.global_batch, self.learning.began, self.overfitting.latest
            ):
                found += self._tell("leak", step, sign)
        if self.plateau.add(step, loss, lr):
            fits = self.divergence.since is None and (self.learning.learned or vocab is None)
            sign = self.plateau.sign(step, lr, self.level.losses.noise()) if fits else None
            known = facts.entropy or 0.0
            if sign and not sign.cause and known and abs(self.plateau.parts[-1] - known) < 0.02 * known:
                sign = replace(sign, cause=ONLY_FREQUENCIES[0].format(entropy=known), advice=ONLY_FREQUENCIES[1])
            if sign and (dead := rules_start.without_gradient(self.learning.detail)):
                sign = replace(sign, cause=f"{dead}: they are frozen or detached.", advice=rules_start.ZERO_GRADIENT[1])
            found += self._tell("plateau", step, sign)
        return found

    def _learning(self, step: int, loss: float, norm: float | None, lr: float | None) -> list[Finding]:
        if not self.learning.add(step, loss, norm, lr):
            return []
        kind, sign = self.learning.judge(step, self.level.losses, norm, lr, self.divergence.since is not None)
        kinds = ("not-learning", "slow-learning")
        return [f for k in kinds for f in self._tell(k, step, sign if k == kind else None)]

    def _pace(self, seen: Observation) -> list[Finding]:
        found, step, seconds, waited = [], seen.step, seen.step_seconds, seen.data_seconds
        if seconds is not None and waited is not None and self.waits.add(step, waited, seconds):
            found += self._tell("data-starvation", step, self.waits.sign())
        rank, own, median = seen.slowest_rank, seen.own_seconds, seen.median_own_seconds
        if rank is not None and own is not None and median is not None and self.slow_rank.add(step, rank, own, median):
            found += self._tell("slow-rank", step, self.slow_rank.sign())
        if seen.tokens_per_sec is not None and self.throughput.add(step, seen.tokens_per_sec):
            found += self._tell("throughput-drop", step, self.throughput.sign())
        if seen.memory_gib is not None and self.memory.add(step, seen.memory_gib):
            found += self._tell("memory-growth", step, self.memory.sign())
        return found

    def _non_finite(self, step: int, loss: float, norm: float | None) -> list[Finding]:
        row, most = self.skipped_in_a_row, self.cfg.max_skipped
        stop = row >= most
        # In a row the 1st, 2nd, 4th, 8th ... are told, and what max_skipped asks for.
        if row & (row - 1) and row % most:
            return []
        message = f"loss {loss:.4g}" + (f", gradient norm {norm:.4g}" if norm is not None else "")
        message += ": update skipped on all ranks" + (f", {row} in a row." if row > 1 else ".")
        kind = KINDS["non-finite"]
        cause, advice = (kind.cause, kind.advice) if self.facts.precision in (None, "fp16") else WITHOUT_SCALE
        if not math.isfinite(loss):
            cause = OVERFLOWED
        advice += f" watch.max_skipped = {most} is reached." if stop else ""
        action = self.cfg.on_non_finite if stop else "skip"
        since = step - row + 1 if row > 1 else None
        return [Finding("non-finite", step, message, cause, advice, action, since)] if action != "off" else []

    def _lasts(self, kind: str) -> bool:
        return bool(self.told.get(kind, [0])[0])

    def _tell(self, kind: str, step: int, sign: Sign | None) -> list[Finding]:
        """What a rule has seen in this step, or that it has seen nothing any more; see the top of this file."""
        key = f"{kind}?" if sign and sign.at_most else kind  # what was not sure does not hide what is
        lasts, last, wait = self.told.get(key, (0, None, self.cfg.window))
        if sign is None:
            for each in self.told.keys() & {kind, f"{kind}?"}:
                self.told[each][0] = 0
            return []
        action = getattr(self.cfg, "on_" + kind.replace("-", "_"))
        if sign.at_most:
            action = min(action, sign.at_most, key=ACTIONS.index)
        if action == "off":
            return []
        early = last is not None and step - last < wait and action not in GRAVE
        more = ""
        if action == "skip" and lasts >= SKIPS:
            action, more = "warn", f" {SKIPS} updates were left out for it, and it lasts: from here on they are made."
            if lasts > SKIPS:
                return []
        elif action != "skip" and (lasts or early):
            return []
        wait = wait if last is None else min(2 * wait, LONGEST_WAIT * self.cfg.window)
        self.told[key] = [lasts + 1, step, wait]
        since = None if sign.since == step else sign.since
        known = KINDS[kind]
        cause, advice = sign.cause or known.cause, sign.advice or known.advice
        return [Finding(kind, step, sign.message + more, cause, advice, action, since)]

    def _rules(self) -> dict[str, Rule]:
        return {name: rule for name, rule in vars(self).items() if isinstance(rule, Rule)}

    def state(self) -> dict[str, Any]:
        told = {kind: list(numbers) for kind, numbers in self.told.items()}
        return {"skipped_in_a_row": self.skipped_in_a_row, "told": told, "setup": self.facts.setup} | {
            name: rule.state() for name, rule in self._rules().items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """As it was when `state` was taken; with other ranks, or another batch, time and memory are judged anew."""
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.told = {kind: list(numbers) for kind, numbers in state.get("told", {}).items()}
        for name, rule in self._rules().items():
            if name in state and (name not in PACE or state.get("setup") == self.facts.setup):
                rule.load(state[name])


def replay(records: Iterable[dict[str, Any]], cfg: knobs.Watch, facts: Facts) -> list[Finding]:
    """What a watch finds in the records of a metrics.jsonl, in their order: of a run of ours what its own watch found, but that
    null stands for NaN and infinity alike. Each rule is silent where its numbers are missing."""
    watch, first_set, setup = Watch(cfg, facts), None, None
    found: list[Finding] = []
    before: dict[str, Any] = {}
    for record in records:
        kind = record["kind"]
        if kind == "step":
            found += watch.observe(Observation.from_record(record, before)).findings
            before = record
        elif kind == "eval" and first_set in (None, record.get("set")) and "val_loss" in record:
            first_set, val_loss = record.get("set"), record["val_loss"]
            found += watch.validated(record["step"], math.nan if val_loss is None else val_loss)
        elif kind == "detail":
            found += watch.detailed(record["step"], record)
        elif kind in ("start", "resume", "rollback"):
            before = {}
            if setup != (setup := record.get("setup") or record.get("world_size", setup)):
                watch._moved(watch.norms.size)
    return found
