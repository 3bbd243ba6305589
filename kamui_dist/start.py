"""How a run begins: its data, its model, and where its weights come from. Every fault is told by all ranks alike."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from kamui_dist import checkpoint, distributed, history, job, mixture, parallel, resume_report, rollback, rundir
from kamui_dist.checkpoint import Checkpoint
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.manifest import step_links
from kamui_dist.mixture import TrainingData
from kamui_dist.model import GPT
from kamui_dist.noise import NoiseScale
from kamui_dist.plan import Plan
from kamui_dist.precision import LossScaler
from kamui_dist.resume_report import Change
from kamui_dist.schedule import lr_at
from kamui_dist.signals import Pace
from kamui_dist.state import State
from kamui_dist.tensors import check_storable, model_tensors, unstored
from kamui_dist.watch import Watch


def build_model(cfg: Config) -> nn.Module:
    """Our GPT on the meta device, or what model.factory returns. Raises UserError for a factory that cannot be used."""
    if cfg.model.factory is None:
        with torch.device("meta"):
            return GPT(cfg.model)
    module, _, name = cfg.model.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'model.factory = {cfg.model.factory!r} ("package.module:function"): {error}') from None
    if not callable(factory):
        raise UserError(f"model.factory = {cfg.model.factory!r} is a {type(factory).__name__}, not a function")
    torch.manual_seed(cfg.run.seed)
    model = factory(cfg.model)
    if not isinstance(model, nn.Module):
        raise UserError(f"model.factory = {cfg.model.factory!r} returned {type(model).__name__}, not an nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model.factory = {cfg.model.factory!r} returned a model without parameters to train")
    if any(p.is_meta for p in model.parameters()) and not hasattr(model, "init_parameter"):
        raise UserError(
            f"model.factory = {cfg.model.factory!r} returned parameters on the meta device and no init_parameter"
        )
    check_storable(model)
    if (lost := unstored(model)) and distributed.is_main():
        told = f"model.factory: state of {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''} (get_extra_state)"
        print(
            f"warning: {told} is not saved; a resumed run begins with it as the factory makes it",
            file=sys.stderr,
            flush=True,
        )
    return model


def expect_loss(cfg: Config, module: nn.Module) -> None:
    """Looks at what the first forward pass with a gradient returns, and the first without one; then it is gone. Collective there,
    as the pass itself. Raises UserError on all ranks for what is no loss of a model.factory."""
    if cfg.model.factory is None:
        return
    waiting = {True, False}

    def look(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], returned: Any) -> None:
        trains = torch.is_grad_enabled()
        if trains not in waiting or len(args) < 2 or args[1] is None:  # without targets logits are asked for
            return
        waiting.remove(trains)
        if not waiting:
            handle.remove()
        shape = (len(args[0]),) if options.get("per_sequence") else ()
        good = isinstance(returned, Tensor) and returned.shape == shape and (returned.requires_grad or not trains)
        asked = f"the cross-entropy summed over the targets{' of each sequence' if shape else ''}, a tensor of shape {shape}"
        when = "" if trains else " in eval mode"
        distributed.raise_together(None if good else UserError(
            f"model.factory = {cfg.model.factory!r}: forward(inputs, targets){when} returned {_in_words(returned)}; it must be "
            f"{asked}{', with gradient' if trains else ''}"
        ))  # fmt: skip

    handle = module.register_forward_hook(look, with_kwargs=True)


def _in_words(returned: Any) -> str:
    """Type and shape, of a few things the same."""
    if isinstance(returned, Tensor):
        gradient = "" if returned.requires_grad or not torch.is_grad_enabled() else " without gradient"
        return f"a tensor of shape {tuple(returned.shape)}{gradient}"
    kind = type(returned).__name__
    if isinstance(returned, Mapping):
        return f"{kind} with {', '.join(map(str, returned))}"
    if isinstance(returned, tuple | list):
        return f"{kind} of {', '.join(map(_in_words, returned[:4]))}{', ...' if len(returned) > 4 else ''}"
    return "None" if returned is None else kind


def find_checkpoint(cfg: Config, run_dir: Path, data: TrainingData) -> Checkpoint | None:
    """The newest checkpoint of this run that verifies, if its model and data are the config's; None for a new run. Collective.

    Raises UserError where going on would be wrong: another model shape, other data, or a run whose checkpoints are gone.
    """
    found = checkpoint.newest(run_dir / "checkpoints")
    if found is None:
        published = [r for r in history.read_records(run_dir / "metrics.jsonl") if r["kind"] == "checkpoint"]
        gone = UserError(
            f"run.dir: {run_dir} has trained to step {published[-1]['step']}, but its checkpoints directory is empty; bring "
            "the checkpoints back, or choose another run.dir to start from zero"
        ) if published else None  # fmt: skip
        distributed.raise_together(gone)
        return None
    faults = [
        f"{change.what} is {change.now}, but {found.path} has {change.before}; set it back, or choose another run.dir"
        for change in resume_report.compare({"config": found.state["config"]}, {"config": cfg.model_dump()})
        if change.kind == resume_report.REFUSED and change.what.startswith("model.")
    ]
    if (before := found.state["config"]["optim"]["name"]) != cfg.optim.name:
        faults.append(
            f"optim.name is {cfg.optim.name}, but {found.path} has the state of {before}; set it back, or begin a new run with "
            f"checkpoint.init_from={run_dir}"
        )
    if found.state["data_fingerprint"] != data.fingerprint and not cfg.data.allow_change:
        before = found.state.get("data")
        what = "" if before is None else f": {'; '.join(mixture.changes(before, data.identity))}"
        faults.append(
            f"{_data_key(cfg)}: the data differ from those that {found.path} was trained on"
            f" (fingerprint {data.fingerprint[:12]} against {found.state['data_fingerprint'][:12]}){what}; bring them back, or set"
            " data.allow_change=true to go on with these"
        )
    elif found.state.get("data_sample", data.digest) != data.digest and not (cfg.data.allow_change or faults):
        faults.append(
            f"{_data_key(cfg)}: files were changed in place: the header is that of the data that {found.path} was trained on, the "
            "tokens are not; bring them back, or set data.allow_change=true to go on with these"
        )
    distributed.raise_together(UserError("\n".join(faults)) if faults else None)
    rundir.mend_best(run_dir, State.from_dict(found.state["state"]))
    return found


def _data_key(cfg: Config) -> str:
    return "data.sources" if cfg.data.sources else "data.path"


def pace(cfg: Config, run_dir: Path, validates: bool, parameters: int, saved: Callable[[], float]) -> Pace:
    """For deadlines. The first save of this start is expected to take as long as the last one of the run, else what 12 bytes a
    parameter take at 250 MB/s; rank 0 alone guesses, since the rank that finds a deadline close stops all."""
    guess = 0.0
    if distributed.is_main():
        before = [r for r in history.read_records(run_dir / "metrics.jsonl") if r["kind"] == "checkpoint"]
        last = before[-1].get("save_seconds") if before else None
        guess = last if isinstance(last, float | int) and last else 12 * parameters / 250e6
    return Pace(cfg.eval.every if validates else 0, cfg.checkpoint.every, guess, saved)


def learning_rate(cfg: Config, plan: Plan, rollbacks: list[dict[str, Any]]) -> Callable[[int], float]:
    """The learning rate of update `step` (from 0): the schedule's, and what rollbacks have made of it."""

    def rate(step: int) -> float:
        return rollback.lr_scale(step, rollbacks) * lr_at(
            step, kind=cfg.schedule.kind, peak=cfg.optim.lr, floor=cfg.schedule.min_lr, total=plan.steps,
            warmup=plan.warmup_steps, decay=plan.decay_steps, decay_shape=cfg.schedule.decay_shape,
        )  # fmt: skip

    return rate


