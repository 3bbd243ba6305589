"""Back to a good checkpoint when the watch says so, and past the data that led away from it.

    RUN/rollbacks.json     every rollback of the run, written whole before anything else of it happens

A rollback is an order to the next start: which step to go back to, which part of the data order to leave out, how much to
lower the learning rate. The same process starts again at once; if it is killed first, the next one obeys the same order. Both
go the way of an ordinary resume. Checkpoints later than the step gone back to are set aside, not deleted.

The method is that of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1): restart some 100 steps before the spike and
skip the batches that were seen around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kamui_dist import checkpoint, distributed, status
from kamui_dist.batches import positions_of
from kamui_dist.errors import UserError
from kamui_dist.files import write_json
from kamui_dist.findings import KINDS, Finding
from kamui_dist.history import read_records
from kamui_dist.knobs import Watch
from kamui_dist.retention import read_best
from kamui_dist.state import State

# What is saved meanwhile is no good place to go on from.
SPOILS = ("divergence", "spike", "non-finite", "overfitting")
AGAIN = -1  # in place of an exit code: start again


@dataclass(frozen=True)
class Rollback:
    kind: str  # of the finding
    message: str
    trigger_step: int
    step: int  # of the checkpoint that it goes back to
    gap: tuple[int, int]  # positions [first, end) of the data order that nobody will see
    lr_factor: float
    warmup: int  # steps in which the learning rate comes back

    @property
    def record(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        told = asdict(self)
        return {"finding": told.pop("kind"), **told, "skipped_windows": self.gap[1] - self.gap[0]}

    @property
    def finding(self) -> Finding:
        lr, kind = f", with the learning rate x {self.lr_factor:g}" if self.lr_factor != 1 else "", KINDS["rollback"]
        return Finding(
            "rollback", self.step,
            f"back from step {self.trigger_step} ({self.kind}: {self.message.rstrip('.')}) to the checkpoint of step {self.step}; "
            f"{self.gap[1] - self.gap[0]} windows are left out{lr}.",
            kind.cause, kind.advice, kind.action,
        )  # fmt: skip


def lr_scale(step: int, rollbacks: Sequence[dict[str, Any]]) -> float:
    """What the learning rate of update `step` (from 0) is multiplied by: the factors of all rollbacks, and the warmup after the
    last one."""
    if not rollbacks:
        return 1.0
    last = rollbacks[-1]
    warmed = min(1.0, (step - last["step"] + 1) / last["warmup"]) if last["warmup"] else 1.0
    return math.prod(r["lr_factor"] for r in rollbacks) * warmed


def gaps(rollbacks: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """The parts of the data order that are left out, merged and in order."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted((r["gap"][0], r["gap"][1]) for r in rollbacks):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def order(
    run_dir: Path, cfg: Watch, state: State, global_batch: int, findings: list[Finding]
) -> tuple[Rollback | None, str]:
    """Orders the next start to go back, because of the findings that ask for it. Collective. Returns what it ordered; or
    None, and why it cannot be: then the run has to stop."""
    finding = next(f for f in findings if f.action == "rollback")
    if len(state.rollbacks) >= cfg.max_rollbacks:
        return None, f"{finding.kind}, and watch.max_rollbacks = {cfg.max_rollbacks} is used up"
    # What is overfitted was best right before; all else began somewhat earlier than it showed.
    earlier = 1 if finding.kind == "overfitting" else cfg.rollback_steps
    since = (finding.since or finding.step) - earlier
    steps = distributed.broadcast_object([s for s, _ in checkpoint.step_directories(run_dir / "checkpoints")])
    # Before the trouble by as much as was asked for, else at least before it was seen.
    good = [s for s in steps if s <= since] or [s for s in steps if s < (finding.since or finding.step)]
    if not good:
        return None, f"{finding.kind}, and there is no checkpoint from before it to go back to"
    # Trained windows are counted back from now; `state.samples` has those of the step that is being judged, too.
    left_out = max(1, finding.step - max(good[-1], since))
    end = state.samples
    first = max(0, end - left_out * global_batch)
    held = gaps(state.rollbacks)
    gap = (int(positions_of(first, held)), int(positions_of(end - 1, held)) + 1)
    ordered = Rollback(
        finding.kind, finding.message, finding.step, good[-1], gap, cfg.rollback_lr_factor, cfg.rollback_warmup
    )
    with distributed.together():
        if distributed.is_main() and status.is_home(run_dir):  # else the next start, which is at once, ends
            write_json(run_dir / "rollbacks.json", [*state.rollbacks, asdict(ordered)])
    return ordered, ""


