"""The watch on made-up numbers: what each rule finds and when, what it leaves alone, and that it goes on after a resume as if
nothing was. Real runs that fail: test_failing.py."""

from __future__ import annotations

import ast
import json
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import findings, knobs
from kamui_dist.findings import KINDS, Finding
from kamui_dist.rules import Window
from kamui_dist.watch import SKIPS, Facts, Observation, Verdict, Watch, replay
from tests import logs

NOTHING = math.log(256)
BYTES = Facts(256, 1000, 1e-3, 20, None, 1.0, 10**6, 16, True)


def watch(facts: Facts = BYTES, **changes: Any) -> Watch:
    return Watch(knobs.Watch(**changes), facts)


def see(w: Watch, step: int, loss: float, norm: float | None = None, **more: Any) -> Verdict:
    return w.observe(Observation(step, loss, norm, **more))


def find(w: Watch, seen: Iterable[Observation]) -> list[Finding]:
    return [finding for observation in seen for finding in w.observe(observation).findings]


def kinds(found: Iterable[Finding]) -> list[str]:
    return [finding.kind for finding in found]


def falling(step: int, noise: random.Random | None = None, lr: float = 1e-3) -> Observation:
    """A short healthy run of BYTES: from ln(256) to about 2."""
    loss = 2 + (NOTHING - 2) * (1 + step / 10) ** -0.5 + (noise.gauss(0, 0.03) if noise else 0.0)
    return Observation(step, NOTHING if step == 1 else loss, 0.8, lr)


# ---- average, spikes, non-finite updates


def test_the_average_is_of_the_last_losses_before_this_one() -> None:
    w = watch(window=4)
    averages = [see(w, i + 1, loss).average for i, loss in enumerate([4.0, 2.0, 3.0, 3.0, 5.0, 1.0])]
    # The first has nothing before it and is its own average.
    assert averages == [4.0, 4.0, 3.0, 3.0, 3.0, 13 / 4]
    assert list(w.level.losses.values) == [3.0, 3.0, 5.0, 1.0]


def test_a_spike_is_judged_before_it_is_added_and_never_added() -> None:
    w = watch(window=4)
    for step in range(1, 5):
        assert (see(w, step, 1.0).average, see(w, step, 1.0).spike) == (1.0, False)
    # If it were added first, the average would be 2 and 4 no spike (3 x 2 = 6).
    verdict = see(w, 5, 5.0)
    assert (verdict.average, verdict.spike, verdict.action) == (1.0, True, "warn")
    [finding] = verdict.findings
    assert (finding.kind, finding.step, finding.action, finding.since) == ("spike", 5, "warn", None)
    assert "loss 5 is more than 3 x its average 1" in finding.message
    assert finding.cause == KINDS["spike"].cause
    assert "optim.lr" in finding.advice
    # Not added: the next one of the same size is a spike too. It is not told again.
    assert see(w, 6, 5.0) == Verdict(1.0, True, [])
    assert list(w.level.losses.values) == [1.0] * 4


def test_exactly_the_factor_is_no_spike() -> None:
    w = watch()
    see(w, 2, 2.0)
    assert not see(w, 3, 6.0).spike
    w = watch()
    see(w, 2, 2.0)
    assert see(w, 3, math.nextafter(6.0, 7.0)).spike


def test_the_first_loss_is_never_a_spike() -> None:
    assert not see(watch(), 2, 1e30).spike


def sharp(w: Watch, steps: int, noise: float = 0.03) -> random.Random:
    dice = random.Random(3)
    for step in range(1, steps + 1):
        w.observe(Observation(1000 + step, 3.0 + dice.gauss(0, noise), math.exp(dice.gauss(0, 0.2)), 1e-4))
    return dice


def test_a_sharper_spike_needs_the_norm_too() -> None:
    for loss, norm, found in ((3.3, 2.5, True), (3.3, 1.5, False), (3.1, 2.5, False), (3.3, None, False)):
        w = watch()
        sharp(w, 100)
        verdict = see(w, 1101, loss, norm)
        assert not verdict.spike, "that is for the tradition"
        assert kinds(verdict.findings) == ["spike"] * found, (loss, norm)
        assert (loss in w.level.losses.values) != found
        assert (norm in w.level.norms.values) == (not found and norm is not None)
    assert "robust deviations above its median" in next(iter(_spike(3.3, 2.5).findings)).message


def _spike(loss: float, norm: float) -> Verdict:
    w = watch()
    sharp(w, 100)
    return see(w, 1101, loss, norm)


def test_a_sharper_spike_needs_half_a_window() -> None:
    for steps, found in ((63, False), (64, True)):
        w = watch()
        sharp(w, steps)
        assert kinds(see(w, 1101, 3.4, 3.0).findings) == ["spike"] * found, steps


def test_what_lasts_is_another_level_and_no_spike() -> None:
    """Else a source of data with a higher loss would be a spike for ever."""
    w = watch()
    sharp(w, 128)
    for k in range(40):
        see(w, 1201 + k, 3.4, 3.0)
    assert list(w.level.losses.values)[-8:] == [3.4] * 8, "after a quarter of a window"
    assert 3.4 not in list(w.level.losses.values)[:-8]
    assert "spike" not in kinds(f for k in range(200) for f in see(w, 1300 + k, 3.4, 3.0).findings)


def test_spikes_that_follow_each_other_are_one_story() -> None:
    w = watch(window=32)
    sharp(w, 32)
    told = [see(w, 2000 + k, 20.0 if k % 10 < 3 else 3.0, 1.0).findings for k in range(200)]
    steps = [finding.step for found in told for finding in found]
    # Again after 32 steps at the earliest, then 64, 128.
    assert steps == [2000, 2032, 2100]
    w = watch(window=32, on_spike="skip")
    sharp(w, 32)
    actions = [see(w, 2000 + k, 20.0 if k % 10 < 3 else 3.0, 1.0).action for k in range(200)]
    assert actions == ["skip" if k % 10 < 3 else "" for k in range(200)], "every step of it is skipped"


def test_skip_leaves_out_a_few_updates_in_a_row_and_goes_on() -> None:
    """Weights that do not change cannot bring a loss down: it is another level, if the next batches have it too."""
    for high in (3.4, 20.0):  # sharper, and by the tradition
        w = watch(on_spike="skip")
        sharp(w, 128)
        told = [see(w, 2000 + k, high, 3.0) for k in range(20)]
        assert [v.action for v in told] == ["skip"] * 5 + ["warn"] + [""] * 14
        [last] = told[5].findings
        assert (last.kind, last.step, last.since) == ("spike", 2005, 2000)
        assert last.message.endswith("5 updates were left out for it, and it lasts: from here on they are made.")
        # Once it was gone, it is skipped as ever.
        see(w, 2020, 3.0, 1.0)
        assert [see(w, 2021 + k, high, 3.0).action for k in range(6)] == ["skip"] * 5 + ["warn"]
    # A resume in the middle counts on.
    w = watch(on_spike="skip")
    sharp(w, 128)
    assert [see(w, 2000 + k, 20.0).action for k in range(3)] == ["skip"] * 3
    again = watch(on_spike="skip")
    again.load(json.loads(json.dumps(w.state())))
    assert [see(again, 2003 + k, 20.0).action for k in range(4)] == ["skip", "skip", "warn", ""]
    # So it is for whatever lasts.
    w = watch(on_spike="off", on_divergence="skip")
    actions = [w.observe(seen).action for seen in exploding(300, 30.0)]
    assert actions.count("skip") == SKIPS


