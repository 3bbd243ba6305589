"""Where the time went: the parts sum to the whole, and each second is counted where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui_dist.report import logs
from kamui_dist.report.ledger import PARTS, Ledger, account, split
from tests import made_runs, tiny


def seconds(books: Ledger) -> dict[str, float]:
    """Those that are not 0."""
    return {name: value / 1e6 for name, value in books.parts.items() if value}


def at(kind: str, time: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **values}


START = at("start", 100.0, step=0)
PLAIN = {"step_seconds": 1.0, "data_seconds": 0.0, "meet_seconds": 0.0}


def test_every_part_of_a_whole_run() -> None:
    """200 updates of 1 s; four validations of 2 s and saves of 0.5 s; a crash that cost 60 s; a rollback of 14 s."""
    books = account(made_runs.records())
    assert seconds(books) == pytest.approx({
        "productive": 200 * 0.85, "data": 200 * 0.05, "meet": 200 * 0.1, "eval": 8.0, "save": 2.0,
        "replayed": 20.0 + 10.0,
        "down": 60.0 - 20.0,
        "start": 10.0 + 5.0 + (14.0 - 10.0),  # the first start, the second, and going back
        "other": 4 * 0.1,  # the looks into the layers
    })  # fmt: skip
    assert (books.starts, books.rollbacks, books.lost_steps) == (2, 1, 30)
    assert books.goodput == pytest.approx(170 / 299.4)
    assert not books.unknown


def test_what_no_record_tells_is_unknown_and_not_zero() -> None:
    bare = {"step_seconds": 1.0, "data_seconds": 0.2}
    books = account(
        [START, at("step", 101.0, step=1, **bare), at("resume", 110.0, step=1), at("step", 111.0, step=2, **bare)]
    )
    assert books.unknown == {"replayed", "meet"}
    assert seconds(books) == pytest.approx({"productive": 1.6, "data": 0.4, "down": 9.0}), (
        "the crash's updates are in down"
    )
    assert account([START, at("step", 101.0, step=1, **PLAIN)]).unknown == set(), (
        "a run that was started once lost nothing"
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # Rank 0 waited itself: 1.0 = 0.3 (data) + 0.6 + 0.05 (meeting) + 0.05
        ({"data_seconds": 0.3, "compute_seconds": 0.6, "meet_seconds": 0.05, "update_seconds": 0.05},
         {"data": 0.3, "meet": 0.05, "productive": 0.65}),
        # Another rank waited 0.3 s: rank 0 spent them in the meeting
        ({"data_seconds": 0.3, "compute_seconds": 0.6, "meet_seconds": 0.35, "update_seconds": 0.05},
         {"data": 0.3, "meet": 0.05, "productive": 0.65}),
        # More than there is
        ({"data_seconds": 7.0, "compute_seconds": 0.6, "meet_seconds": 3.0}, {"data": 1.0, "meet": 0.0, "productive": 0.0}),
        ({"data_seconds": None}, {"data": 0.0, "meet": 0.0, "productive": 1.0}),
        ({"skipped": True}, {"data": 0.0, "meet": 0.0, "skipped": 1.0}),
    ],
)  # fmt: skip
def test_an_update_waits_once_for_what_any_rank_waits_for(record: dict[str, Any], expected: dict[str, float]) -> None:
    assert split({"step_seconds": 1.0, **record}) == pytest.approx(expected)


def test_a_save_beside_training_holds_the_update_that_follows_it() -> None:
    saved = {"stall_seconds": 0.5, "save_seconds": 3.0, "aside": True}
    books = account([
        START, at("step", 101.0, step=1, **PLAIN), at("step", 102.6, step=2, **PLAIN), at("step", 103.6, step=3, **PLAIN),
        at("checkpoint", 104.2, step=1, **saved), at("step", 104.6, step=4, **PLAIN),
    ])  # fmt: skip
    assert seconds(books) == pytest.approx({"productive": 4.0, "save": 0.5, "other": 0.1})
    early = account([START, at("step", 101.0, step=1, **PLAIN), at("checkpoint", 102.0, step=1, **saved),
                     at("step", 102.6, step=2, **PLAIN)])  # fmt: skip
    assert seconds(early) == pytest.approx({"productive": 2.0, "save": 0.5, "other": 0.1}), (
        "published before the next record"
    )


def test_a_log_that_was_only_appended_to() -> None:
    """Updates 2 and 3 stand in it twice; the first time was lost, the start-up before it was not."""
    again = at("resume", 110.0, step=1, lost_steps=2, lost_seconds=2.0)
    books = account([
        START, *(at("step", 103.0 + s, step=s, **PLAIN) for s in (1, 2, 3)), again,
        *(at("step", 110.0 + s - 1, step=s, **PLAIN) for s in (2, 3)),
    ])  # fmt: skip
    assert seconds(books) == pytest.approx({"start": 3.0, "productive": 3.0, "replayed": 2.0, "down": 4.0})


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    books = account(
        [START, at("step", 101.0, step=1, **PLAIN), at("resume", 50.0, step=1), at("step", 51.0, step=2, **PLAIN)]
    )
    assert seconds(books) == pytest.approx({"productive": 2.0})


KINDS = st.sampled_from(["start", "resume", "rollback", "step", "eval", "checkpoint", "detail", "end"])
NUMBER = st.one_of(st.none(), st.floats(0, 30), st.sampled_from([-1.0, 1e30, "x", True]))
FIELDS = ("step_seconds", "data_seconds", "compute_seconds", "meet_seconds", "update_seconds", "eval_seconds", "stall_seconds",
          "save_seconds", "lost_seconds")  # fmt: skip
RECORD = st.fixed_dictionaries(
    {"kind": KINDS, "step": st.integers(0, 20), "pause": st.integers(0, 40_000)},
    optional={**dict.fromkeys(FIELDS, NUMBER), "skipped": st.booleans(), "aside": st.booleans()},
)


@given(st.lists(RECORD, max_size=40), st.booleans())
def test_the_parts_always_sum_to_the_whole(made: list[dict[str, Any]], backwards: bool) -> None:
    """Whatever the records claim: every part is 0 or more, and together they are the time from the first record to the last."""
    now = 1_700_000_000_000  # milliseconds
    for k, record in enumerate(made):
        now += -record["pause"] if backwards and k % 5 == 4 else record["pause"]
        record["time"] = now / 1000
    books = account(made)
    assert set(books.parts) == set(PARTS)
    assert all(type(value) is int and value >= 0 for value in books.parts.values())
    if made and not backwards:
        assert books.total == 1000 * (now - round(1000 * made[0]["time"]))
    assert account([]).total == 0
    assert account([]).goodput is None


@pytest.mark.slow
def test_of_a_real_run_that_was_resumed(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data")
    for steps in (6, 10):
        cfg = tiny.config(
            tmp_path / "run", data, train__steps=steps, data__val_path=str(data), eval__every=3, checkpoint__every=3
        )
        assert tiny.run(cfg) == 0
    run = logs.read_run(tmp_path / "run")
    books = account(run.records)
    assert books.starts == 2
    assert books.total == round(1e6 * run.records[-1]["time"]) - round(1e6 * run.records[0]["time"])
    took = sum(r["step_seconds"] for r in run.of("step"))
    assert books.parts["productive"] + books.parts["data"] + books.parts["meet"] == pytest.approx(
        1e6 * took, rel=0.05, abs=30_000
    )
    assert books.parts["eval"] > 0
    assert books.parts["save"] > 0
