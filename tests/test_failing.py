"""The gallery of failing runs (failing.py): each is named for what it is, a healthy one is left alone, all ranks agree, and a
replay over the records finds the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import config, knobs
from kamui_dist.findings import ACTIONS, KINDS, Finding
from kamui_dist.history import read_records
from kamui_dist.plan import make_plan, watch_facts
from kamui_dist.watch import replay
from tests import failing, tiny
from tests.failing import RUNS

# What the machine that runs the tests does while they run, and what is no fault, is found where it is found.
ANYWHERE = {"throughput-drop", "slow-rank", "clipping", "data-starvation"}
ALONE = [name for name, run in RUNS.items() if run.ranks == 1 and run.expected]
CAUSES = {
    "detached": "detached", "frozen": "frozen or detached", "lr-zero": "optim.lr is 0", "vanishing": "gradients vanish",
    "random-targets": "little to do with the inputs", "leak": "not causal", "unshifted-tied": "shifted",
    "lr-over-1000": "orders of magnitude too low", "plateau": "how often each token occurs", "unshifted": "not shifted by one",
    "slow-rank": "", "lr-x30": "too high to settle",
}  # fmt: skip


def told(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "findings.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def replayed(run_dir: Path) -> list[Finding]:
    cfg, _ = config.load(run_dir / "config.toml", [])
    records = read_records(run_dir / "metrics.jsonl")
    start = records[0]
    assert start["kind"] == "start"
    windows = next(round(r["tokens"] / cfg.model.context_length / r["epoch"]) for r in records if r["kind"] == "step")
    plan = make_plan(cfg, start["world_size"], windows)
    facts = watch_facts(cfg, plan, True, start["repeats"], start["entropy"])
    return replay(records, cfg.watch, facts)


def key(finding: Any) -> tuple[Any, ...]:
    """Without the words, in which NaN and infinity differ from null."""
    f = finding.record() if isinstance(finding, Finding) else finding
    return f["kind"], f["step"], f.get("since"), f["action"], f["message"] if f["kind"] != "non-finite" else ""


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its run directory: two tests look at it."""
    return failing.train("spike", tmp_path_factory.mktemp("spike"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_failing_run_is_named_for_what_it_is(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = RUNS[name]
    run_dir = request.getfixturevalue("spike") if name == "spike" else failing.train(name, tmp_path)
    found = told(run_dir)
    kinds = [f["kind"] for f in found]
    assert run.expected in kinds, found
    assert set(kinds) - ANYWHERE <= {run.expected, *run.along}, found
    first = max((f for f in found if f["kind"] == run.expected), key=lambda f: ACTIONS.index(f["action"]))
    assert CAUSES.get(name, "") in first["cause"], first
    assert (
        first["action"] == KINDS[run.expected or ""].default_action(run.expected or "") or run.expected == "non-finite"
    )
    assert kinds.count(run.expected or "") <= 2 or run.expected == "non-finite", "no flood"
    assert [key(f) for f in replayed(run_dir)] == [key(f) for f in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, run in RUNS.items() if run.expected is None and name != "healthy-long"]
)  # minutes: by hand
def test_a_healthy_run_is_left_alone(name: str, tmp_path: Path) -> None:
    run_dir = failing.train(name, tmp_path)
    losses = [r["loss"] for r in tiny.records(run_dir)]
    assert sum(losses[-20:]) / 20 < 2.75, "it does learn"
    assert {f["kind"] for f in told(run_dir)} <= ANYWHERE
    assert {f["action"] for f in told(run_dir)} <= {"note"}
    assert [key(f) for f in replayed(run_dir)] == [key(f) for f in told(run_dir)]


@pytest.mark.slow
def test_all_ranks_are_told_and_find_the_same(tmp_path: Path) -> None:
    """Down to the last digit: if one rank stopped or skipped and another did not, all would hang."""
    for name in ("slow-rank", "lr-x100"):
        (found, seen), *others = failing.on_ranks(name, tmp_path / name, 2)
        for theirs, told_them in others:
            different = [pair for pair in zip(seen, told_them, strict=True) if pair[0] != pair[1]]
            assert not different, f"{len(different)} of {len(seen)}, the first: {different[0]}"
            assert theirs == found
        assert RUNS[name].expected in [f["kind"] for f in found]
        run_dir = tmp_path / name / "run"
        assert told(run_dir) == found, "rank 0 writes them"
        assert [key(f) for f in replayed(run_dir)] == [key(f) for f in found]


@pytest.mark.slow
def test_a_run_that_was_stopped_and_resumed_finds_what_one_that_was_not_finds(spike: Path, tmp_path: Path) -> None:
    """Stopped in the middle of a spike; times differ from run to run and are not compared."""
    whole = told(spike)
    failing.train("spike", tmp_path / "twice", stop_at=101)
    again = told(failing.train("spike", tmp_path / "twice"))
    mine = [[key(f) for f in found if f["kind"] not in ANYWHERE] for found in (whole, again)]
    assert mine[0]
    assert mine[0] == mine[1]


def test_every_kind_of_the_watch_has_a_run() -> None:
    by_knob = {name[3:].replace("_", "-") for name in knobs.Watch.model_fields if name.startswith("on_")}
    assert by_knob == {run.expected for run in RUNS.values() if run.expected}