def test_the_knob_says_how_many_are_skipped() -> None:
    assert f"at most {SKIPS} in a row" in str(knobs.Watch.model_fields["on_spike"].description)


def test_since_is_the_first_spike_of_a_row() -> None:
    w = watch(on_spike="skip")
    sharp(w, 128)
    assert [see(w, step, 20.0).findings[0].since for step in (3000, 3001, 3002)] == [None, 3000, 3000]


def test_non_finite_losses_are_never_added_and_never_spikes() -> None:
    w = watch()
    see(w, 2, 1.0, 1.0)
    for step, bad in ((3, math.nan), (4, math.inf)):
        verdict = see(w, step, bad, math.nan, finite=False)
        assert (verdict.average, verdict.spike, verdict.action) == (1.0, False, "skip")
        assert kinds(verdict.findings) == ["non-finite"]
    assert list(w.level.losses.values) == [1.0]
    # A finite loss whose gradients overflowed: skipped, and its loss counts; its norm does not.
    verdict = see(w, 5, 1.2, math.inf, finite=False)
    assert not verdict.spike
    assert list(w.level.losses.values) == [1.0, 1.2]
    assert list(w.level.norms.values) == [1.0]


def test_nan_from_the_start() -> None:
    verdict = see(watch(), 1, math.nan, math.nan, finite=False)
    assert math.isnan(verdict.average)
    assert (verdict.spike, verdict.action) == (False, "skip")


def test_too_many_skipped_updates_in_a_row_stop_the_run() -> None:
    w = watch(max_skipped=3)
    actions = []
    for step, finite in enumerate([False, False, True, False, False, False], 2):
        actions.append(see(w, step, 1.0 if finite else math.nan, 1.0, finite=finite).action)
    assert actions == ["skip", "skip", "", "skip", "skip", "stop"]
    finding = see(w, 8, math.nan, 1.0, finite=False).findings[0]
    assert (finding.action, finding.since) == ("stop", 5)
    assert "4 in a row" in finding.message
    assert "watch.max_skipped = 3" in finding.advice
    assert see(watch(max_skipped=1), 1, math.nan, 1.0, finite=False).action == "stop"


def test_a_run_that_goes_on_with_nan_is_not_flooded() -> None:
    w = watch(on_non_finite="warn")
    told = [step for step in range(1, 201) if see(w, step, math.nan, math.nan, finite=False).findings]
    assert told == [1, 2, 4, 8, 16, 20, 32, 40, 60, 64, 80, 100, 120, 128, 140, 160, 180, 200]
    assert see(watch(max_skipped=2, on_non_finite="off"), 1, math.nan, finite=False).action == "skip"


# ---- divergence


def exploding(at: int, rise: float, noise: float = 0.03, slope: int = 30) -> Iterable[Observation]:
    dice = random.Random(5)
    for step in range(1, at + 400):
        seen = falling(step, dice)
        up = rise * min(1.0, max(0, step - at) / slope)
        yield replace(seen, loss=seen.loss + up + dice.gauss(0, noise))


@pytest.mark.parametrize(("at", "rise"), [(60, 2.0), (60, 30.0), (300, 0.6), (300, 2.0), (700, 0.6), (700, 30.0)])
def test_divergence_is_found_within_100_steps_and_its_beginning_within_30(at: int, rise: float) -> None:
    found = [f for f in find(watch(on_spike="off"), exploding(at, rise)) if f.kind == "divergence"]
    [finding] = found
    assert at + 50 <= finding.step <= at + 100
    assert finding.since is not None
    assert at - 5 <= finding.since <= at + 30, finding
    assert "at its best" in finding.message


def test_what_comes_back_in_time_is_no_divergence() -> None:
    w, dice = watch(), random.Random(1)
    bump = [replace(falling(s, dice), loss=falling(s).loss + (1.5 if 300 < s < 340 else 0.0)) for s in range(1, 500)]
    assert "divergence" not in kinds(find(w, bump))


def test_an_explosion_from_the_first_step() -> None:
    dice = random.Random(1)
    seen = [Observation(s, NOTHING if s == 1 else 15 + dice.gauss(0, 3), 5.0, 1e-3) for s in range(1, 200)]
    found = find(watch(), seen)
    [finding] = [f for f in found if f.kind == "divergence"]
    assert finding.step < 80


def test_a_loss_that_never_fell() -> None:
    climbing = [Observation(s, 5.6 + 0.05 * s, 5.0, 1e-3) for s in range(1, 300)]
    for fresh in (True, False):
        [finding] = [f for f in find(watch(replace(BYTES, fresh=fresh)), climbing) if f.kind == "divergence"]
        assert "wrong sign" in finding.cause
    [finding] = [f for f in find(watch(on_spike="off"), exploding(300, 2.0)) if f.kind == "divergence"]
    assert finding.cause == KINDS["divergence"].cause


def test_a_bad_start_that_comes_down_is_no_divergence() -> None:
    seen = [Observation(s, 5 + 20 * 0.97**s, 5.0, 1e-3) for s in range(1, 400)]
    assert "divergence" not in kinds(find(watch(), seen))


def test_spikes_of_a_run_that_has_diverged_are_not_told_and_skipped_a_few_times_if_asked_for() -> None:
    found = find(watch(), exploding(300, 30.0))
    assert [k for k in kinds(found) if k != "clipping"] == ["spike", "divergence"]
    w = watch(on_spike="skip")
    actions = [w.observe(seen).action for seen in exploding(300, 30.0)]
    assert "skip" in actions[300:320]
    assert "skip" not in actions[400:], "for ever would be a run that stands still"


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("at", [100, 101, 250])
def test_a_jump_began_where_it_began(at: int, every: int) -> None:
    """A checkpoint of the step before is good. `every`: of another trainer's log, in which most steps are not."""
    w = watch(on_spike="off", divergence_steps=1)
    seen = [replace(falling(s), step=s * every, loss=9.5 if s >= at else falling(s).loss) for s in range(1, at + 20)]
    [finding] = [f for f in find(w, seen) if f.kind == "divergence"]
    assert (finding.since, f"since step {at * every}." in finding.message) == (at * every, True)


def test_next_to_nothing_times_three_is_no_spike() -> None:
    """A batch that is learned by heart (train.overfit_one_batch); and losses that may be negative."""
    w = watch(Facts(), window=16)
    memorised = [see(w, step, 0.0003 if step % 40 else 0.02, 0.01) for step in range(1, 200)]
    assert kinds(f for v in memorised for f in v.findings) == []
    assert [v.spike for v in memorised[39:41]] == [True, False], "the record's field is the tradition's"
    w = watch(Facts(), window=16)
    assert not any(see(w, step, -10.0 - step / 100, 1.0).spike for step in range(1, 100))


