"""From a step to its checkpoint on disk: is the state good, is there room, write it (aside if asked), delete older ones.

    if saver.due(state, improved, healthy):
        stop = saver.save(state, final)        why the run must stop, if it must
    saver.poll(codes)                          once a step, before the update: what was written aside is published

Every method but `code` and `seconds` is collective: all ranks call it at the same step. A save that fails for want of
storage costs that checkpoint, not the run; only the last one of a run must succeed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kamui_dist import checkpoint, distributed, health, parallel, retention, rundir
from kamui_dist.checkpoint import Checkpoint, CheckpointError
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.files import FULL
from kamui_dist.metrics import Metrics
from kamui_dist.noise import NoiseScale
from kamui_dist.plan import Plan
from kamui_dist.precision import LossScaler
from kamui_dist.staging import Staging
from kamui_dist.state import State
from kamui_dist.storage import checkpoint_group, planned
from kamui_dist.tensors import buffer_names, local_part, model_tensors, training_tensors
from kamui_dist.watch import Finding, Watch


@dataclass
class _Job:
    """One save, from its step to its end. `thread` only if it is written aside."""

    state: State
    body: dict[str, Any]
    began: float
    check_seconds: float
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    saved: Checkpoint | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def code(self) -> int:
        """0 being written, 1 saved, 2 the storage failed, 3 something else did."""
        if self.thread is not None and self.thread.is_alive():
            return 0
        if self.error is None:
            return 1
        return 2 if isinstance(self.error, CheckpointError) and self.error.errnos else 3


class Saver:
    """Owns what lives between two saves: the one in flight, its copies in host memory, what the last one measured.

    watch, scaler, noise: their state goes into the checkpoint. facts: JSON values that are the same at every save of this run.
    """

    def __init__(
        self, run_dir: Path, cfg: Config, plan: Plan, module: nn.Module, optimizer: torch.optim.Optimizer,
        watch: Watch, scaler: LossScaler, noise: NoiseScale, metrics: Metrics, facts: dict[str, Any],
    ) -> None:  # fmt: skip
        self.run_dir, self.cfg, self.plan, self.metrics, self.facts = run_dir, cfg, plan, metrics, facts
        self.directory = run_dir / "checkpoints"
        self.module, self.optimizer, self.watch, self.scaler, self.noise = module, optimizer, watch, scaler, noise
        self.condemned: Finding | None = None  # why the run must stop
        self._job: _Job | None = None  # in flight
        self._staging = Staging()
        self._built = _kinds(model_tensors(module))  # what a resumed run will have to fill
        self._mine: set[str] = set()  # names of what this rank writes, of tensors with this signature
        self._signature = ""
        self._owed = False
        self._pruner = retention.Pruner(self.directory, cfg.checkpoint, cfg.watch)
        self._bytes = 0  # of the last checkpoint
        self._seconds = 0.0
        self._check_seconds = 0.0
        # Made by all ranks, here: never in a thread. All that a save has to agree on goes through it and not through the group of
        # training, whose time limits are short.
        self._group = checkpoint_group()

    @property
    def seconds(self) -> float:
        """How long a save that is waited for would take now, as far as is known: for deadlines."""
        return self._seconds * (1 if self._job is None else 2)

    def due(self, state: State, improved: bool, healthy: bool) -> bool:
        """Whether to save now. After a step whose update was skipped a checkpoint that is due waits for a healthy one."""
        every, best = self.cfg.checkpoint.every, self.cfg.checkpoint.best
        self._owed = self._owed or state.step % every == 0
        return (self._owed and healthy) or (improved and best)

    def save(self, state: State, final: bool = False) -> str:
        """Saves the run as it is now. Returns "", or why it must stop: then nothing was saved. With checkpoint.async it
        returns at once: `poll`, before the next update, waits until everything is copied.

        final: nothing comes after it. It is waited for, tried even if there seems to be no room, and must succeed.
        Raises CheckpointError, on every rank, if it failed for another reason than the storage, or is `final` and failed;
        UserError, on every rank and before anything is written, if no run could resume from it, or the run directory is gone.
        """
        self._owed = False
        began = time.perf_counter()
        self._land()
        self._stay(self._group)
        self.metrics.sync()
        tensors = training_tensors(self.module, self.optimizer)
        finding = self._examine(state.step, tensors, final)
        if finding is not None:
            self.metrics.findings([finding])
            if finding.action == "stop":
                self.condemned = finding
                return f"checkpoint: {finding.kind}"
            return ""
        parts = {"watch": self.watch.state(), "scaler": self.scaler.state(), "noise": self.noise.to_dict()}
        body = {"state": state.to_dict(), **parts, **self.facts}
        job = self._job = _Job(replace(state), body, began, self._check_seconds)
        if final or not self.cfg.checkpoint.async_:
            self._write(job, tensors, None)
            job.stall_seconds = time.perf_counter() - began
            self._settle(job, job.code, final)
        else:
            mine = {name: local_part(tensors[name]) for name in sorted(self._mine)}
            copies = self._staging.capture(mine, at_once=buffer_names(self.module))
            job.thread = threading.Thread(
                target=self._write, args=(job, tensors, copies), name=f"save-{state.step}", daemon=True
            )  # a daemon: after a crash of training nobody waits for what peers may never answer
            job.thread.start()
            job.stall_seconds = time.perf_counter() - began
        return ""

    def code(self) -> int:
        """This rank's word for the step's packed reduction: 0 while it writes aside, else how that went (see _Job.code); 4 once
        rank 0 has seen that the run directory is gone."""
        return 4 if rundir.seen_moved() else 1 if self._job is None else self._job.code

    def poll(self, codes: list[int]) -> None:
        """`codes`: what `code` said on every rank in this step. Publishes what all have finished; lets the update begin.

        Raises on every rank: CheckpointError if a save failed for another reason than the storage, UserError as `_stay`.
        """
        held = self._staging.before_update()
        if self._job is not None:
            self._job.stall_seconds += held
        if max(codes) == 4:
            self._stay(None)  # a save in flight has the other group for itself
        elif self._job is not None and min(codes) > 0:
            self._settle(self._job, max(codes), final=False)

    def wait(self) -> None:
        """Until nothing is in flight and nothing is being deleted: at the end of a run. Raises as `poll`."""
        self._land()
        self._pruner.wait()

    def _stay(self, group: Any) -> None:
        """Raises UserError on every rank if the run directory was moved, removed or replaced: nothing can be saved any more, so
        every further step would only be lost too."""
        if told := distributed.gather_objects(rundir.moved(), group)[0]:
            gone = UserError(told)
            gone.agreed = True
            raise gone

    def _land(self) -> None:
        if self._job is not None:
            assert self._job.thread is not None
            self._job.thread.join()
            self._settle(self._job, max(distributed.gather_objects(self._job.code, self._group)), final=False)

    def _write(self, job: _Job, tensors: dict[str, Tensor], copies: dict[str, Tensor] | None) -> None:
        try:
            if copies is not None:
                self._staging.finish()
            began = time.perf_counter()
            job.saved = checkpoint.save(self.directory, job.state.step, tensors, job.body, copies, parents=False)
            job.write_seconds = time.perf_counter() - began
        except BaseException as error:  # of a thread nobody else would hear
            job.error = error

    def _settle(self, job: _Job, code: int, final: bool) -> None:
        """After the save, with the worst code of all ranks: publish what follows from it, or tell what went wrong."""
        self._job = None
        seconds = time.perf_counter() - job.began
        if code == 1:
            assert job.saved is not None
            self._bytes = job.saved.bytes
            self._seconds = job.write_seconds + job.check_seconds
            if distributed.is_main():
                self._publish(job.state, job.saved)
            self.metrics.checkpoint(
                job.state, seconds, stall_seconds=job.stall_seconds, write_seconds=job.write_seconds,
                check_seconds=job.check_seconds, bytes=self._bytes,
                mb_per_second=self._bytes / 1e6 / job.write_seconds, aside=job.thread is not None,
            )  # fmt: skip
            return
        failed = job.error or CheckpointError(f"the checkpoint of step {job.state.step} failed on another rank")
        if code == 2:
            assert isinstance(failed, CheckpointError)
            self._stay(self._group)
            self.metrics.findings([self._storage_failed(job.state.step, failed, final)])
        if code != 2 or final:
            failed.agreed = True  # type: ignore[attr-defined]  # all ranks raise: rank 0 tells it for everybody
            raise failed

    def _publish(self, state: State, saved: Checkpoint) -> None:
        """Rank 0. Older checkpoints go only once the new one is seen to be whole on the disk."""
        if not retention.whole(saved.path):
            print(f"warning: {saved.path} is not whole: no older one is deleted", file=sys.stderr, flush=True)
            return
        try:
            rundir.published(self.run_dir, state)
        except OSError as error:
            print(f"warning: after the checkpoint of step {state.step}: {error}", file=sys.stderr, flush=True)
        self._pruner.start(state.best_step)

    def _examine(self, step: int, tensors: dict[str, Tensor], final: bool) -> Finding | None:
        """What speaks against saving now; decided alike on all ranks. With checkpoint.async also learns who writes what."""
        weights = parallel.local_weights(self.module)
        began = time.perf_counter()
        bad, sums = health.non_finite(weights), health.checksums(weights)
        self._check_seconds = time.perf_counter() - began
        parts = ((name, local_part(t).shape, t.shape, t.dtype) for name, t in tensors.items())
        signature = hashlib.sha256(repr(list(parts)).encode()).hexdigest() if self.cfg.checkpoint.async_ else ""
        room = retention.free_bytes(self.directory)
        mine = (bad[:3], health.digest(sums), room, self._changed(tensors), signature != self._signature)
        told = distributed.gather_objects(mine, self._group)
        if changed := next((text for *_, text, _ in told if text), ""):
            refused = UserError(
                f"model.factory = {self.cfg.model.factory!r}: since the model was built {changed}; a checkpoint of it could not be "
                "resumed, so none is written; give it its final shape and type at once, or persistent=False"
            )
            refused.agreed = True
            raise refused
        if broken := {rank: names for rank, (names, *_) in enumerate(told) if names}:
            return health.not_finite(step, broken)
        groups = [[(rank, told[rank][1]) for rank in group] for group in parallel.replicas(self.plan)]
        if any(len({digest for _, digest in group}) > 1 for group in groups):
            everybody = distributed.gather_objects(sums, self._group)
            names = [n for n in sums if any(len({everybody[r][n] for r, _ in g}) > 1 for g in groups if g)]
            return health.divergence(step, groups, names, len(sums))
        needed = retention.needed_bytes(self._bytes or sum(t.numel() * t.element_size() for t in tensors.values()))
        room = min(told[rank][2] for rank in range(len(told)))
        if room < needed:  # there may be more when rank 0 has deleted what it is about to
            self._pruner.wait()
            room = distributed.gather_objects(retention.free_bytes(self.directory), self._group)[0]
        if room < needed and not final:
            return self._no_room(step, room, needed)
        if any(changed for *_, changed in told):
            self._mine, self._signature = planned(tensors), signature
        return None

    def _changed(self, tensors: dict[str, Tensor]) -> str:
        """What of the model's state is not as it was built, in words."""
        now = _kinds({name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
        return ", ".join(
            f"{name.removeprefix('model.')} went from {self._built.get(name, 'None')} to {now.get(name, 'None')}"
            for name in dict.fromkeys([*self._built, *now])
            if self._built.get(name) != now.get(name)
        )

    def _no_room(self, step: int, room: int, needed: int) -> Finding:
        return Finding(
            "disk-full", step,
            f"no checkpoint: it needs {retention.mebibytes(needed)}, {retention.mebibytes(room)} are free.",
            f"the file system of {self.directory} is full, or a quota is used up.", self._advice(final=False), "warn",
        )  # fmt: skip

    def _storage_failed(self, step: int, error: CheckpointError, final: bool) -> Finding:
        full = bool(FULL & set(error.errnos))
        advice = self._advice(final) if full else f"see that {self.directory} can be written. {self._goes_on(final)}"
        return Finding(
            "disk-full" if full else "save-failed", step, f"{error}.",
            "the file system is full, or a quota is used up." if full else "the storage, not this program.",
            advice, "stop" if final else "warn",
        )  # fmt: skip

    def _advice(self, final: bool) -> str:
        what = retention.what_to_free(self.directory) if distributed.is_main() else ""
        return f"free some of: {what}. {self._goes_on(final)}"

    def _goes_on(self, final: bool) -> str:
        if final:
            return "It was the last of this run: then start the same command again, which goes on from the one before."
        every = self.cfg.checkpoint.every
        return f"Training goes on, earlier checkpoints stay, the next try is at the next multiple of {every} steps."


def _kinds(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Shape and type of each, as the user knows them."""
    return {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()}
