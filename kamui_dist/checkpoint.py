"""Checkpoints that cannot be lost: saved aside and published by rename, verified before use, loaded on any mesh.

    checkpoints/step-00001000/   complete: the manifest was written and everything synced before the name appeared
    checkpoints/.tmp-*           unfinished, removed at the next start
    checkpoints/quarantine/      damaged ones and those that a rollback condemned, each with a reason.txt; nothing is deleted for it

manifest.py knows the format, storage.py moves the bytes, tensors.py names what is saved; this file is the policy.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kamui_dist import distributed
from kamui_dist.errors import UserError
from kamui_dist.files import sync_directory
from kamui_dist.manifest import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    check_files,
    open_checkpoint,
    remove,
    step_directories,
    verify,
)
from kamui_dist.retention import access, best_step, prune
from kamui_dist.storage import SafetensorsReader, SafetensorsWriter, load_tensors, save_tensors
from kamui_dist.tensors import model_tensors, prepare_optimizer, training_tensors

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "best_step",
    "load",
    "load_training",
    "load_weights",
    "newest",
    "open_checkpoint",
    "prepare_optimizer",
    "prune",
    "save",
    "set_aside",
    "step_directories",
    "training_tensors",
    "verify",
]


class _PublishingWriter(SafetensorsWriter):
    """Makes the temporary directory before any rank writes, and gives it its name after all have.

    Both happen inside DCP's own agreed steps, on the coordinator: no further collective, so a save may run in a thread.
    """

    def __init__(self, final: Path, body: dict[str, Any], parents: bool) -> None:
        super().__init__(final.with_name(f".tmp-{final.name}"), body)
        self.final, self.parents = final, parents

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        remove(self.path)
        self.path.parent.mkdir(exist_ok=True, parents=self.parents)
        self.path.mkdir(mode=0o755)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        replaced = self.final.with_name(f".tmp-replaced-{self.final.name}")
        if self.final.exists():  # a run that went back saves a step again; `newest` undoes this if killed between
            remove(replaced)
            self.final.rename(replaced)
        self.path.rename(self.final)
        sync_directory(self.final.parent)
        remove(replaced)


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    copies: dict[str, Tensor] | None = None,
    parents: bool = True,
) -> Checkpoint:
    """Collective. Saves `tensors` (plain or DTensor, the same names on all ranks) and `state` as directory/step-<step>.

    state: JSON values with text keys. copies: see storage.save_tensors; with them this may run in a thread, one at a
    time. A published directory of the same step is replaced. parents: makes those of `directory` too; a run does not, or one that
    was moved away would come back.
    Raises CheckpointError on every rank, naming the rank and the cause, if any rank fails; then nothing is published,
    and what was published stays. Its `errnos` tells whether the storage alone is to blame.
    """
    writer = _PublishingWriter(directory / f"step-{step:08d}", {"step": step, "state": state}, parents)
    try:
        return Checkpoint(writer.final, step, save_tensors(tensors, writer, copies))
    except CheckpointError as error:
        if distributed.is_main():
            shutil.rmtree(writer.path, ignore_errors=True)  # every rank has stopped writing
        raise CheckpointError(f"the checkpoint of step {step} was not saved: {error}", error.errnos) from error


def newest(directory: Path) -> Checkpoint | None:
    """Collective. The newest checkpoint that verifies, the same on all ranks, or None if there never was one.

    For the run that owns `directory`: removes unfinished ones and moves damaged ones to directory/quarantine, with a
    warning. The ranks divide the hashing. Raises UserError if there are checkpoints and none verifies. A file that cannot
    be read is no proof of damage, so nothing is moved: UserError if a person has to see to it, else RuntimeError.
    """
    steps: list[tuple[int, Path]] = _on_main(directory, _tidy, directory)
    while steps:
        path = steps.pop()[1]
        checkpoint, damage = _on_main(directory, _damage, open_checkpoint, path)
        if damage is None:
            files = sorted(checkpoint.manifest["files"].items())[distributed.rank() :: distributed.world_size()]
            with distributed.together(), access(directory.parent, "used"):
                _, mine = _damage(check_files, path, dict(files))
            if seen := [damage for damage in distributed.gather_objects(mine) if damage is not None]:
                # Only what rank 0 sees too is damage: without a shared directory, good ones would be moved away.
                _, damage = _on_main(directory, _damage, verify, path)
                if damage is None:
                    raise UserError(f"{seen[0]}; but rank 0 finds it intact: is this directory shared by all nodes?")
        if damage is None:
            return checkpoint
        _on_main(directory, _quarantine, path, damage, steps[-1][0] if steps else None)
    quarantine = directory.absolute() / "quarantine"
    if _on_main(directory, lambda: sorted(quarantine.glob("step-*"))):
        refused = UserError(
            f"{quarantine.parent}: there are checkpoints but none is intact, refusing to start from zero; "
            f"see {quarantine}/*/reason.txt, then put a good copy back, or remove that directory to start over"
        )
        distributed.raise_together(refused)
    return None


def _damage(check: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """The result, or what is damaged. What cannot be read at all (OSError) goes through: that is no proof."""
    try:
        return check(*args), None
    except CheckpointError as error:
        return None, str(error)


def _on_main(directory: Path, call: Callable[..., Any], *args: Any) -> Any:
    """Collective. What `call` returns on rank 0, where alone it runs; what it raises there, everybody raises."""
    result = None
    with distributed.together():
        if distributed.is_main():
            with access(directory.parent, "used"):
                result = call(*args)
    return distributed.broadcast_object(result)


def _tidy(directory: Path) -> list[tuple[int, Path]]:
    """Removes what a killed run left, and lists the checkpoints."""
    for path in sorted(directory.glob(".tmp-*")):
        final = path.with_name(path.name.removeprefix(".tmp-replaced-"))
        if final != path and not final.exists():
            path.rename(final)  # killed between the two renames of `finish`
        else:
            remove(path)
    return step_directories(directory)


def set_aside(path: Path, why: str) -> Path:
    """Moves a checkpoint into quarantine, with the reason; returns where it is now. Rank 0."""
    parent = path.parent / "quarantine"
    parent.mkdir(exist_ok=True)
    target, number = parent / path.name, 1
    while target.exists():
        target, number = parent / f"{path.name}-{number}", number + 1
    path.rename(target)
    (target / "reason.txt").write_text(why + "\n")
    sync_directory(path.parent)
    return target


def _quarantine(path: Path, damage: str, lower: int | None) -> None:
    """Sets a damaged checkpoint aside, and says what it costs. lower: the step that is tried in its place."""
    target = set_aside(path, damage)
    lost = int(path.name.removeprefix("step-")) - (lower or 0)
    then = f"trying step {lower}, {lost} steps earlier" if lower is not None else "there is no older one"
    print(f"warning: {damage}; {path.name} was moved to {target}; {then}", file=sys.stderr, flush=True)


def load(checkpoint: Checkpoint, tensors: dict[str, Tensor], ignore: tuple[str, ...] = ()) -> None:
    """Collective. Fills `tensors` (plain or DTensor, any mesh) in place; the checkpoint's names must be theirs.

    ignore: prefixes of names that the checkpoint may hold and nobody wants.
    Raises UserError, before anything is read, for a name that is missing or left over and for another shape or dtype;
    CheckpointError, on every rank, if a file cannot be read or is not what the manifest says.
    """
    distributed.raise_together(_mismatch(checkpoint, tensors, ignore))
    try:
        load_tensors(tensors, SafetensorsReader(checkpoint.path, checkpoint.manifest))
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint of step {checkpoint.step} was not loaded: {error}") from error


def load_training(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective. Restores weights and optimizer state; raises as `load` and `prepare_optimizer`."""
    # The weights first: a changed model is the likely mistake, and its message the clearest.
    distributed.raise_together(_mismatch(checkpoint, model_tensors(model), ignore=("optim.",)))
    with distributed.together():
        prepare_optimizer(model, optimizer, checkpoint.manifest)
    load(checkpoint, training_tensors(model, optimizer))


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Collective. Restores parameters and persistent buffers only; raises as `load`."""
    load(checkpoint, model_tensors(model), ignore=("optim.",))


def _mismatch(checkpoint: Checkpoint, tensors: dict[str, Tensor], ignore: tuple[str, ...]) -> UserError | None:
    saved = checkpoint.manifest["tensors"]
    faults = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    for name, tensor in tensors.items():
        if name in saved and saved[name]["shape"] != list(tensor.shape):
            faults.append(f"{name} has shape {list(tensor.shape)}, in the checkpoint {saved[name]['shape']}")
        elif name in saved and DTYPES[saved[name]["dtype"]] != tensor.dtype:
            faults.append(f"{name} is {tensor.dtype}, in the checkpoint {DTYPES[saved[name]['dtype']]}")
    left_over = [name for name in saved if name not in tensors and not name.startswith(ignore or ("\0",))]
    faults += [f"{name} is in the checkpoint and not in this run" for name in left_over]
    if not faults:
        return None
    more = [f"... and {len(faults) - 10} more"] if len(faults) > 10 else []
    return UserError("\n".join([f"{checkpoint.path} does not fit the model or optimizer:", *faults[:10], *more]))