def test_what_is_not_finite_is_named_for_where_it_is() -> None:
    [loss], [norm] = (see(watch(), 5, a, b, finite=False).findings for a, b in ((math.nan, math.nan), (2.0, math.inf)))
    assert "forward pass" in loss.cause
    assert "fp16" in norm.cause


def test_divergence_happens_again_and_a_rollback_is_ordered_again() -> None:
    """Twice within 128 steps: the second is not told, unless it is to do something."""
    twice = [replace(falling(s), loss=falling(s).loss + (2.0 if 300 < s < 380 or 420 < s < 520 else 0.0))
             for s in range(1, 700)]  # fmt: skip
    assert kinds(find(watch(window=256), twice)).count("divergence") == 1
    assert kinds(find(watch(window=256, on_divergence="rollback"), twice)).count("divergence") == 2


# ---- plateau


def flat(lr: float = 1e-3, noise: float = 0.01, level: float = 3.0, steps: int = 1000, fall: float = 0.0) -> Any:
    dice = random.Random(2)
    for step in range(1, steps + 1):
        loss = max(level, NOTHING - step / 20) - fall * step
        yield Observation(step, loss + (dice.gauss(0, noise) if step > 1 else 0), 0.5, lr)


def test_a_plateau() -> None:
    found = find(watch(), flat())
    [finding] = found
    assert finding.kind == "plateau"
    assert finding.action == "note"
    assert 51 + 200 <= finding.step <= 51 + 250, "a fifth of the run after the loss stopped falling"
    assert finding.since == finding.step - 200
    assert "lr 1.00e-03" in finding.message


@pytest.mark.parametrize("seen", [
    flat(lr=4e-4),  # decayed below half its peak
    flat(noise=0.3),  # cannot be told from an improvement
    flat(level=0.05),  # nothing left to learn
    flat(fall=3e-4),  # it does fall: 0.06 in 200 steps
    flat(lr=0.0),
], ids=["decayed", "noise", "memorised", "falls", "lr-zero"])  # fmt: skip
def test_no_plateau(seen: Any) -> None:
    assert "plateau" not in kinds(find(watch(), seen))


def settles(at: float, fall: float = 0.0) -> Iterable[Observation]:
    """300 steps: in warmup down to 3.0, up again as the rate grows, then to `at`, where it falls by `fall` in 100 steps."""
    dice = random.Random(6)
    for step in range(1, 301):
        loss = (
            max(3.0, NOTHING - step / 12) if step < 60 else at + 0.15 * math.exp((60 - step) / 20) - fall * step / 100
        )
        yield Observation(step, loss + dice.gauss(0, 0.03), 0.4, 0.3 * min(1, step / 60))


def test_a_loss_that_has_been_lower_and_does_not_come_back() -> None:
    """A rate too high to settle: it falls all the time since warmup, so the line alone would say nothing."""
    facts = replace(BYTES, steps=300, lr=0.3, warmup=60)
    [finding] = find(watch(facts), settles(3.2, fall=0.05))
    assert (finding.kind, finding.action, finding.since) == ("plateau", "note", finding.step - 64)
    assert 60 + 64 <= finding.step <= 60 + 96
    assert "the loss is 3.1538 in the last 64 steps, with lr 3.00e-01; it was 2.98" in finding.message
    assert "from step 41 on, and has not come back to it" in finding.message
    assert "too high to settle" in finding.cause
    assert "lower optim.lr" in finding.advice
    assert find(watch(facts), settles(3.0, fall=0.15)) == [], "it comes back"
    assert find(watch(replace(facts, lr=3.0)), settles(3.2, fall=0.05)) == [], "the rate is low"
    # Spikes, and data that were harder for a while, do not count.
    w = watch(facts)
    bump = [replace(falling(s), loss=falling(s).loss + (0.2 if 100 < s < 130 else 0.0), lr=0.3) for s in range(1, 301)]
    assert find(w, bump) == []


def test_plateaus_are_not_looked_for_in_warmup_and_decay() -> None:
    for facts in (replace(BYTES, warmup=990), replace(BYTES, decay_from=250)):
        assert "plateau" not in kinds(find(watch(facts), flat())), facts
    assert "plateau" not in kinds(find(watch(), (replace(seen, lr=None) for seen in flat())))


def test_a_plateau_at_what_frequencies_alone_give() -> None:
    for entropy, told in ((3.05, True), (2.95, True), (3.2, False), (None, False)):
        [finding] = find(watch(replace(BYTES, entropy=entropy)), flat())
        assert ("how often each token occurs" in finding.cause) is told, entropy


def test_a_plateau_names_the_layers_without_gradient() -> None:
    w = watch()
    w.detailed(1, detail(body=0.0))
    [finding] = find(w, flat())
    assert "no gradient in 1 of 2 layers (body)" in finding.cause


# ---- how a run begins


@pytest.mark.parametrize(("vocab", "first", "found"), [
    (256, 5.545, None), (256, 5.7, None), (256, 6.8, None), (256, 7.0, "bad-init"), (256, 25.0, "bad-init"),
    (256, 5.3, None), (256, 5.2, "leak"), (256, 0.4, "leak"),
    (50257, 10.99, None), (50257, 12.4, None), (50257, 13.6, "bad-init"), (50257, 10.2, "leak"),
])  # fmt: skip
def test_the_first_loss(vocab: int, first: float, found: str | None) -> None:
    facts = replace(BYTES, vocab_size=vocab)
    told = see(watch(facts), 1, first).findings
    assert kinds(told) == ([found] if found else [])
    assert all(f"ln({vocab})" in finding.message for finding in told)
    # Where a tenth of the tokens is that before, a model with tied embeddings begins as one that knows them.
    repeated = see(watch(replace(facts, repeats=0.1)), 1, first).findings
    assert kinds(repeated) == ([] if 0.85 * math.log(vocab) < first < math.log(vocab) else [found] if found else [])
    assert see(watch(replace(facts, fresh=False)), 1, first).findings == []
    assert see(watch(facts), 2, first).findings == [], "only before the first update"


def test_a_leak_by_the_causality_probe() -> None:
    for gap, found in ((None, False), (0.0, False), (1e-7, False), (3e-4, True), (2.0, True)):
        told = watch().detailed(1, {"causality_gap": gap, "layers": {}})
        assert kinds(told) == ["leak"] * found, gap
        assert all("causal" in finding.cause and "inputs after it" in finding.message for finding in told)
    assert watch().detailed(40, {"layers": {}}) == []


