"""What has changed between a checkpoint and the run that goes on from it, and what that means. Pure; imports no torch.

Four classes, from the mildest: harmless (every number stays as it would have been), rounding (the same mathematics in another
order or precision of operations), trajectory (other mathematics from here on), refused (the checkpoint does not fit).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HARMLESS, ROUNDING, TRAJECTORY, REFUSED = "harmless", "rounding", "trajectory", "refused"

MEANING = {
    HARMLESS: "harmless",
    ROUNDING: "changes the trajectory by rounding",
    TRAJECTORY: "changes the trajectory",
    REFUSED: "does not fit the checkpoint",
}

# Each key of the config is in exactly one of these; tests/test_resume_report.py asks for it.
CLASSES: dict[str, str] = {
    **dict.fromkeys((
        "run.dir", "run.max_minutes", "run.timeout_minutes", "run.hang_minutes", "run.resume_strict", "run.debug",
        "model.init_std",  # of weights that are made no more
        "data.path",  # the fingerprint counts, not the place
        "data.val_path", "data.allow_change",
        "train.gc_every",
        "eval.every", "eval.batches", "eval.sets",
        "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.best", "checkpoint.async",
        "checkpoint.init_from",  # only a new run begins from it
        "eval.sample_tokens", "eval.sample_prompt",
        "log.every", "log.detail_every", "log.tensorboard", "log.peak_flops", "log.profile_steps", "log.memory_history",
        # What the watch looks at. What it does about it, the on_* keys, can change the trajectory.
        "watch.window", "watch.spike_factor", "watch.spike_z", "watch.spike_norm_factor", "watch.divergence_nats",
        "watch.divergence_steps", "watch.plateau_nats", "watch.plateau_steps", "watch.start_steps", "watch.norm_limit",
        "watch.clip_share", "watch.overfit_evals", "watch.starvation_share", "watch.slow_rank_factor", "watch.throughput_drop",
        "watch.memory_growth",
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
        "data.sources", "data.separator", "data.document_mask",
        "optim.lr", "optim.weight_decay", "optim.decay_embeddings", "optim.beta1", "optim.beta2", "optim.eps", "optim.momentum",
        "optim.grad_clip",
        "schedule.kind", "schedule.warmup", "schedule.min_lr", "schedule.decay", "schedule.decay_shape",
        "parallel.param_dtype", "parallel.reduce_dtype",
        "train.steps", "train.tokens", "train.epochs", "train.global_batch", "train.grad_accum_steps",
        "train.overfit_one_batch",
        "eval.patience", "eval.min_improvement",  # they decide when the run ends
        "watch.max_skipped",  # likewise
        "watch.on_spike", "watch.on_non_finite", "watch.on_divergence", "watch.on_plateau", "watch.on_not_learning",
        "watch.on_slow_learning", "watch.on_leak", "watch.on_bad_init", "watch.on_large_norm", "watch.on_clipping",
        "watch.on_overfitting", "watch.on_data_starvation", "watch.on_slow_rank", "watch.on_throughput_drop",
        "watch.on_memory_growth", "watch.on_dead_layers", "watch.max_rollbacks", "watch.rollback_steps", "watch.rollback_lr_factor",
        "watch.rollback_warmup",
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
}
# Of provenance: what is not named here is harmless.
_VERSIONS = {"kamui_dist": TRAJECTORY, "git": TRAJECTORY, "torch": ROUNDING, "numpy": ROUNDING, "device": ROUNDING,
             "cuda": ROUNDING}  # fmt: skip
# Keys that only matter through a number of _SETUP, which is compared itself.
_DERIVED = {"train.global_batch", "train.grad_accum_steps", "train.steps", "train.tokens", "train.epochs"}


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
    "steps", "data_fingerprint", "data_sample", "versions": {name: version}}; what an older checkpoint does not have is left out."""
    changes = []
    old_config, new_config = _flat(before.get("config", {})), _flat(now["config"])
    for key in new_config:
        # A key that only one of the two programs knows is a matter of the code's version.
        if key in old_config and old_config[key] != new_config[key]:
            told_by_number = key in _DERIVED and "global_batch" in before and "steps" in before
            # One that this table does not know may be anything.
            kind = HARMLESS if told_by_number else CLASSES.get(key, TRAJECTORY)
            changes.append(Change(kind, key, old_config[key], new_config[key]))
    for key, (kind, what) in _SETUP.items():
        if key in before and before[key] != now[key] and not (key == "steps" and _constant(now["config"])):
            changes.append(Change(kind, what, _short(before[key]), _short(now[key])))
    old_versions, new_versions = before.get("versions") or {}, now.get("versions") or {}
    for name in new_versions:
        if name in old_versions and old_versions[name] != new_versions[name]:
            old, new = old_versions[name], new_versions[name]
            changes.append(Change(_VERSIONS.get(name, HARMLESS), f"version of {name}", _short(old), _short(new)))
    order = [REFUSED, TRAJECTORY, ROUNDING, HARMLESS]
    return sorted(changes, key=lambda change: order.index(change.kind))


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


def _constant(cfg: Mapping[str, Any]) -> bool:
    """Whether the learning rate does not depend on the length of the run: then a longer one begins as the shorter one did."""
    warmup = cfg["schedule"]["warmup"]
    return cfg["schedule"]["kind"] == "constant" and (warmup == 0 or warmup >= 1)


def _short(value: Any) -> Any:
    """Fingerprints and commits as people write them."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28,52}", r"\1", value) if isinstance(value, str) else value
