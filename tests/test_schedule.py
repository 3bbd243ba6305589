"""The learning rate as a function: values from published faults, exact at both ends, continuous, monotone, printed as it is."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import command_line, config
from kamui_dist.plan import make_plan
from kamui_dist.schedule import draw, lr_at
from tests.test_config import handlers  # noqa: F401 - a fixture

KINDS = ["constant", "linear", "cosine", "wsd"]
SHAPES = ["linear", "cosine", "sqrt", "exponential"]


def rates(total: int, upto: int | None = None, **options: Any) -> list[float]:
    """Of updates 1, 2, ..."""
    given: dict[str, Any] = {"kind": "cosine", "peak": 1e-3, "floor": 0.0, "warmup": 0, **options}
    return [lr_at(step, total=total, **given) for step in range(upto or total)]


# ---- published faults


def test_the_first_update_has_a_rate() -> None:
    """D01."""
    for kind in KINDS:
        assert rates(110, kind=kind, warmup=10, decay=10)[0] == pytest.approx(1e-4)


def test_no_warmup() -> None:
    """D02."""
    for kind, shape in itertools.product(KINDS, SHAPES):
        assert rates(10, kind=kind, decay=4, decay_shape=shape, floor=1e-5)[0] == 1e-3
    assert rates(10, warmup=0) == rates(10, warmup=1)


def test_a_warmup_as_long_as_the_run() -> None:
    """D03."""
    for kind in KINDS:
        assert rates(5, kind=kind, warmup=5)[-1] == 1e-3
        assert len(set(rates(5, kind=kind, warmup=5))) == 5


def test_borders_of_the_phases() -> None:
    """D06. The convention: update `warmup` has the peak, update total - decay is the last with the peak, the last has the floor."""
    found = rates(10, kind="wsd", decay_shape="linear", warmup=4, decay=4, peak=0.1)
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025, 0.0], abs=1e-12)
    assert found[3] == found[5] == 0.1
    assert found[9] == 0.0


def test_cosine_reaches_its_floor_and_counts_from_the_end_of_warmup() -> None:
    """D07."""
    found = rates(110, warmup=10, floor=1e-4)
    assert found[59] == pytest.approx(5.5e-4, rel=1e-3)
    assert found[109] == 1e-4
    assert all(a > b for a, b in itertools.pairwise(found[99:]))


def test_past_the_end() -> None:
    """D08; A09: the multiplier never goes below the floor."""
    for kind, shape in itertools.product(KINDS, SHAPES):
        options: dict[str, Any] = {
            "kind": kind,
            "decay_shape": shape,
            "decay": 5,
            "warmup": 3,
            "floor": 1e-4,
            "total": 20,
            "peak": 1e-3,
        }
        for step in (20, 39, 199, 10**12):
            assert lr_at(step, **options) == (1e-3 if kind == "constant" else 1e-4)
    assert min(rates(5, upto=40, warmup=1, floor=1e-4)) == 1e-4


def test_one_step_runs() -> None:
    for kind, shape, warmup in itertools.product(KINDS, SHAPES, (0, 1)):
        assert rates(1, kind=kind, decay_shape=shape, warmup=warmup, floor=1e-5) == [1e-3]
    assert rates(1, kind="wsd", decay=1, floor=1e-5) == [1e-3], "no warmup counts as a warmup of one update"
    assert rates(2, floor=1e-5) == [1e-3, 1e-5]


def test_shapes_of_the_decay() -> None:
    """At a quarter and at half of it."""
    expected = {
        "linear": (0.75, 0.5), "cosine": ((1 + math.sqrt(0.5)) / 2, 0.5), "sqrt": (0.5, 1 - math.sqrt(0.5)),
    }  # fmt: skip
    for shape, parts in expected.items():
        found = rates(200, kind="wsd", decay=100, decay_shape=shape, peak=1.0, floor=0.2)
        assert found[99] == 1.0
        assert (found[124], found[149]) == pytest.approx([0.2 + 0.8 * part for part in parts])
    found = rates(200, kind="wsd", decay=100, decay_shape="exponential", peak=1.0, floor=0.01)
    assert (found[124], found[149], found[199]) == (pytest.approx(0.01**0.25), pytest.approx(0.1), 0.01)


# ---- properties

curves = st.fixed_dictionaries({
    "kind": st.sampled_from(KINDS), "decay_shape": st.sampled_from(SHAPES), "peak": st.floats(1e-6, 10.0),
    "floor": st.floats(1e-3, 1.0),  # of the peak, see below
    "warmup": st.integers(0, 60), "decay": st.integers(0, 60), "more": st.integers(0, 60), "zero": st.booleans(),
})  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(curves)
def test_exact_at_both_ends_continuous_and_monotone(curve: dict[str, Any]) -> None:
    more, zero = curve.pop("more"), curve.pop("zero")
    peak, warmup, decay = curve["peak"], curve["warmup"], curve["decay"]
    exponential = curve["kind"] == "wsd" and curve["decay_shape"] == "exponential"
    floor = curve["floor"] = 0.0 if zero and not exponential else curve["floor"] * peak
    decays = curve["kind"] == "wsd"
    total = max(1, warmup + more + (decay if decays else 0))
    found = rates(total, **curve)
    ramp = max(warmup, 1)

    # Exact: the peak at the end of warmup; at the end the floor, where there is room for a decay.
    assert found[min(ramp, total) - 1] == (peak if total >= ramp else found[-1])
    length = {"constant": 0, "wsd": min(decay, total - ramp)}.get(curve["kind"], total - ramp)
    assert found[-1] == (floor if length > 0 else peak)
    assert max(found) <= peak * (1 + 1e-12)
    assert min(found) >= min(floor, peak / ramp) * (1 - 1e-12)
    assert found[0] > 0

    # Monotone: up in warmup, then never up.
    assert all(a < b for a, b in itertools.pairwise(found[:ramp]))
    assert all(a >= b for a, b in itertools.pairwise(found[ramp - 1 :]))

    # Continuous: no step down is larger than the steepest part of the shape allows.
    if length > 0:
        shape = curve["decay_shape"] if decays else curve["kind"]
        span = decay if decays else length
        part = 1 / span
        steepest = {
            "linear": (peak - floor) * part, "cosine": (peak - floor) * math.pi / 2 * part,
            "sqrt": (peak - floor) * math.sqrt(part), "exponential": peak * (1 - (floor / peak if floor else 1) ** part),
        }[shape]  # fmt: skip
        if not (decays and decay > total - ramp):  # no warmup counts as one update, which may be taken from the decay
            drops = [a - b for a, b in itertools.pairwise(found[ramp - 1 :])]
            assert max(drops) <= steepest * (1 + 1e-6) + 1e-12


# ---- drawn and printed


def test_draw() -> None:
    found = rates(1000, warmup=100, peak=6e-4)
    lines = draw(found, width=40, height=8).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith(" 6.00e-04 │")
    assert "3.00e-04" in lines[4]
    assert lines[-2].endswith("─" * 40)
    assert lines[-1].endswith("1000")
    assert max(map(len, lines)) <= 10 + 1 + 40
    picture = [line.partition("│")[2].ljust(40) for line in lines[:-2]]
    heights = ["".join(column).count("█") for column in zip(*picture, strict=True)]
    assert max(heights) == heights[4] == 8
    assert heights[0] < 2
    assert heights[-1] == 0
    for one in (draw([0.5]), draw([0.0, 0.0]), draw([1.0, 0.5, 0.25])):
        assert len(one.splitlines()) == 14


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "given.toml"
    path.write_text(
        '[optim]\nlr = 0.1\n[schedule]\nkind = "wsd"\ndecay_shape = "linear"\nwarmup = 4\ndecay = 4\n[train]\nsteps = 10\n'
    )
    return path


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "more", [[], ["schedule.kind=cosine", "schedule.min_lr=1e-3"], ["schedule.warmup=0", "train.steps=1"]]
)
def test_print_schedule_prints_what_the_loop_uses(
    toml: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "train.steps=1" in more:
        more = [*more, "schedule.decay=0"]
    with pytest.raises(SystemExit) as ended:
        command_line.begin([str(toml), "--print-schedule", *more])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    cfg, _ = config.load(toml, more)
    plan = make_plan(cfg, 1)
    printed = re.findall(r"update (\d+): (\S+)", out)
    assert {int(n) for n, _ in printed} >= {1, plan.steps}
    for n, rate in printed:
        expected = lr_at(
            int(n) - 1, kind=cfg.schedule.kind, peak=cfg.optim.lr, floor=cfg.schedule.min_lr, total=plan.steps,
            warmup=plan.warmup_steps, decay=plan.decay_steps, decay_shape=cfg.schedule.decay_shape,
        )  # fmt: skip
        assert rate == f"{expected:.3e}"
    assert f"warmup {plan.warmup_steps}, decay {plan.decay_steps}, total {plan.steps} updates" in out