def test_a_leak_by_a_loss_too_low_for_text() -> None:
    collapsing = [Observation(s, NOTHING * 0.97**s + 0.1, 0.5, 1e-3) for s in range(2, 300)]
    [finding] = [f for f in find(watch(), collapsing) if f.kind == "leak"]
    # 0.1 ln(256) is passed at step 82.
    assert 82 <= finding.step <= 82 + 32
    assert (finding.action, finding.cause[:4]) == ("note", "data"), "tables and logs may be so"
    # What no data are, and what validation gives the lie to, is told again, and acted on.
    lower = [replace(seen, loss=seen.loss - 0.09) for seen in collapsing]
    assert [f.action for f in find(watch(on_leak="stop"), lower) if f.kind == "leak"] == ["note", "stop"]
    for val_loss, actions in ((0.6, ["note"]), (5.0, ["note", "stop"])):
        w = watch(on_leak="stop")
        told = find(w, collapsing[:120]) + w.validated(121, val_loss) + find(w, collapsing[120:])
        assert [f.action for f in told if f.kind == "leak"] == actions
    tuned = [Observation(s, 0.3, 0.5, 1e-3) for s in range(1, 100)]
    assert "leak" not in kinds(find(watch(replace(BYTES, fresh=False)), tuned)), "it could do that before"
    # It may be memory where the data have come round.
    assert "leak" not in kinds(find(watch(replace(BYTES, windows=16 * 60)), collapsing))
    assert "leak" not in kinds(find(watch(replace(BYTES, windows=None)), collapsing))


def detail(ratio: float | None = 1e-3, update: float = 1.0, **norms: float) -> dict[str, Any]:
    norms = {"head": 1.0} | norms
    return {"kind": "detail", "layers": {
        name: {"grad_norm": norm, "update_norm": update, "update_ratio": ratio, "frozen": 0.0} for name, norm in norms.items()
    }}  # fmt: skip


def still(
    level: float = NOTHING, norm: float | None = 0.5, lr: float | None = 1e-3, steps: int = 400, first: float = NOTHING
) -> Any:
    dice = random.Random(4)
    for step in range(1, steps + 1):
        yield Observation(step, first if step == 1 else level + dice.gauss(0, 0.01), norm, lr)


def one(w: Watch, seen: Any, kind: str) -> Finding:
    found = [f for f in find(w, seen) if f.kind not in ("clipping", "plateau")]
    assert kinds(found) == [kind], found
    return found[0]


def test_nothing_is_learnt_and_why() -> None:
    start = 200 + 10  # start_steps (a fifth of 1000 steps) and half the warmup
    finding = one(watch(), still(), "not-learning")
    assert start <= finding.step <= start + 16
    assert "ln(256) = 5.5452" in finding.message
    assert "it began at 5.5452" in finding.message
    assert "gradient norm 0.5" in finding.message
    assert finding.cause == KINDS["not-learning"].cause
    w = watch()
    w.detailed(1, detail())
    assert "targets have little to do with the inputs" in one(w, still(), "not-learning").cause
    w = watch()
    w.detailed(1, detail(body=0.0))
    assert "no gradient in 1 of 2 layers (body)" in one(w, still(), "not-learning").cause
    w = watch()
    w.detailed(1, detail(update=0.0, ratio=0.0))
    assert "weights do not change although they have gradients" in one(w, still(), "not-learning").cause
    assert "gradients vanish (norm 1.0e-09)" in one(watch(), still(norm=1e-9), "not-learning").cause
    # Also where it begins above ln(vocabulary), and stays there.
    assert "it began at 6.5" in one(watch(), still(6.5, first=6.5), "not-learning").message
    # Of a model that is not ours only ln(vocabulary) is known.
    assert kinds(find(watch(replace(BYTES, fresh=False)), still(6.5, first=6.5))) == []


def test_dead_layers() -> None:
    def look(*dead: str, trains: bool = True) -> dict[str, Any]:
        record = detail(**{name: 0.0 if name in dead else 1.0 for name in ("head", "a", "b", "c", "d", "e")})
        for layer in record["layers"].values():
            layer["trains"] = trains
        return record

    w = watch()
    assert w.detailed(1, look("a", "b", "c", "d", "e")) == [], "all but the head, which begins with 0"
    assert w.detailed(100, look("f")) == []
    assert w.detailed(200, look("a", "b")) == []
    [finding] = w.detailed(300, look("b", "c"))
    assert (finding.kind, finding.action) == ("dead-layers", "warn")
    assert "no gradient in 1 of 6 layers (b), in two looks in a row" in finding.message
    assert w.detailed(400, look("b", "c")) == [], "told"
    w = watch()
    assert not any(w.detailed(s, look("a", "b", trains=False)) for s in (1, 100)), "frozen on purpose"
    assert not any(w.detailed(s, look("head", "a", "b", "c", "d", "e")) for s in (200, 300)), "no others learn"


def test_what_is_certain_is_told_at_once() -> None:
    finding = one(watch(), still(norm=0.0), "not-learning")
    assert finding.step == 16
    assert "exactly 0 since step 1" in finding.message
    assert "detached" in finding.cause
    assert "requires_grad" in finding.advice
    finding = one(watch(), still(lr=0.0), "not-learning")
    assert finding.step == 16
    assert "optim.lr" in finding.advice
    # Later, too: and again when it has gone and come.
    seen = [replace(falling(s), norm=0.0 if 300 < s <= 320 or 500 < s <= 520 else 0.8) for s in range(1, 600)]
    assert [(f.kind, f.step) for f in find(watch(), seen)] == [("not-learning", 316), ("not-learning", 516)]
    assert find(watch(), (falling(s, lr=0.0 if s > 990 else 1e-3) for s in range(1, 1001))) == [], "the end of a decay"


def test_slow_learning_is_no_matter_of_targets_while_the_loss_falls() -> None:
    for ratio, norm, cause in ((4.6e-5, 2.0, "learning rate"), (5e-4, 2.0, "learning rate"), (5e-4, 1e-7, "targets")):
        w = watch()
        w.detailed(1, detail(ratio=ratio))
        seen = [Observation(s, 5.6 if s == 1 else NOTHING - 0.08 - 0.0004 * s, norm, 1e-3) for s in range(1, 400)]
        assert cause in one(w, seen, "slow-learning").cause, (ratio, norm)


def test_slow_learning() -> None:
    creeping = [Observation(s, NOTHING - 0.001 * s, 2.0, 1e-6) for s in range(1, 600)]
    finding = one(watch(), creeping, "slow-learning")
    assert 210 <= finding.step <= 226
    assert "lr 1.00e-06" in finding.message
    assert "optim.lr" in finding.advice
    # A loss that cannot be told from one that stands: the updates tell.
    w = watch()
    w.detailed(1, detail(ratio=1e-6))
    finding = one(w, still(), "slow-learning")
    assert "an update is 1.0e-06 of a layer's weights" in finding.message
    # Over once the loss has come far enough below ln(vocabulary), and never again.
    w = watch()
    find(w, (Observation(s, NOTHING - 0.003 * s, 2.0, 1e-6) for s in range(1, 600)))
    assert w.learning.learned
    assert find(w, still(norm=0.5)) == [] or "learning" not in str(kinds(find(w, still(norm=0.5))))


