"""How a run begins: its data, its model, and where its weights come from. Every fault is told by all ranks alike."""

from __future__ import annotations

import importlib
from pathlib import Path

import safetensors
import torch
from torch import nn

from kamui_dist import checkpoint, distributed, metrics, parallel
from kamui_dist.checkpoint import Checkpoint
from kamui_dist.config import Config
from kamui_dist.data import TokenDataset
from kamui_dist.errors import UserError
from kamui_dist.model import GPT
from kamui_dist.precision import LossScaler
from kamui_dist.tensors import model_tensors
from kamui_dist.watch import Watch

# What may differ between a checkpoint and the config that resumes it; every other key of [model] shapes the weights, or what
# they mean.
FREE_MODEL_KEYS = {"dropout", "checkpointing", "compile", "init_std", "factory_args"}


def open_datasets(cfg: Config) -> tuple[TokenDataset, TokenDataset | None]:
    """Training and validation data, checked against each other and the model. Sets model.vocab_size if it is unset.

    Raises UserError naming the key and the absolute path.
    """
    if cfg.data.path is None:
        raise UserError(
            "data.path is unset; prepare text with `kamui-dist prepare` and set data.path to its train directory"
        )
    train = TokenDataset(cfg.data.path, "data.path")
    val = None if cfg.data.val_path is None else TokenDataset(cfg.data.val_path, "data.val_path")
    length = cfg.model.context_length
    for key, dataset in (("data.path", train), ("data.val_path", val)):
        if dataset is not None and dataset.windows(length) == 0:
            raise UserError(
                f"{key}: {dataset.path.absolute()} has {dataset.tokens} tokens, too few for one sequence; model.context_length "
                f"({length}) needs {length + 1}"
            )
    if val is not None and (val.vocab_size, val.tokenizer_fingerprint) != (
        train.vocab_size,
        train.tokenizer_fingerprint,
    ):
        raise UserError(
            f"data.val_path has another tokenizer than data.path: {val.tokenizer_name} with {val.vocab_size} ids against "
            f"{train.tokenizer_name} with {train.vocab_size}; prepare both together"
        )
    if cfg.model.vocab_size is None:
        cfg.model.vocab_size = train.vocab_size
    elif cfg.model.vocab_size < train.vocab_size:
        raise UserError(
            f"model.vocab_size ({cfg.model.vocab_size}) is smaller than the vocabulary of data.path ({train.vocab_size}); "
            "raise it or leave it unset"
        )
    return train, val


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
    return model


def find_checkpoint(cfg: Config, run_dir: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint of this run that verifies, if its model and data are the config's; None for a new run. Collective.

    Raises UserError where going on would be wrong: another model shape, other data, or a run whose checkpoints are gone.
    """
    found = checkpoint.newest(run_dir / "checkpoints")
    if found is None:
        published = [r for r in metrics.read_records(run_dir / "metrics.jsonl") if r["kind"] == "checkpoint"]
        if published:
            raise UserError(
                f"run.dir: {run_dir} has trained to step {published[-1]['step']}, but its checkpoints directory is empty; bring "
                "the checkpoints back, or choose another run.dir to start from zero"
            )
        return None
    saved = found.state["config"]["model"]
    now = cfg.model.model_dump()
    faults = [
        f"model.{key} is {now[key]}, but {found.path} has {saved[key]}; set it back, or choose another run.dir"
        for key in now
        if key not in FREE_MODEL_KEYS and key in saved and saved[key] != now[key]
    ]
    if (before := found.state["config"]["optim"]["name"]) != cfg.optim.name:
        faults.append(
            f"optim.name is {cfg.optim.name}, but {found.path} has the state of {before}; set it back, or begin a new run with "
            f"checkpoint.init_from={run_dir}"
        )
    if found.state["data_fingerprint"] != fingerprint and not cfg.data.allow_change:
        faults.append(
            f"data.path: the data differ from those that {found.path} was trained on (fingerprint {fingerprint[:12]} against "
            f"{found.state['data_fingerprint'][:12]}); bring them back, or set data.allow_change=true to go on with these"
        )
    if faults:
        raise UserError("\n".join(faults))
    return found


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
    else:
        steps = checkpoint.step_directories(path / "checkpoints")
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
    optimizer: torch.optim.Optimizer, watch: Watch, scaler: LossScaler,
) -> str:  # fmt: skip
    """The ways to start, in this order: resume this run; weights from checkpoint.init_from; scratch. Collective.

    Fills everything in place but the few numbers of State. Returns the lines for the banner.
    """
    if found is not None:
        checkpoint.load_training(found, module, optimizer)
        watch.load(found.state["watch"])
        scaler.load(found.state["scaler"])
        changed = [
            f"changed since: {section}.{key} {old} -> {new}"
            for section, table in cfg.model_dump().items()
            for key, new in table.items()
            if (old := found.state["config"].get(section, {}).get(key)) != new
        ]
        saved_on = f"{found.state['strategy']}, {found.state['world_size']} process(es)"
        return "\n".join([f"resume from {found.path} (step {found.step}; saved by {saved_on})", *changed])
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
