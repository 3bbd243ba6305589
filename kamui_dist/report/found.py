"""All findings of a run: those of the watch when it is run over the records, and those that only the run itself could see."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kamui_dist import knobs
from kamui_dist.findings import ACTIONS, KINDS, Finding
from kamui_dist.report.logs import Run
from kamui_dist.watch import Facts, replay

WATCHED = {name.removeprefix("on_").replace("_", "-") for name in knobs.Watch.model_fields if name.startswith("on_")}
SKIPPED = "update skipped on all ranks"  # in the message of a non-finite finding
LEVELS = {"note": "note", "warn": "warn"}  # of what is drawn; every other action is "bad"


@dataclass(frozen=True)
class Row:
    """Findings of one kind and action that follow each other closely, as one line of a table."""

    finding: Finding  # the first of them
    last: int  # step
    count: int
    recorded: bool  # by the run, not by the replay

    @property
    def level(self) -> str:
        return LEVELS.get(self.finding.action, "bad")

    @property
    def steps(self) -> str:
        first = self.finding.step
        return f"{first:,}" if self.last == first else f"{first:,} - {self.last:,}"


def diagnose(run: Run, cfg: knobs.Watch, facts: Facts) -> list[tuple[Finding, bool]]:
    """In the order of steps; with each whether it was recorded by the run rather than found now.

    Recorded ones count where the watch cannot see them in the records: kinds of another judge (a checkpoint that failed), and
    updates that were undone, whose records are gone; after a rollback others have taken their place.
    """
    found = replay(run.records, cfg, facts)
    if not run.ours:  # nobody knows what their trainer did with it
        found = [replace(f, message=f.message.replace(SKIPPED, "our watch would have skipped it")) for f in found]
    there = {r["step"] for r in run.records if r["kind"] in ("step", "eval", "detail")}
    seen = {(f.kind, f.step) for f in found}
    undone = [f for f in run.found if f.action == "rollback" and (f.kind, f.step) not in seen]
    told = [f for f in run.found if f.kind not in WATCHED or f.step not in there or f in undone]
    return sorted([*((f, False) for f in found), *((f, True) for f in told)], key=lambda pair: pair[0].step)


def gather(found: Sequence[tuple[Finding, bool]], run: Run) -> list[Row]:
    """One row for what stands so close that a picture of the run would not show it apart (a hundredth of the run), and for a loss
    or gradient that is told again and again because it does not become finite."""
    steps = [r["step"] for r in run.records if r["kind"] == "step"] or [0]
    near = max(1, (steps[-1] - steps[0]) // 100)
    sound = sorted(r["step"] for r in run.of("step") if r.get("loss") is not None and not r.get("skipped"))

    def goes_on(row: Row, step: int) -> bool:
        lasts = row.finding.kind == "non-finite" and bisect(sound, row.last) == bisect(sound, step)
        return lasts or step - row.last <= near

    rows: list[Row] = []
    newest: dict[tuple[str, str, bool], int] = {}
    for finding, recorded in found:
        key = (finding.kind, finding.action, recorded)
        place = newest.get(key)
        if place is not None and goes_on(rows[place], finding.step):
            rows[place] = Row(rows[place].finding, finding.step, rows[place].count + 1, recorded)
        else:
            newest[key] = len(rows)
            rows.append(Row(finding, finding.step, 1, recorded))
    return rows


def gravest(rows: Sequence[Row]) -> Row | None:
    """The first of the gravest; of one action by the order of KINDS, in which a divergence comes before its spikes."""
    order = {kind: -place for place, kind in enumerate(KINDS)}
    return max(
        rows,
        key=lambda row: (ACTIONS.index(row.finding.action), order.get(row.finding.kind, -len(order))),
        default=None,
    )