@pytest.mark.parametrize("steps", [100, 300, 1000, 20_000])
def test_healthy_short_and_long_runs_learn(steps: int) -> None:
    facts = replace(BYTES, steps=steps, warmup=steps // 10)
    assert find(watch(facts), (falling(s, random.Random(s)) for s in range(1, min(steps, 1500) + 1))) == []


def test_a_run_that_goes_on_from_another_is_not_judged_by_its_beginning() -> None:
    facts = replace(BYTES, fresh=False)
    assert find(watch(facts), (Observation(s, 1.5 - 1e-4 * s, 0.5, 1e-5) for s in range(1, 600))) == []


# ---- norms


def test_a_large_norm() -> None:
    seen = [replace(falling(s), norm=11.0 + s % 3) for s in range(1, 400)]
    found = find(watch(replace(BYTES, grad_clip=0.0)), seen)
    assert [(f.kind, f.step, f.since) for f in found] == [("large-norm", 128, 1)]
    assert "11 at least, 12 in the middle" in found[0].message
    seen[100] = replace(seen[100], norm=9.0)
    assert [f.step for f in find(watch(replace(BYTES, grad_clip=0.0)), seen)] == [256], "one below in the first window"


def test_clipping() -> None:
    def often(share: float) -> list[Observation]:
        return [replace(falling(s), norm=1.5 if s % 100 < 100 * share else 0.9) for s in range(1, 400)]

    found = find(watch(), often(0.95))
    # Not in the first window, nor in warmup, where it is usual.
    assert [(f.kind, f.action, f.step) for f in found] == [("clipping", "note", 256)]
    assert [f.step for f in find(watch(replace(BYTES, warmup=200)), often(0.95))] == [384]
    assert "clipped to 1" in found[0].message
    assert find(watch(), often(0.85)) == []
    for unclipped in (0.0, None):
        assert find(watch(replace(BYTES, grad_clip=unclipped)), often(1.0)) == []


# ---- overfitting


def validate(val: list[float], train: list[float], windows: int = 320, **changes: Any) -> list[tuple[str, int]]:
    w = watch(replace(BYTES, windows=windows), **changes)
    return [(f.kind, (f.step - 100) // 20) for f in learn_and_validate(w, val, train)]


def learn_and_validate(w: Watch, val: list[float], train: list[float]) -> list[Finding]:
    found = []
    for k, (v, t) in enumerate(zip(val, train, strict=True), 1):
        for step in range(20 * k - 19, 20 * k + 1):
            see(w, step + 100, t)
        found += w.validated(20 * k + 100, v)
    return found


def test_overfitting() -> None:
    train = [3.0 - 0.1 * k for k in range(10)]
    rising = [3.0, 2.8, 2.7, 2.75, 2.8, 2.85, 2.9, 3.0, 3.1, 3.2]
    assert validate(rising, train) == [("overfitting", 6)], "the third above the best, once"
    assert validate(rising, train, overfit_evals=2) == [("overfitting", 5)]
    assert validate(rising, train, windows=100_000) == [("overfitting", 6)]
    w = watch(replace(BYTES, windows=100_000), on_overfitting="stop")
    [finding] = learn_and_validate(w, rising, train)
    assert (finding.action, "do not see the same" in finding.cause) == ("warn", True), (
        "not by heart, what is seen for the first time"
    )
    w = watch(replace(BYTES, windows=16 * 260), on_overfitting="stop")
    assert [(f.step, f.action) for f in learn_and_validate(w, rising, train)] == [(220, "warn"), (260, "stop")], (
        "and then it is"
    )
    assert validate(rising, train, windows=16) == [], "one batch is meant to be learnt by heart"
    assert validate(rising, [2.0] * 10) == [], "the training loss does not fall"
    assert validate(rising, [2.0 + 0.1 * k for k in range(10)]) == [], "both rise: that is another trouble"
    assert validate([3.0, 2.8, 2.7] + [2.705, 2.71, 2.702] * 2 + [2.7], train) == [], "within 1 %: noise"
    assert validate([3.0, 2.8, 2.9, 2.9, 2.7, 2.8, 2.8, 2.6, 2.7, 2.7], train) == [], "a better one in between"


def test_validations_that_say_nothing() -> None:
    w = watch()
    assert w.validated(10, 3.0) == [], "before any step"
    found = [w.validated(20 + k, loss) for k, loss in enumerate([math.nan, math.inf, 3.0, 3.1, math.nan])]
    assert [kinds(f) for f in found] == [["non-finite"], [], [], [], ["non-finite"]], (
        "told once, until there is a number again"
    )
    assert (found[0][0].message, found[0][0].action) == ("validation loss nan.", "warn")
    assert w.overfitting.best is None, "before any step"
    assert watch(on_non_finite="off").validated(20, math.nan) == []


# ---- time and memory


def steady(steps: int = 700, **columns: Any) -> list[Observation]:
    """columns: name -> f(step)"""
    return [replace(falling(s), **{name: f(s) for name, f in columns.items()}) for s in range(1, steps + 1)]


def test_data_starvation() -> None:
    found = find(watch(), steady(step_seconds=lambda s: 0.5, data_seconds=lambda s: 0.1))
    assert [(f.kind, f.step) for f in found] == [("data-starvation", 128)]
    assert "20% of their time (99.2 ms a step)" in found[0].message
    # Every tenth step is enough, if it is long; one long wait is an accident.
    assert find(
        watch(), steady(step_seconds=lambda s: 2.0 if s % 10 == 0 else 0.5, data_seconds=lambda s: 1.5 * (s % 10 == 0))
    )
    assert not find(
        watch(), steady(step_seconds=lambda s: 60.5 if s == 50 else 0.5, data_seconds=lambda s: 60.0 * (s == 50))
    )
    assert not find(watch(), steady(step_seconds=lambda s: 0.5, data_seconds=lambda s: 0.04))
    # Longer than all steps of the window before it, of which it is not one, and the only one.
    assert not find(watch(), steady(step_seconds=lambda s: 0.03, data_seconds=lambda s: 5.0 * (s == 3)))


def test_a_slow_rank_is_named() -> None:
    def ranks(who: Any, own: float) -> list[Observation]:
        return steady(slowest_rank=who, own_seconds=lambda s: own, median_own_seconds=lambda s: 0.2)

    found = find(watch(), ranks(lambda s: 5 if s % 10 else 2, 0.3))
    assert [(f.kind, f.step) for f in found] == [("slow-rank", 128)]
    assert found[0].message.startswith("rank 5 was the slowest in 116 of the last 128 steps: 0.3 s a step")
    assert not find(watch(), ranks(lambda s: s % 8, 0.3)), "now this one, now that"
    assert not find(watch(), ranks(lambda s: 5, 0.25)), "not by so much"


def test_a_drop_of_throughput() -> None:
    found = find(watch(), steady(tokens_per_sec=lambda s: 1000.0 if s < 400 else 600.0))
    assert [(f.kind, f.step, f.since) for f in found] == [("throughput-drop", 512, 385)]
    assert "600 tokens per second (median of 128 steps), 40% below the 1,000" in found[0].message
    assert not find(watch(), steady(tokens_per_sec=lambda s: 1000.0 if s < 400 else 800.0))
    assert not find(watch(), steady(tokens_per_sec=lambda s: 10.0 if s % 3 == 0 else 1000.0)), "slow steps, fast median"


def test_memory_that_creeps_up() -> None:
    found = find(watch(), steady(memory_gib=lambda s: 4.0 + 0.003 * s))
    assert [f.kind for f in found] == ["memory-growth"]
    assert found[0].step <= 512
    assert "3 GiB in 1000 steps" in found[0].message
    # Slowly, over a long run: 12 % in 10,000 steps.
    slow = find(watch(replace(BYTES, steps=None)), steady(12_000, memory_gib=lambda s: 4.0 + 0.00005 * s))
    assert [f.kind for f in slow] == ["memory-growth"]
    assert slow[0].step <= 12_000
    calm = {
        "warms up": lambda s: 6.0 - 3 * 0.9**s,
        "flattens": lambda s: 4.0 + 2.0 * (1 - math.exp(-s / 150)),
        "one step up": lambda s: 4.0 + 3.0 * (s > 300),
        "saw teeth": lambda s: 4.0 + 0.01 * (s % 100),
        "small": lambda s: 0.1 + 0.00005 * s,
    }
    for name, memory in calm.items():
        assert not find(watch(), steady(memory_gib=memory)), name


# ---- all together


def test_unknown_numbers_keep_the_rules_silent() -> None:
    seen = [Observation(s, falling(s, random.Random(s)).loss) for s in range(1, 1000)]
    assert find(Watch(knobs.Watch(), Facts()), seen) == []
    explodes = [Observation(o.step, o.loss) for o in exploding(300, 2.0)]
    assert kinds(find(Watch(knobs.Watch(), Facts()), explodes)) == ["divergence"]
    assert kinds(find(Watch(knobs.Watch(), Facts()), (Observation(s, 3.0) for s in range(1, 9000)))) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_log_of_a_short_run(seed: int) -> None:
    for noise, floor in ((0.03, 1.3), (0.15, 1.3)):
        facts = Facts(256, 1500, 1e-3, 50, None, 0.0, 10**6, 16, True)
        for constant in (False, True):
            assert find(watch(facts), logs.healthy(seed, facts, noise=noise, floor=floor, constant=constant)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("noise", "correlation", "constant", "power"), [
    (0.03, 0.2, False, 0.3), (0.03, 0.2, True, 0.3), (0.06, 0.6, False, 0.15),
])  # fmt: skip
def test_a_healthy_log_of_a_long_run(seed: int, noise: float, correlation: float, constant: bool, power: float) -> None:
    """20,000 steps of something like GPT-2: nothing is found."""
    seen = logs.healthy(seed, noise=noise, correlation=correlation, constant=constant, power=power)
    assert find(watch(logs.GPT2), seen) == []


def damaged(at: int, damage: Any, steps: int = 700) -> list[Observation]:
    facts = replace(logs.GPT2, steps=at + steps)
    return [damage(seen, seen.step - at) if seen.step >= at else seen for seen in logs.healthy(7, facts)]


@pytest.mark.parametrize(("kind", "within", "damage"), [
    ("spike", 0, lambda o, t: replace(o, loss=o.loss + 0.5 * (t < 5), norm=o.norm * (4 if t < 5 else 1))),
    ("spike", 0, lambda o, t: replace(o, loss=o.loss * (4 if t < 2 else 1))),
    ("divergence", 75, lambda o, t: replace(o, loss=o.loss + 0.02 * t)),
    ("divergence", 70, lambda o, t: replace(o, loss=o.loss + 5)),
    ("non-finite", 0, lambda o, t: replace(o, loss=math.nan, norm=math.nan, finite=False) if t < 3 else o),
    ("large-norm", 256, lambda o, t: replace(o, norm=12.0)),
    ("data-starvation", 256, lambda o, t: replace(o, data_seconds=0.06)),
    ("slow-rank", 256, lambda o, t: replace(o, slowest_rank=3, own_seconds=0.28)),
    ("throughput-drop", 256, lambda o, t: replace(o, tokens_per_sec=o.tokens_per_sec * 0.6)),
    ("memory-growth", 640, lambda o, t: replace(o, memory_gib=o.memory_gib + 0.03 * t)),
    ("not-learning", 16, lambda o, t: replace(o, norm=0.0)),
])  # fmt: skip
def test_a_fault_in_a_healthy_log_is_found_in_time(kind: str, within: int, damage: Any) -> None:
    at = 1500
    found = [f for f in find(watch(logs.GPT2), damaged(at, damage)) if f.step >= at and f.kind != "clipping"]
    assert kinds(found)[0] == kind
    assert at <= found[0].step <= at + within
    assert set(kinds(found)) <= {kind, "clipping", "divergence" if kind == "spike" else kind}


def eventful(steps: int = 900) -> list[tuple[str, Any]]:
    """Calls of a watch in which much goes wrong."""
    dice = random.Random(11)
    calls: list[tuple[str, Any]] = []
    for s in range(1, steps + 1):
        seen = falling(s, dice)
        bad = dice.random() < 0.01
        loss = math.nan if bad else seen.loss * dice.choice([1.0] * 40 + [5.0]) + (2.0 if 300 < s < 420 else 0.0)
        own = dice.uniform(0.2, 0.4)
        calls.append(("step", Observation(
            s, loss, math.nan if bad else 12.0 if 500 < s < 800 else dice.uniform(0.5, 2.5), 0.0 if 600 < s < 640 else 1e-3,
            not bad, own + 0.1, 0.3 * own * (s > 400), 1000 / own * (0.5 if s > 700 else 1), 4 + 0.01 * s,
            dice.choice([1, 1, 1, 1, 1, 1, 0]), 2 * own, own,
        )))  # fmt: skip
        if s % 30 == 0:
            calls.append(("eval", (s, 3.0 - 0.01 * s + (0.02 * (s - 500) if s > 500 else 0))))
        if s % 50 == 0 or s == 1:
            calls.append(("detail", (s, detail(body=dice.choice([0.0, 1.0])))))
    return calls


def play(w: Watch, calls: list[tuple[str, Any]]) -> list[str]:
    """repr: NaN is not equal to itself"""
    told = []
    for kind, what in calls:
        if kind == "step":
            told.append(repr(w.observe(what)))
        else:
            told += map(repr, w.validated(*what) if kind == "eval" else w.detailed(*what))
    return told


def test_it_resumes_identically() -> None:
    calls = eventful()
    facts = replace(BYTES, steps=600, setup="2")
    whole = watch(facts)
    told = [play(whole, [call]) for call in calls]
    found = {kind for kind in KINDS if f"kind='{kind}'" in "".join(line for lines in told for line in lines)}
    assert len(found) >= 9, found  # else the test would prove little
    for cut in (0, 1, 57, 150, 330, 335, 500, 640, 733, len(calls) - 1):
        first = watch(facts)
        play(first, calls[:cut])
        saved = json.dumps(first.state(), allow_nan=False)  # as a checkpoint keeps it
        assert len(saved) < 20_000
        kept = first.state()
        play(first, calls[cut:])
        assert json.dumps(kept, allow_nan=False) == saved, "a state that was taken does not change any more"
        second = watch(facts)
        second.load(json.loads(saved))
        assert json.dumps(second.state()) == saved
        assert [play(second, [call]) for call in calls[cut:]] == told[cut:], cut


def test_a_smaller_window_after_a_resume() -> None:
    w = watch(window=8)
    for step in range(8):
        see(w, step + 2, 10.0 + step, 1.0)
    smaller = watch(window=2)
    smaller.load(w.state())
    assert list(smaller.level.losses.values) == [16.0, 17.0]
    assert smaller.level.losses.ordered == [16.0, 17.0]
    find(smaller, steady(300))


def test_another_number_of_ranks_is_another_pace() -> None:
    """Half the ranks, half the speed: nothing has dropped."""
    before, after = steady(400, tokens_per_sec=lambda s: 1000.0), steady(700, tokens_per_sec=lambda s: 500.0)[400:]
    for ranks, found in ((2, ["throughput-drop"]), (1, [])):
        w = watch(replace(BYTES, setup="2 ranks"))
        find(w, before)
        resumed = watch(replace(BYTES, setup=f"{ranks} ranks"))
        resumed.load(w.state())
        assert kinds(find(resumed, after)) == found


def test_the_advice_fits_the_precision() -> None:
    for precision, fp16 in (("fp16", True), ("fp32", False), ("bf16", False), (None, True)):
        [finding] = see(watch(replace(BYTES, precision=precision)), 5, 2.0, math.inf, finite=False).findings
        assert ("fp16" in finding.cause) is fp16
        assert ("run.precision=bf16" in finding.advice) is fp16


def test_off_is_not_told() -> None:
    off: dict[str, Any] = {
        name: "off" for name in knobs.Watch.model_fields if name.startswith("on_") and name != "on_non_finite"
    }
    assert {line.partition("kind=")[2][:12] for line in play(watch(**off), eventful()) if "kind=" in line} == {
        "'non-finite'"
    }


def test_the_window_knows_its_median_and_spread() -> None:
    dice, window = random.Random(1), Window(50)
    for _ in range(500):
        window.add(round(dice.gauss(3, 0.5), 1))  # many are equal
        assert window.ordered == sorted(window.values)
    wide = Window(5000, (dice.gauss(3, 0.5) + k / 500 for k in range(5000)))
    assert wide.noise() == pytest.approx(0.5, rel=0.05), "the trend does not count"
    assert Window(5000, (dice.gauss(3, 0.5) for _ in range(5000))).spread() == pytest.approx(0.5, rel=0.05)


# ---- records


def record_of(seen: Observation, after: Observation | None) -> dict[str, Any]:
    """As the loop writes it: times are of the step itself, which the next observation has."""
    known = asdict(seen) | {
        name: getattr(after, name) if after else None for name in ("step_seconds", "tokens_per_sec")
    }
    known["grad_norm_pre_clip"], known["skipped"] = known.pop("norm"), not known.pop("finite")
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in known.items()}
    return {"kind": "step", **clean}


def records_of(calls: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    steps = [what for kind, what in calls if kind == "step"]
    after = dict(zip([s.step for s in steps], [*steps[1:], None], strict=True))
    made = []
    for kind, what in calls:
        if kind == "step":
            made.append(record_of(what, after[what.step]))
        elif kind == "eval":
            made.append({"kind": "eval", "step": what[0], "set": "val", "val_loss": what[1]})
            made.append({"kind": "eval", "step": what[0], "set": "other", "val_loss": 9.0})
        else:
            made.append({**what[1], "step": what[0]})
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_replay_of_the_records_finds_what_was_found_live() -> None:
    calls = eventful()
    first = calls[0][1]
    calls[0] = ("step", replace(first, step_seconds=None, tokens_per_sec=None))  # there was no step before
    facts = replace(BYTES, steps=600)
    w, live = watch(facts), []
    for kind, what in calls:
        live += (
            w.observe(what).findings if kind == "step" else w.validated(*what) if kind == "eval" else w.detailed(*what)
        )
    again = replay(records_of(calls), knobs.Watch(), facts)
    assert again == live
    assert len(set(kinds(live))) >= 9


def test_a_replay_over_a_resume() -> None:
    """No times of the step before at the beginning of an attempt; on other ranks another pace."""
    steps = steady(700, tokens_per_sec=lambda s: 1000.0 if s <= 400 else 500.0, step_seconds=lambda s: 1.0)
    made = [record_of(seen, after) for seen, after in zip(steps, [*steps[1:], None], strict=True)]
    for world_size, found in ((2, ["throughput-drop"]), (1, [])):
        attempts: list[dict[str, Any]] = [{"kind": "start", "step": 0, "world_size": 2}, *made[:400],
                    {"kind": "resume", "step": 400, "world_size": world_size}, *made[400:]]  # fmt: skip
        assert kinds(replay(attempts, knobs.Watch(), replace(BYTES, setup=f"{world_size}"))) == found
    assert Observation.from_record(made[5], {}).tokens_per_sec is None
    assert Observation.from_record(made[5], made[4]).tokens_per_sec == made[4]["tokens_per_sec"]


def test_updates_that_were_skipped() -> None:
    """By the loop, since a number was not finite; or by the watch's order, with all numbers finite."""
    base = {"step": 7, "loss": 2.0, "grad_norm_pre_clip": 1.0, "lr": 1e-3}
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"skipped": False}, True),
        ({"skipped": True}, True),
        ({"skipped": True, "loss": None}, False),
        ({"skipped": True, "grad_norm_pre_clip": None}, False),
    ]
    for change, finite in cases:
        assert Observation.from_record({**base, **change}, {}).finite == finite, change
    assert math.isnan(Observation.from_record({**base, "skipped": True, "loss": None}, {}).loss)
    foreign = Observation.from_record({"step": 3, "loss": 2.0}, {})
    assert foreign == Observation(3, 2.0)