def facts(cfg: Config, plan: Plan, data: TrainingData, device: torch.device) -> dict[str, Any]:
    """What a checkpoint tells of the run that made it, besides the state: all that is compared when it is resumed. Collective."""
    return {
        "config": cfg.model_dump(), "world_size": plan.world_size, "strategy": plan.strategy,
        "global_batch": plan.global_batch, "steps": plan.steps, "data_fingerprint": data.fingerprint, "data": data.identity,
        "data_sample": data.digest, "versions": rundir.versions(device),
    }  # fmt: skip


def changes(cfg: Config, found: Checkpoint | None, now: dict[str, Any]) -> list[Change]:
    """What differs between a checkpoint and the `facts` of now. Raises UserError if run.resume_strict forbids it."""
    changed = [] if found is None else resume_report.compare(found.state, now)
    if cfg.run.resume_strict and (faults := resume_report.refusals(changed)):
        raise UserError("\n".join(faults), alike=True)
    return changed


def record(plan: Plan, data: TrainingData, changed: list[Change], lost: tuple[int, float]) -> dict[str, Any]:
    """For the record with which a start or a resume begins in metrics.jsonl. lost: updates done again, their seconds."""
    return {
        "world_size": plan.world_size, "global_batch": plan.global_batch, "restarts": job.restarts(),
        "setup": plan.setup, "repeats": round(data.repeats, 6), "entropy": round(data.entropy, 6),
        "changed": [str(change) for change in changed], "lost_steps": lost[0], "lost_seconds": lost[1],
    }  # fmt: skip


