"""Every number that is derived from the config: mesh, accumulation, duration, warmup; and the contradictions between keys.

Pure arithmetic, no torch: a mistake costs one line before a process group or a directory exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.watch import Facts


@dataclass(frozen=True)
class Plan:
    world_size: int
    replicate: int
    shard: int
    grad_accum_steps: int
    global_batch: int  # sequences a step, over all ranks and micro-batches
    tokens_per_step: int
    steps: int  # optimizer updates of the whole run
    warmup_steps: int
    decay_steps: int  # wsd only
    windows: int | None  # windows of context_length tokens in the data, where known
    total_samples: int | None  # train.epochs: exactly so many windows, the rest of the last batch is masked

    @property
    def strategy(self) -> str:
        if self.world_size == 1:
            return "single"
        if self.shard == 1:
            return f"DDP {self.replicate}"
        return f"FSDP {self.shard}" if self.replicate == 1 else f"HSDP {self.replicate} x {self.shard}"

    @property
    def setup(self) -> str:
        """In other ones a step takes another time, and other memory."""
        return f"{self.strategy}, {self.global_batch} sequences in {self.grad_accum_steps} micro-batches"

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float | None:
        return self.steps * self.global_batch / self.windows if self.windows else None


def make_plan(
    cfg: Config, world_size: int, windows: int | None = None, done: tuple[int, int, int] | None = None
) -> Plan:
    """The plan for `world_size` processes and data of `windows` windows (None: not known yet; then train.epochs counts as one
    step). `done`: steps, samples and tokens of the run so far; of a resumed one the batch may have been another one, and what is
    left of train.tokens or train.epochs is divided by the batch of now. None: not known yet; then it is as for a new run, but what
    depends on the number of steps is not judged. Raises UserError with one line for each contradiction in the config."""
    faults = list(_contradictions(cfg))
    mesh = _mesh(cfg, world_size, faults)
    replicate, shard = mesh or (world_size, 1)
    accum, global_batch = _batch(cfg, replicate * shard, faults if mesh else [])  # without a mesh its numbers mislead
    tokens_per_step = global_batch * cfg.model.context_length
    total_samples = None
    steps_done, samples_done, tokens_done = done or (0, 0, 0)
    if cfg.train.tokens is not None:
        steps = steps_done + max(0, math.ceil((cfg.train.tokens - tokens_done) / tokens_per_step))
    elif cfg.train.epochs is not None:
        total_samples = round(cfg.train.epochs * windows) if windows else None
        steps = max(1, steps_done + max(0, math.ceil(((total_samples or 1) - samples_done) / global_batch)))
    else:
        steps = cfg.train.steps or 1
    warmup = _length(cfg.schedule.warmup, steps, "schedule.warmup", faults)
    decay = _length(cfg.schedule.decay, steps, "schedule.decay", faults) if cfg.schedule.kind == "wsd" else 0
    if cfg.schedule.warmup < 1 and cfg.schedule.decay < 1 and cfg.schedule.warmup + cfg.schedule.decay <= 1:
        decay = min(decay, steps - warmup)  # both may have been rounded up
    known = done is not None and (cfg.train.epochs is None or windows is not None)
    if known and warmup + decay > steps:
        with_decay = f" + schedule.decay ({decay})" if cfg.schedule.kind == "wsd" else ""
        faults.append(
            f"schedule.warmup ({warmup} steps){with_decay} is longer than the run ({steps} steps); shorten it"
        )
    if faults:
        raise UserError("\n".join(faults))
    return Plan(
        world_size, replicate, shard, accum, global_batch, tokens_per_step, steps, warmup, decay, windows, total_samples
    )


def watch_facts(cfg: Config, plan: Plan, fresh: bool, repeats: float = 0.0, entropy: float | None = None) -> Facts:
    """What the watch has to know of the run. fresh: begun with initial weights of ours. repeats, entropy: of the
    data (mixture.py)."""
    decay = plan.decay_steps if cfg.schedule.kind == "wsd" else 0
    return Facts(
        vocab_size=cfg.model.vocab_size, steps=plan.steps, lr=cfg.optim.lr, warmup=plan.warmup_steps,
        decay_from=plan.steps - decay if decay else None, grad_clip=cfg.optim.grad_clip,
        windows=plan.global_batch if cfg.train.overfit_one_batch else plan.windows,
        global_batch=plan.global_batch, fresh=fresh and cfg.model.factory is None, setup=plan.setup,
        precision=cfg.run.precision, repeats=repeats, entropy=entropy,
    )  # fmt: skip


def _contradictions(cfg: Config) -> Iterator[str]:
    m, train, sched = cfg.model, cfg.train, cfg.schedule
    durations = [f"train.{k} = {v}" for k in ("steps", "tokens", "epochs") if (v := getattr(train, k)) is not None]
    if len(durations) != 1:
        yield f"give exactly one of train.steps, train.tokens, train.epochs (given: {', '.join(durations) or 'none'})"
    if train.tokens is not None and train.tokens != int(train.tokens):
        yield f"train.tokens = {train.tokens} must be a whole number"
    if train.global_batch is not None and train.grad_accum_steps is not None:
        yield (
            f"train.global_batch ({train.global_batch}) and train.grad_accum_steps ({train.grad_accum_steps}) are both "
            "given; each follows from the other, give one"
        )
    if m.factory is None:
        if m.d_model % m.n_heads:
            yield f"model.d_model ({m.d_model}) must be a multiple of model.n_heads ({m.n_heads})"
        elif m.position == "rope" and (m.d_model // m.n_heads) % 2:
            yield f"model.position = rope needs an even head width; model.d_model / model.n_heads = {m.d_model // m.n_heads}"
        if m.n_heads % m.kv_heads:
            yield f"model.n_heads ({m.n_heads}) must be a multiple of model.n_kv_heads ({m.kv_heads})"
    if sched.kind != "constant" and sched.min_lr > cfg.optim.lr:
        yield f"schedule.min_lr ({sched.min_lr}) is above optim.lr ({cfg.optim.lr})"
    if sched.kind == "wsd" and sched.decay_shape == "exponential" and sched.min_lr <= 0:
        yield "schedule.decay_shape = exponential never reaches 0; set schedule.min_lr above 0"
    if cfg.data.val_path is None and not cfg.eval.sets and cfg.eval.patience:
        yield f"eval.patience = {cfg.eval.patience} needs data.val_path"
    if cfg.eval.sample_tokens and cfg.data.val_path is None and not cfg.eval.sets:
        yield (
            f"eval.sample_tokens = {cfg.eval.sample_tokens} needs data.val_path or eval.sets: samples are written at validations"
        )
    yield from _data_contradictions(cfg)
    yield from _profile_contradictions(cfg)


def _profile_contradictions(cfg: Config) -> Iterator[str]:
    if not (steps := cfg.log.profile_steps):
        return
    first, last = steps[0], steps[-1]
    if first < 1:
        yield f"log.profile_steps = {steps}: steps count from 1"
    elif last < first:
        yield f"log.profile_steps = {steps}: the last step is before the first; write [{last}, {first}]"
    elif last - first >= 50:
        yield f"log.profile_steps = {steps} are {last - first + 1} steps; 50 at most, and 3 to 5 say as much"
    elif cfg.train.steps is not None and last > cfg.train.steps:
        yield f"log.profile_steps = {steps}: the run has only train.steps = {cfg.train.steps}"


def _data_contradictions(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if data.path is not None and data.sources:
        yield f"data.path = {data.path!r} and data.sources are both given; make the path one of the sources"
    if data.sources and data.dtype is not None:
        yield f"data.dtype = {data.dtype!r} is for data.path; with data.sources give each its own dtype"
    sets = [s.name for s in cfg.eval.sets] + (["val"] if data.val_path is not None else [])
    for key, names in (("data.sources", [s.label for s in data.sources]), ("eval.sets", sets)):
        for name in sorted({n for n in names if names.count(n) > 1}):
            other = " (data.val_path is the set val)" if name == "val" and key == "eval.sets" else ""
            yield f"{key}: {names.count(name)} are named {name!r}{other}; give each a name of its own"


def _mesh(cfg: Config, world_size: int, faults: list[str]) -> tuple[int, int] | None:
    """(replicate, shard), or None and a fault."""
    p = cfg.parallel
    replicate, shard = p.replicate, p.shard
    for key, value in (("replicate", replicate), ("shard", shard)):
        if value == 0 or value < -1:
            faults.append(f"parallel.{key} = {value} must be 1 or more, or -1 for the rest of the ranks")
            return None
    if shard == -1 and replicate == -1:
        faults.append("parallel.replicate and parallel.shard are both -1; only one can be the rest of the ranks")
        return None
    known = max(replicate, 1) * max(shard, 1)
    if (-1 in (replicate, shard) and world_size % known) or (-1 not in (replicate, shard) and known != world_size):
        faults.append(
            f"parallel.replicate ({replicate}) x parallel.shard ({shard}) does not fit the number of processes "
            f"({world_size}); start {known} processes or set one of them to -1"
        )
        return None
    replicate = world_size // known if replicate == -1 else replicate
    shard = world_size // known if shard == -1 else shard
    return replicate, shard


def _batch(cfg: Config, ranks: int, faults: list[str]) -> tuple[int, int]:
    micro, wanted = cfg.train.micro_batch, cfg.train.global_batch
    if wanted is None:
        accum = cfg.train.grad_accum_steps or 1
        return accum, accum * micro * ranks
    one_pass = micro * ranks
    if wanted % one_pass:
        below, above = wanted // one_pass * one_pass, -(-wanted // one_pass) * one_pass
        faults.append(
            f"train.global_batch ({wanted}) must be a multiple of train.micro_batch x data-parallel ranks "
            f"({micro} x {ranks} = {one_pass}); set train.global_batch to {f'{below} or ' if below else ''}{above}"
        )
    return max(1, wanted // one_pass), wanted


def _length(value: float, steps: int, key: str, faults: list[str]) -> int:
    """Below 1 a fraction of the run, else whole steps."""
    if value < 1:
        return round(value * steps)
    if value != int(value):
        faults.append(f"{key} = {value} must be a whole number of steps, or a fraction below 1")
    return int(value)