def test_a_foreign_log() -> None:
    """Every 10th step, losses only, and a validation."""
    made: list[dict[str, Any]] = [
        {"kind": "step", "step": o.step, "loss": o.loss} for o in exploding(3000, 3.0) if o.step % 10 == 0
    ]
    made.insert(5, {"kind": "eval", "step": 55, "val_loss": 3.0})
    found = replay(made, knobs.Watch(), Facts(vocab_size=256))
    assert kinds(found) == ["divergence"]
    assert 3000 <= found[0].step <= 3200


# ---- findings


def test_a_finding_as_a_record_and_as_a_line() -> None:
    finding = see(watch(), 1, math.nan, math.inf, finite=False).findings[0]
    record = json.loads(json.dumps(finding.record(), allow_nan=False))
    assert record.keys() == {"kind", "step", "message", "cause", "advice", "action"}
    line = str(finding)
    assert "\n" not in line
    assert line.startswith("non-finite at step 1: ")
    assert "nan" in line
    assert "inf" in line


def test_every_kind_is_in_the_table() -> None:
    root = Path(findings.__file__).parent
    made = {
        call.args[0].value
        for path in root.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding" and call.args
        and isinstance(call.args[0], ast.Constant)
    }  # fmt: skip
    knobs_of = {name[3:].replace("_", "-") for name in knobs.Watch.model_fields if name.startswith("on_")}
    assert knobs_of <= KINDS.keys()
    assert made <= KINDS.keys()
    assert {name for name, kind in KINDS.items() if not kind.action} == knobs_of
    for name, kind in KINDS.items():
        assert kind.default_action(name) in findings.ACTIONS
        assert (kind.symptom[-1], kind.cause[-1], kind.advice[-1]) == (kind.symptom[-1], ".", ".")
    lines = findings.table().splitlines()
    assert len(lines) == 2 + len(KINDS)
    assert len({line.count("|") for line in lines}) == 1
    counted = Counter(line.split("|")[-2].strip() for line in lines[2:])
    assert counted["warn"] > counted["note"] > 0