def settle(run_dir: Path, state: State, ordered: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Puts into `state` the rollbacks that hold: those `ordered` in the file, or those that the checkpoint knows if the file has
    fewer; then it is written anew. Collective. Returns the gaps."""
    if len(ordered) >= len(state.rollbacks):
        state.rollbacks = ordered
    else:
        with distributed.together():
            if distributed.is_main():
                write_json(run_dir / "rollbacks.json", state.rollbacks)
    return gaps(state.rollbacks)


def lines(rollbacks: list[dict[str, Any]], known: int) -> list[str]:
    """For the banner: what is in force, and what is new of it to a checkpoint that knows the first `known` of them."""
    if not rollbacks:
        return []
    left_out = sum(end - first for first, end in gaps(rollbacks))
    factor = math.prod(r["lr_factor"] for r in rollbacks)
    lr = f", and the learning rate is x {factor:g}" if factor != 1 else ""
    last = rollbacks[-1]
    told = [
        f"rolled back {len(rollbacks)} x, the last time from step {last['trigger_step']} to {last['step']} ({last['kind']}): "
        f"{left_out} windows are left out{lr}"
    ]
    for r in rollbacks[known:]:
        lr = f"the learning rate is x {r['lr_factor']:g}" if r["lr_factor"] != 1 else "the learning rate stays"
        lr += f", and comes back in {r['warmup']} steps" if r["warmup"] else ""
        first, end = r["gap"]
        told.append(f"changed since, by a rollback: windows {first} to {end - 1} of the data order are left out; {lr}")
    return told


def condemn(run_dir: Path, state: State, findings: list[Finding]) -> None:
    """After a run has stopped for what had begun earlier and spoils the weights: the checkpoints saved since are set aside, so
    that the same command goes on from one of before, and `state` (of rank 0) knows the best of those. If there is none, all
    stay. Collective."""
    began = [f.since for f in findings if f.action in ("rollback", "stop") and f.kind in SPOILS and f.since is not None]
    since = min(began, default=None)
    with distributed.together():
        if distributed.is_main() and since is not None:
            steps = [step for step, _ in checkpoint.step_directories(run_dir / "checkpoints")]
            good = max((step for step in steps if step < since), default=None)
            if good is not None:
                gone = {step for step in steps if step >= since}
                _take_out(run_dir / "checkpoints", gone, good, f"saved after the trouble of step {since} had begun")
                if state.best_step in gone:
                    best = read_best(run_dir / "checkpoints") or {}
                    state.best_step, state.best_val_loss = best.get("step"), best.get("val_loss")


def obey(run_dir: Path) -> list[dict[str, Any]]:
    """At a start, before a checkpoint is chosen: sets aside those that a rollback has condemned. Collective. Returns the
    rollbacks of the run; [] if there were none. Raises UserError, before anything is moved, for one that goes back to nothing."""
    with distributed.together():
        ordered = read(run_dir) if distributed.is_main() else []
        for r, gone in [(r, _condemned(run_dir, number, r)) for number, r in enumerate(ordered, 1)]:
            why = f"rolled back: {r['kind']} at step {r['trigger_step']}" if gone else ""
            _take_out(run_dir / "checkpoints", gone, r["step"], why)
    told: list[dict[str, Any]] = distributed.broadcast_object(ordered)
    return told


def _condemned(run_dir: Path, number: int, r: dict[str, Any]) -> set[int]:
    """Checkpoints that are later than rollback `number` goes back to, and were there before it. Raises UserError if there are
    some, and the one that it goes back to is not there: setting them aside would lose what they hold for nothing."""
    steps = dict(checkpoint.step_directories(run_dir / "checkpoints"))
    gone = {step for step, path in steps.items() if step > r["step"] and _rollbacks_of(path) < number}
    if gone and r["step"] not in steps:
        raise UserError(
            f"{run_dir / 'rollbacks.json'} goes back to step {r['step']}, of which there is no checkpoint, and would set aside "
            f"{', '.join(map(str, sorted(gone)))}; bring that checkpoint back, or put the file right, or remove it: then those "
            "rollbacks hold that the newest checkpoint knows"
        )
    return gone


def _take_out(directory: Path, gone: set[int], good: int, why: str) -> None:
    """Sets aside the checkpoints of the steps `gone`; if the best is among them, the one that was best at step `good` is again."""
    steps = dict(checkpoint.step_directories(directory))
    for step in sorted(gone & steps.keys()):  # an earlier rollback may have taken it
        target = checkpoint.set_aside(steps[step], why)
        print(f"note: {target.name} was moved to {target} ({why}); the run goes on from step {good}", flush=True)
    if checkpoint.best_step(directory) in gone:
        state = checkpoint.open_checkpoint(steps[good]).state["state"] if good in steps else {}
        if (best := state.get("best_step")) in steps.keys() - gone:
            write_json(directory / "best.json", {"step": best, "val_loss": state["best_val_loss"]})
        else:
            (directory / "best.json").unlink()


def untold(run_dir: Path, state: State) -> list[Rollback]:
    """On rank 0, at a start: the last rollback, if the run was killed between ordering and recording it; [] elsewhere."""
    if not (distributed.is_main() and state.rollbacks):
        return []
    r = {"kind": "unknown", "message": "", **state.rollbacks[-1]}
    last = Rollback(**{f.name: r[f.name] for f in fields(Rollback)} | {"gap": tuple(r["gap"])})
    told = [r for r in read_records(run_dir / "metrics.jsonl") if r["kind"] == "rollback"]
    return [] if any(r.get("gap") == list(last.gap) for r in told) else [last]


def _why(error: Exception) -> str:
    return "it is not a list of rollbacks" if isinstance(error, KeyError | TypeError) else str(error)


def _rollbacks_of(path: Path) -> int:
    try:
        return len(checkpoint.open_checkpoint(path).state["state"].get("rollbacks", []))
    except checkpoint.CheckpointError:
        return 1 << 30  # damaged: not for us to judge


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The rollbacks of a run, in order. Raises UserError for a file that is damaged."""
    path = run_dir / "rollbacks.json"
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for r in found:
            first, end = r["gap"]
            numbers = (r["trigger_step"], r["step"], first, end, r["warmup"])
            if not (all(type(n) is int and n >= 0 for n in numbers) and first < end and 0 < r["lr_factor"] <= 1):
                raise ValueError(f"not a rollback: {r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be used ({_why(error)}); put it right, or remove it: then those hold that the newest checkpoint knows"
        ) from None
    return list(found)
