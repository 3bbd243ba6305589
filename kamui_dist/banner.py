"""What a run prints at its start and its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kamui_dist import __version__, config, model, parallel
from kamui_dist.config import Config
from kamui_dist.mixture import TrainingData
from kamui_dist.plan import Plan
from kamui_dist.state import State
from kamui_dist.stream import TokenStream


@dataclass(frozen=True)
class Counts:
    parameters: int
    without_embeddings: int
    flops_per_token: float


def count(module: nn.Module, cfg: Config) -> Counts:
    """Of the whole model, before it is sharded. FLOPs of a model.factory: 6 a parameter outside the embedding tables."""
    total, rest = model.parameter_counts(module)
    return Counts(total, rest, model.flops_per_token(cfg.model) if cfg.model.factory is None else 6.0 * rest)


def text(
    cfg: Config, plan: Plan, counts: Counts, train: TrainingData, val: dict[str, TokenStream], source_losses: bool,
    device: torch.device, origin: str, run_dir: Path,
) -> str:  # fmt: skip
    """One line a fact, all derived numbers with what they were derived from."""
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} thread(s) a rank"
    )
    ranks = plan.replicate * plan.shard
    kind = cfg.schedule.kind
    rate = f"{kind}, peak {cfg.optim.lr:g}, floor {cfg.schedule.min_lr:g}, warmup {plan.warmup_steps} steps"
    if kind == "wsd":
        rate += f", {cfg.schedule.decay_shape} decay over the last {plan.decay_steps} steps"
    if kind == "constant":
        rate = f"constant, {cfg.optim.lr:g}, warmup {plan.warmup_steps} steps"
    facts = [
        ("model", f"{counts.parameters:,} parameters ({counts.without_embeddings:,} without embeddings), "
                  f"{cfg.model.vocab_size:,} token ids, {counts.flops_per_token:.3g} FLOPs a token"),
        ("data", _data(cfg, plan, train, source_losses)),
        ("validation", "\n".join(f"{name + ': ' if len(val) > 1 else ''}{s.path}: {s.tokens:,} tokens" for name, s in val.items())
                       or "none"),
        ("strategy", f"{plan.strategy} on {plan.world_size} process(es), {where}, {cfg.run.precision}"),
        ("sends", parallel.communication(cfg, plan, counts.parameters)),
        ("batch", f"{cfg.train.micro_batch} sequences x {ranks} rank(s) x {plan.grad_accum_steps} micro-batch(es) = "
                  f"{plan.global_batch} sequences = {plan.tokens_per_step:,} tokens a step"),
        ("duration", f"{plan.steps:,} steps = {plan.tokens:,} tokens = {plan.epochs or 0:.2f} epochs, "
                     f"{plan.tokens / counts.parameters:.1f} tokens a parameter"),
        ("learning rate", rate),
        ("optimizer", f"{cfg.optim.name}, weight decay {cfg.optim.weight_decay:g}, gradients clipped to "
                      f"{cfg.optim.grad_clip or 'nothing'}"),
        ("starts from", origin),
        ("saved in", f"{run_dir} (checkpoint every {cfg.checkpoint.every} steps, newest {cfg.checkpoint.keep or 'all'} kept)"),
    ]  # fmt: skip
    lines = [f"kamui_dist {__version__}, torch {torch.__version__}"]
    for name, fact in facts:
        first, *more = fact.splitlines()
        lines += [f"  {name:<13} {first}", *(f"{'':<16}{line}" for line in more)]
    return "\n".join(lines)


def _data(cfg: Config, plan: Plan, train: TrainingData, source_losses: bool) -> str:
    """Of each source what there is, and what the whole run will see of it."""
    T = cfg.model.context_length
    lines = []
    if not train.mixed:
        [stream], [windows] = train.streams, train.windows_of
        unused = stream.tokens - windows * T - 1
        tail = f" ({unused} tokens at the end unused)" if unused else ""
        lines.append(f"{stream.path} ({stream.format}): {stream.tokens:,} tokens, {windows:,} windows of {T}{tail}")
    else:
        samples = plan.total_samples or plan.steps * plan.global_batch
        seen = train.seen(samples)
        for name, stream, windows, share in zip(
            train.names, train.streams, train.windows_of, train.turns.shares, strict=True
        ):
            lines.append(
                f"{name}: {share:.2%} of the tokens; {windows:,} windows of {T} in {stream.path} ({stream.format}); the run sees"
                f" {seen[name] * T:,} tokens = {seen[name] / windows:.2f} epochs of it"
            )
        if not source_losses:
            lines.append("no loss by source: the model's forward has no argument per_sequence")
    if cfg.data.document_mask:
        lines.append("attention within documents; positions restart in each; no target across a border")
    masked = [name for name, s in zip(train.names, train.streams, strict=True) if s.has_mask]
    if masked:
        lines.append(f"targets chosen by a mask: {', '.join(masked) if train.mixed else 'yes'}")
    return "\n".join(lines)


def config_text(cfg: Config) -> str:
    """For TensorBoard, which reads Markdown."""
    return "    " + config.to_toml(cfg).replace("\n", "\n    ")


def farewell(outcome: str, reason: str, state: State, run_dir: Path, evidence: Path | None) -> str:
    """The last line. evidence: the last incident of this start."""
    best = (
        "" if state.best_step is None else f"; best validation loss {state.best_val_loss:.4f} at step {state.best_step}"
    )
    if outcome == "stopped" and not state.step:
        return f"stopped before the first step ({reason}), nothing is lost; run the same command again"
    if outcome == "stopped":
        return f"stopped at step {state.step} ({reason}), checkpoint written; run the same command again to go on{best}"
    if outcome == "failed":
        return f"stopped at step {state.step} ({reason}); see {evidence or run_dir / 'findings.jsonl'}{best}"
    return f"{outcome.replace('_', ' ')} at step {state.step}{f' ({reason})' if reason else ''}: {run_dir}{best}"