def test_the_gravest_action() -> None:
    def of(*actions: str) -> str:
        return findings.gravest([Finding("spike", 1, "", "", "", action) for action in actions])

    assert of() == ""
    assert of("note", "warn") == "warn"
    assert of("warn", "rollback", "skip") == "rollback"
    assert of("stop", "rollback") == "stop"


# ---- logs that do not have all steps


@pytest.mark.parametrize("every", [5, 10, 50, 100, 200])
def test_few_losses_in_a_part_are_no_rate_too_high(every: int) -> None:
    """A healthy run whose noise is ten times what a plateau is, at a constant rate."""
    for seed in range(8):
        dice = random.Random(seed)
        seen = []
        for step in range(every, 40_001, every):
            loss = 2.5 + 8 * math.exp(-step / 1500) - 0.05 * math.log10(step) + dice.gauss(0, 0.05)
            seen.append(Observation(step, loss, None, 1e-3))
        assert not [f for f in find(watch(Facts()), seen) if "become harder" in f.cause], seed


def test_few_losses_in_a_part_and_a_rate_that_is_too_high() -> None:
    """It is still found, also with a state of before the losses of a block were counted."""
    dice = random.Random(0)
    seen = [
        Observation(s, (3.0 if 4000 < s <= 8000 else 3.2) + dice.gauss(0, 0.05), None, 1e-3)
        for s in range(50, 20_001, 50)
    ]
    [finding] = [f for f in find(watch(Facts()), seen) if "become harder" in f.cause]
    assert 8000 + 1000 <= finding.step <= 8000 + 2500
    w = watch(Facts())
    find(w, seen[:180])
    state = json.loads(json.dumps(w.state()))
    del state["plateau"]["last"]
    state["plateau"]["blocks"] = [block[:2] for block in state["plateau"]["blocks"]]
    state["plateau"]["low"] = state["plateau"]["low"][:2]
    older = watch(Facts())
    older.load(state)
    assert [f.step for f in find(older, seen[180:]) if "become harder" in f.cause] == [finding.step]


