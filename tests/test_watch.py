"""The watch: the moving average, what a spike is, non-finite updates, and that it goes on after a resume as if nothing was."""

from __future__ import annotations

import json
import math
import random

from kamui_dist.watch import Watch


def watch(spike_factor: float = 3.0, window: int = 4, max_skipped: int = 3) -> Watch:
    return Watch(spike_factor, window, max_skipped)


def test_the_average_is_of_the_last_losses_before_this_one() -> None:
    w = watch()
    averages = [w.observe(i + 1, loss, 1.0, False)[0] for i, loss in enumerate([4.0, 2.0, 3.0, 3.0, 5.0, 1.0])]
    # The first has nothing before it and is its own average.
    assert averages == [4.0, 4.0, 3.0, 3.0, 3.0, 13 / 4]
    assert list(w.losses) == [3.0, 3.0, 5.0, 1.0]


def test_a_spike_is_judged_before_it_is_added_and_never_added() -> None:
    w = watch()
    for step in range(1, 5):
        assert w.observe(step, 1.0, 1.0, False) == (1.0, False, [])
    # If it were added first, the average would be 2 and 4 no spike (3 x 2 = 6).
    average, spike, [finding] = w.observe(5, 5.0, 2.0, False)
    assert (average, spike) == (1.0, True)
    assert (finding.kind, finding.step, finding.action) == ("spike", 5, "warn")
    assert "5" in finding.message
    assert "3 x its average 1" in finding.message
    assert finding.cause
    assert "optim.lr" in finding.advice
    # Not added: the next one of the same size is a spike too.
    assert w.observe(6, 5.0, 2.0, False)[:2] == (1.0, True)
    assert list(w.losses) == [1.0] * 4


def test_exactly_the_factor_is_no_spike() -> None:
    w = watch()
    w.observe(1, 2.0, 1.0, False)
    assert not w.observe(2, 6.0, 1.0, False)[1]
    w = watch()
    w.observe(1, 2.0, 1.0, False)
    assert w.observe(2, math.nextafter(6.0, 7.0), 1.0, False)[1]


def test_the_first_loss_is_never_a_spike() -> None:
    assert watch().observe(1, 1e30, 1.0, False)[1:] == (False, [])


def test_non_finite_losses_are_never_added_and_never_spikes() -> None:
    w = watch()
    w.observe(1, 1.0, 1.0, False)
    for step, bad in ((2, math.nan), (3, math.inf)):
        average, spike, [finding] = w.observe(step, bad, math.nan, True)
        assert (average, spike) == (1.0, False)
        assert (finding.kind, finding.action) == ("non-finite", "skip")
    assert list(w.losses) == [1.0]
    # A finite loss whose gradients overflowed: skipped, and its loss counts.
    _, spike, [finding] = w.observe(4, 1.2, math.inf, True)
    assert not spike
    assert list(w.losses) == [1.0, 1.2]


def test_nan_from_the_start() -> None:
    average, spike, [finding] = watch().observe(1, math.nan, math.nan, True)
    assert math.isnan(average)
    assert not spike
    assert finding.action == "skip"


def test_too_many_skipped_updates_in_a_row_stop_the_run() -> None:
    w = watch(max_skipped=3)
    actions = []
    for step, skipped in enumerate([True, True, False, True, True, True], 1):
        findings = w.observe(step, math.nan if skipped else 1.0, 1.0, skipped)[2]
        actions.append(findings[0].action if findings else None)
    assert actions == ["skip", "skip", None, "skip", "skip", "stop"]
    finding = w.observe(7, math.nan, 1.0, True)[2][0]
    assert finding.action == "stop"
    assert "4 in a row" in finding.message
    assert "watch.max_skipped = 3" in finding.advice
    assert watch(max_skipped=1).observe(1, math.nan, 1.0, True)[2][0].action == "stop"


def test_it_resumes_identically() -> None:
    rng = random.Random(7)
    stream = [(rng.choice([1.0, 1.1, 0.9, 5.0, math.nan, math.inf]) * rng.random(), rng.random()) for _ in range(200)]
    calls = [(step, loss, norm, not math.isfinite(loss)) for step, (loss, norm) in enumerate(stream, 1)]
    for cut in (0, 1, 57, 150):
        whole, first = watch(window=16, max_skipped=2), watch(window=16, max_skipped=2)
        for call in calls[:cut]:
            whole.observe(*call)
            first.observe(*call)
        second = watch(window=16, max_skipped=2)
        second.load(json.loads(json.dumps(first.state(), allow_nan=False)))  # as a checkpoint keeps it
        # repr: NaN is not equal to itself
        assert [repr(second.observe(*call)) for call in calls[cut:]] == [
            repr(whole.observe(*call)) for call in calls[cut:]
        ]


def test_a_smaller_window_after_a_resume() -> None:
    w = watch(window=8)
    for step in range(8):
        w.observe(step + 1, 10.0 + step, 1.0, False)
    smaller = watch(window=2)
    smaller.load(w.state())
    assert list(smaller.losses) == [16.0, 17.0]


def test_a_finding_as_a_record_and_as_a_line() -> None:
    finding = watch().observe(1, math.nan, math.inf, True)[2][0]
    record = json.loads(json.dumps(finding.record(), allow_nan=False))
    assert record.keys() == {"kind", "step", "message", "cause", "advice", "action"}
    line = str(finding)
    assert "\n" not in line
    assert line.startswith("non-finite at step 1: ")
    assert "nan" in line
    assert "inf" in line