def find_weights(cfg: Config, module: nn.Module) -> Checkpoint | Path | None:
    """What checkpoint.init_from names, if set: a run directory (its newest checkpoint), one checkpoint, or a .safetensors file.

    Raises UserError if it is missing, damaged, or not of this model's names and shapes; before anything is made.
    """
    if cfg.checkpoint.init_from is None:
        return None
    path = Path(cfg.checkpoint.init_from).absolute()
    if not path.exists():
        raise UserError(f"checkpoint.init_from: {path} does not exist")
    if path.suffix == ".safetensors":
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                there = {_plain(n): file.get_slice(n).get_shape() for n in file.keys()}  # noqa: SIM118 - it is not a dict
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"checkpoint.init_from: {path} is not a whole safetensors file: {error}") from None
        found: Checkpoint | Path = path
    elif not path.is_dir():
        raise UserError(f"checkpoint.init_from: {path} is neither a directory nor a .safetensors file")
    else:
        steps = checkpoint.step_directories(path / "checkpoints")
        if links := step_links(path / "checkpoints"):
            raise UserError(f"checkpoint.init_from: {links[-1]} is a link; name the checkpoint that you mean, itself")
        path = steps[-1][1] if steps else path
        try:
            checkpoint.verify(path)
            found = checkpoint.open_checkpoint(path)
        except checkpoint.CheckpointError as error:
            raise UserError(f"checkpoint.init_from: {error}") from None
        saved = found.manifest["tensors"].items()
        there = {_plain(n): tensor["shape"] for n, tensor in saved if not n.startswith("optim.")}
    here = {_plain(n): list(tensor.shape) for n, tensor in model_tensors(module).items()}
    faults = [f"{n} is only in the {'model' if n in here else 'file'}" for n in sorted(here.keys() ^ there.keys())]
    faults += [f"{n} has shape {there[n]} there, {here[n]} here" for n in here if n in there and there[n] != here[n]]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(f"checkpoint.init_from: {path} is not of this model: {'; '.join(faults[:5])}{more}")
    return found


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def restore(
    cfg: Config, found: Checkpoint | None, weights: Checkpoint | Path | None, module: nn.Module,
    optimizer: torch.optim.Optimizer, watch: Watch, scaler: LossScaler, noise: NoiseScale, changed: list[Change],
    state: State,
) -> str:  # fmt: skip
    """The ways to start, in this order: resume this run; weights from checkpoint.init_from; scratch. Collective.

    Fills everything in place but `state`, which `found` has filled. Returns the lines for the banner, with what has `changed`.
    """
    if found is not None:
        checkpoint.load_training(found, module, optimizer)
        watch.load(found.state["watch"])
        scaler.load(found.state["scaler"])
        if "noise" in found.state:  # an older checkpoint has none
            noise.load(found.state["noise"])
        saved_on = f"{found.state['strategy']}, {found.state['world_size']} process(es)"
        known = len(found.state["state"].get("rollbacks", []))
        others = [] if known < len(state.rollbacks) and not changed else resume_report.lines(changed)
        return "\n".join(
            [
                f"resume from {found.path} (step {found.step}; saved by {saved_on})",
                *rollback.lines(state.rollbacks, known),
                *others,
            ]
        )
    if isinstance(weights, Checkpoint):
        checkpoint.load_weights(weights, module)
        return f"weights from {weights.path}, optimizer and step fresh"
    if weights is not None:
        with distributed.together():
            _load_file(weights, module)
        return f"weights from {weights}, optimizer and step fresh"
    return "scratch" if cfg.model.factory is None else f"the weights that {cfg.model.factory} made"


def _load_file(path: Path, module: nn.Module) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        names = {_plain(name): name for name in file.keys()}  # noqa: SIM118 - it is not a dict
        for name, tensor in model_tensors(module).items():
            parallel.copy_full(tensor, file.get_tensor(names[_plain(name)]))