def test_a_window_is_as_many_steps_as_its_records_span() -> None:
    facts = replace(BYTES, steps=None)
    seen = [
        replace(o, step=10 * o.step, norm=20.0, step_seconds=1.0, data_seconds=0.5, slowest_rank=1, own_seconds=0.4,
                median_own_seconds=0.2, tokens_per_sec=1000.0 if o.step <= 128 else 500.0)
        for o in steady(256)
    ]  # fmt: skip
    told = {f.kind: f.message for f in find(watch(facts), seen)}
    assert "in all of 128 records of the last 1,280 steps: 20 at least" in told["large-norm"]
    assert told["clipping"].startswith("100% of 128 records of the last 1,280 updates were clipped to 1;")
    assert told["data-starvation"].startswith("128 records of the last 1,280 steps waited 63.5 s for data")
    assert told["slow-rank"].startswith("rank 1 was the slowest in 128 of 128 records of the last 1,280 steps: 0.4 s")
    assert "(median of 128 records of 1,280 steps), 50% below" in told["throughput-drop"]
    every = {f.kind: f.message for f in find(watch(facts), [replace(o, step=o.step // 10) for o in seen])}
    assert "in all of the last 128 steps: 20 at least" in every["large-norm"]
    assert "(median of 128 steps), 50% below" in every["throughput-drop"]


# ---- whatever it is told


ODD = [0.0, 1e-300, 1e-9, 3e38, -1.0, 0.1, 1.0, 3.0, 5.5, 1e6, math.inf, math.nan]
LENGTHS = [x for x in ODD if x >= 0 and math.isfinite(x)]


def anything(dice: random.Random, usual: list[float], steady: bool, step: int) -> Observation:
    """Mostly the usual numbers, if it is to be steady, and any others."""

    def pick(i: int, of: list[float]) -> float:
        return usual[i] if steady and dice.random() < 0.97 else dice.choice(of)

    loss = pick(0, ODD)
    norm = dice.choice([None, *3 * [pick(1, [*LENGTHS, math.inf, math.nan])]])
    finite = math.isfinite(loss) and (norm is None or math.isfinite(norm))
    lr, *times = (dice.choice([None, pick(i, LENGTHS), pick(i, LENGTHS)]) for i in range(2, 7))
    seconds, waited, speed, memory = times
    return Observation(
        step,
        loss,
        norm,
        lr,
        finite,
        seconds,
        waited,
        speed,
        memory,
        dice.choice([None, 0, 3]),
        pick(7, LENGTHS),
        pick(8, LENGTHS),
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_number_breaks_it(seed: int) -> None:
    """An exception here would end a training run."""
    dice = random.Random(seed)
    facts = Facts(
        dice.choice([None, 2, 256]), dice.choice([None, 1, 20, 200]), dice.choice([None, 0.0, 1e-3]), dice.choice([None, 0, 10]),
        dice.choice([None, 0, 30]), dice.choice([None, 0.0, 1.0]), dice.choice([None, 1, 100, 10**6]), dice.choice([None, 1, 16]),
        dice.random() < 0.5, entropy=dice.choice([None, 0.0, 3.0]), repeats=dice.choice([0.0, 1.0]),
    )  # fmt: skip
    actions = {
        f"on_{kind}": dice.choice(findings.ACTIONS)
        for kind in ("spike", "divergence", "plateau", "leak", "overfitting")
    }
    w = watch(facts, window=dice.choice([1, 2, 8, 128]), **actions)
    usual, steady = [dice.choice(LENGTHS) for _ in range(9)], dice.random() < 0.5
    for step in range(1, 150):
        w.observe(anything(dice, usual, steady, step))
        if step % 20 == 0:
            w.validated(step, dice.choice(ODD))
            record = detail(dice.choice([None, 0.0, 1e-3]), body=dice.choice([0.0, 1.0])) | {
                "causality_gap": dice.choice([None, 1.0])
            }
            w.detailed(step, record)
            saved = json.dumps(w.state(), allow_nan=False)
            w = Watch(w.cfg, facts)
            w.load(json.loads(saved))
