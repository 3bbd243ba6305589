"""What has changed between a checkpoint and the run that goes on from it, and what that means. Pure; imports no torch.

Four classes, from the mildest: harmless (every number stays as it would have been), rounding (the same mathematics in another
order or precision of operations), trajectory (other mathematics from here on), refused (the checkpoint does not fit).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kamui_dist.findings import GRAVE
from kamui_dist.knobs import Model

HARMLESS, ROUNDING, TRAJECTORY, REFUSED = "harmless", "rounding", "trajectory", "refused"

MEANING = {
    HARMLESS: "harmless",
    ROUNDING: "changes the trajectory by rounding",
    TRAJECTORY: "changes the trajectory",
    REFUSED: "does not fit the checkpoint",
}

# Each key of the config is in exactly one of these; tests/test_resume_report.py asks for it. It is what a change means where the
# key counts: see _COUNTS, _EFFECTIVE and _TOLD_BY for where it does not.
CLASSES: dict[str, str] = {
    **dict.fromkeys((
        "run.dir", "run.max_minutes", "run.timeout_minutes", "run.hang_minutes", "run.resume_strict", "run.debug",
        "model.init_std",  # of weights that are made no more
        "data.path",  # the fingerprint counts, not the place
        "data.allow_change",
        "train.gc_every",
        "eval.sample_tokens", "eval.sample_prompt",
        "checkpoint.async",
        "checkpoint.init_from",  # only a new run begins from it
        "log.every", "log.tensorboard", "log.peak_flops", "log.profile_steps", "log.memory_history",
    ), HARMLESS),
    **dict.fromkeys((
        "run.device", "run.deterministic",
        "model.checkpointing", "model.compile", "model.flex_attention",
        "parallel.replicate", "parallel.shard", "parallel.tensor", "parallel.defer_sync", "parallel.reshard_after_forward",
        "train.micro_batch",
    ), ROUNDING),
    **dict.fromkeys((
        "run.seed", "run.precision",
        "model.dropout", "model.factory_args",
        "data.sources", "data.separator", "data.document_mask", "data.val_path",
        "optim.lr", "optim.weight_decay", "optim.decay_embeddings", "optim.beta1", "optim.beta2", "optim.eps", "optim.momentum",
        "optim.grad_clip",
        "schedule.kind", "schedule.warmup", "schedule.min_lr", "schedule.decay", "schedule.decay_shape",
        "parallel.param_dtype", "parallel.reduce_dtype",
        "train.steps", "train.tokens", "train.epochs", "train.global_batch", "train.grad_accum_steps",
        "train.overfit_one_batch",
        "eval.every", "eval.batches", "eval.sets", "eval.patience", "eval.min_improvement",
        "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.best",
        "watch.window", "watch.spike_factor", "watch.spike_z", "watch.spike_norm_factor", "watch.divergence_nats",
        "watch.divergence_steps", "watch.plateau_nats", "watch.plateau_steps", "watch.start_steps", "watch.norm_limit",
        "watch.clip_share", "watch.overfit_evals", "watch.starvation_share", "watch.slow_rank_factor", "watch.throughput_drop",
        "watch.memory_growth", "watch.max_skipped",
        "watch.on_spike", "watch.on_non_finite", "watch.on_divergence", "watch.on_plateau", "watch.on_not_learning",
        "watch.on_slow_learning", "watch.on_leak", "watch.on_bad_init", "watch.on_large_norm", "watch.on_clipping",
        "watch.on_overfitting", "watch.on_data_starvation", "watch.on_slow_rank", "watch.on_throughput_drop",
        "watch.on_memory_growth", "watch.on_dead_layers", "watch.max_rollbacks", "watch.rollback_steps", "watch.rollback_lr_factor",
        "watch.rollback_warmup",
        "log.detail_every",
    ), TRAJECTORY),
    **dict.fromkeys((
        "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.d_model", "model.d_ff", "model.vocab_size",
        "model.vocab_multiple", "model.context_length", "model.norm", "model.norm_eps", "model.position", "model.rope_theta",
        "model.mlp", "model.bias", "model.tie_embeddings", "model.qk_norm", "model.factory",
        "data.dtype",
        "optim.name",
    ), REFUSED),
}  # fmt: skip

# What is compared besides the config: keys of a checkpoint's state.
_SETUP = {
    "world_size": (ROUNDING, "world size"),
    "strategy": (ROUNDING, "strategy"),
    "global_batch": (TRAJECTORY, "sequences a step"),
    "steps": (TRAJECTORY, "steps of the run"),
    "data_fingerprint": (TRAJECTORY, "data fingerprint"),
    "data_sample": (TRAJECTORY, "checksum of some windows of the data"),
    "validation": (TRAJECTORY, "first validation set (a best loss on the old one is forgotten)"),
}
# Of provenance: what is not named here is harmless.
_VERSIONS = {"kamui_dist": TRAJECTORY, "git": TRAJECTORY, "torch": ROUNDING, "numpy": ROUNDING, "device": ROUNDING,
             "cuda": ROUNDING}  # fmt: skip
# Keys that only matter through what is compared itself, where both sides know it.
_TOLD_BY = {
    **dict.fromkeys(("train.global_batch", "train.grad_accum_steps"), ("global_batch",)),
    **dict.fromkeys(("train.steps", "train.tokens", "train.epochs"), ("global_batch", "steps")),
    **dict.fromkeys(("parallel.replicate", "parallel.shard"), ("world_size", "strategy")),
    "data.dtype": ("data_fingerprint",),
    **dict.fromkeys(("data.val_path", "eval.sets", "eval.batches"), ("validation",)),
    "run.device": ("device",),
}
# With dropout each of these has other masks, which depend on rank, micro-batch, device and compiler.
_MASKS = {"world_size", "train.micro_batch", "device", "model.compile"}

Side = dict[str, Any]  # every key of a config, and what there is of _SETUP beside them


def _watch_decides(s: Side) -> bool:
    """Whether a finding may change the weights or end the run. What is not finite is found without any threshold."""
    return any(v in GRAVE for k, v in s.items() if k.startswith("watch.on_") and k != "watch.on_non_finite")


def _goes_back(s: Side) -> bool:
    """Whether the watch may turn the run back, to a checkpoint that is there."""
    return any(v == "rollback" for k, v in s.items() if k.startswith("watch.on_"))


def _validation_decides(s: Side) -> bool:
    """Whether validations do more than tell: they end the run, or one that is the best makes a checkpoint to go back to."""
    return s["eval.patience"] > 0 or s["watch.on_overfitting"] in GRAVE or (s["checkpoint.best"] and _goes_back(s))


def _sharded(s: Side) -> bool:
    return "SDP" in s.get("strategy", "FSDP")  # FSDP 8, HSDP 2 x 8


def _by_document(s: Side) -> bool:
    return bool(s["data.document_mask"])


def _action(key: str) -> Callable[[Side], bool]:
    return lambda s: s[key] in GRAVE


# Where a key counts at all: a change is harmless if it does in neither of the two configs.
_COUNTS: dict[str, Callable[[Side], bool]] = {
    **{key: _watch_decides for key in CLASSES if key.startswith("watch.")}, "log.detail_every": _watch_decides,
    **{key: _action(key) for key in CLASSES if key.startswith("watch.on_")}, "watch.max_skipped": _action("watch.on_non_finite"),
    **dict.fromkeys(("watch.max_rollbacks", "watch.rollback_steps", "watch.rollback_lr_factor", "watch.rollback_warmup",
                     "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.best"), _goes_back),
    **dict.fromkeys(("data.val_path", "eval.sets", "eval.batches", "eval.every", "eval.min_improvement", "validation"),
                    _validation_decides),
    **dict.fromkeys(("parallel.defer_sync", "parallel.reshard_after_forward", "parallel.param_dtype", "parallel.reduce_dtype"),
                    _sharded),
    **dict.fromkeys(("data.separator", "model.flex_attention"), _by_document),
    **dict.fromkeys(("optim.beta1", "optim.beta2", "optim.eps"), lambda s: s["optim.name"] == "adamw"),
    "optim.momentum": lambda s: s["optim.name"] == "sgd",
    "optim.decay_embeddings": lambda s: s["optim.weight_decay"] > 0,
    "schedule.min_lr": lambda s: s["schedule.kind"] != "constant",
    **dict.fromkeys(("schedule.decay", "schedule.decay_shape"), lambda s: s["schedule.kind"] == "wsd"),
    "steps": lambda s: s["schedule.kind"] != "constant" or _watch_decides(s),  # windows of the watch are shorter in a short run
    "model.rope_theta": lambda s: s["model.position"] == "rope",
}  # fmt: skip


def _warmup(s: Side) -> Any:
    return _in_steps(s["schedule.warmup"], s.get("steps"))


def _decay(s: Side) -> Any:
    decay, both = _in_steps(s["schedule.decay"], s.get("steps")), s["schedule.warmup"] + s["schedule.decay"]
    fits = s["schedule.warmup"] < 1 and s["schedule.decay"] < 1 and both <= 1 and "steps" in s
    return min(decay, s["steps"] - _warmup(s)) if fits else decay  # as in plan.py


def _in_steps(length: float, steps: int | None) -> float:
    return length if length >= 1 or steps is None else round(length * steps)


def _padded(s: Side) -> Any:
    size, multiple = s["model.vocab_size"], s["model.vocab_multiple"]
    return (size, multiple) if size is None else -(-size // multiple) * multiple


# What a key comes to, where that can be written in several ways.
_EFFECTIVE: dict[str, Callable[[Side], Any]] = {
    "model.n_kv_heads": lambda s: Model.model_construct(**_section(s, "model")).kv_heads,
    "model.d_ff": lambda s: Model.model_construct(**_section(s, "model")).ff,
    "model.vocab_multiple": _padded,
    "parallel.param_dtype": lambda s: s["parallel.param_dtype"] or s["run.precision"],
    "schedule.warmup": _warmup,
    "schedule.decay": _decay,
    # The order and what is in it are in the fingerprint; a separator is not.
    "data.sources": lambda s: (s.get("data_fingerprint", s["data.sources"]),
                               _by_document(s) and [source.get("separator") for source in s["data.sources"]]),
}  # fmt: skip


def _section(s: Side, name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in s.items() if key.startswith(f"{name}.")}


@dataclass(frozen=True)
class Change:
    kind: str
    what: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{MEANING[self.kind]}: {self.what} {self.before} -> {self.now}"


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """All differences, the gravest first. Both: {"config": {section: {key: value}}, "world_size", "strategy", "global_batch",
    "steps", "data_fingerprint", "data_sample", "validation", "versions": {name: version}}; what an older checkpoint does not have
    is left out."""
    old_config, new_config = _flat(before.get("config", {})), _flat(now["config"])
    old_versions, new_versions = before.get("versions") or {}, now.get("versions") or {}
    setup = [key for key in _SETUP if key in before and key in now]
    known = {*setup, *(old_versions.keys() & new_versions.keys())}
    new = {**new_config, **{key: now[key] for key in setup}}
    old = {**new, **old_config, **{key: before[key] for key in setup}}  # what it lacks was as it is now
    changes = []
    for key in new_config:
        # A key that only one of the two programs knows is a matter of the code's version.
        if key in old_config and old_config[key] != new_config[key]:
            # One that this table does not know may be anything.
            kind = CLASSES.get(key, REFUSED if key.startswith("model.") else TRAJECTORY)
            told = known.issuperset(_TOLD_BY.get(key, ("",)))
            changes.append(
                Change(HARMLESS if told else _kind(key, kind, old, new), key, old_config[key], new_config[key])
            )
    for key in setup:
        kind, what = _SETUP[key]
        # Steps that do not count are told of by the key that gives them.
        if before[key] != now[key] and ((kind := _kind(key, kind, old, new)) != HARMLESS or key != "steps"):
            changes.append(Change(kind, what, _short(before[key]), _short(now[key])))
    for name in new_versions:
        if name in old_versions and old_versions[name] != new_versions[name]:
            kind = _kind(name, _VERSIONS.get(name, HARMLESS), old, new)
            changes.append(Change(kind, f"version of {name}", _short(old_versions[name]), _short(new_versions[name])))
    order = [REFUSED, TRAJECTORY, ROUNDING, HARMLESS]
    return sorted(changes, key=lambda change: order.index(change.kind))


def _kind(key: str, kind: str, old: Side, new: Side) -> str:
    """`kind`, or what a change of `key` means between these two."""
    if key.startswith("model.") and (old["model.factory"] or new["model.factory"]):
        return kind  # a factory reads [model] as it likes
    if key in _COUNTS and not (_COUNTS[key](old) or _COUNTS[key](new)):
        # Of a constant learning rate only the warmup can depend on the number of steps.
        return TRAJECTORY if key == "steps" and _warmup(old) != _warmup(new) else HARMLESS
    if key in _EFFECTIVE and _EFFECTIVE[key](old) == _EFFECTIVE[key](new):
        return HARMLESS
    return TRAJECTORY if key in _MASKS and max(old["model.dropout"], new["model.dropout"]) > 0 else kind


def lines(changes: list[Change]) -> list[str]:
    """For the start of the run."""
    if not changes:
        return ["nothing has changed since: it goes on bit by bit"]
    return [f"changed since, {change}" for change in changes]


def refusals(changes: list[Change]) -> list[str]:
    """What --resume-strict does not go on with, one line each."""
    return [
        f"--resume-strict: {change}; set it back, or leave --resume-strict out"
        for change in changes
        if change.kind != HARMLESS
    ]


def _flat(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, table in cfg.items() for name, value in table.items()}


def _short(value: Any) -> Any:
    """Fingerprints and commits as people write them."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28,52}", r"\1", value) if isinstance(value, str) else value
