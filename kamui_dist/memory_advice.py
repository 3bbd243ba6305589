"""What the memory of one rank goes to, and which key frees how much of it: arithmetic on the config. Imports no torch.

Bytes a rank, with P parameters, S = parallel.shard, B = train.micro_batch, T = model.context_length, D = d_model, F = d_ff,
K = kv_heads * D / n_heads, V token ids, c bytes of run.precision, r bytes of the residual stream (4; under FSDP c):

    weights     4 P / S, and copies in compute type: 2 P kept by autocast, or what FSDP gathers (two blocks and what is no block;
                all of it without parallel.reshard_after_forward)
    gradients   4 P / S; under FSDP with parallel.defer_sync and more than one micro-batch 4 P
    optimizer   adamw 8 P / S; sgd with momentum 4 P / S
    activations B T times, a block: 2 D r (what the norms read), their results in compute type, (2 D + 2 K) c (q, k, v and what
                attention makes of them), 2 F c for the MLP (4 F c for swiglu); with dropout a byte a mask
                checkpointing = full: D r; selective: D r and every matrix product; with both one whole block more
    logits      3 * 4 B T V: their softmax is kept for backward, which makes two more of that size

The activations are eq. 1 of Korthikanti et al. 2022 (arXiv:2205.05198), 34 B T D a block, without its T x T term, which fused
attention does not keep, and for what this model and torch.autocast keep instead. All of it at once is more than any moment
needs: gradients are whole when activations are gone. The allocator's waste, CUDA's context and NCCL's buffers (1 to 2 GiB) are
not counted.

Checked by tests/test_profiler.py with the CPU's allocator, in fp32 and bf16, for 8 kinds of small models and each kind of
checkpointing: what a forward pass leaves is 94 to 100 % of what was measured; the most held in backward is 57 to 98 % of the sum
(lowest for checkpointing = full with few layers). Weights, gradients and moments on 2 ranks under DDP and FSDP, to 0.1 %. Not
checked: CUDA, and what FSDP gathers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kamui_dist.knobs import Config, Model
from kamui_dist.plan import Plan

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. activations and logits: None for a model of model.factory, whose inside is not known."""

    weights: float
    gradients: float
    optimizer: float
    activations: float | None
    logits: float | None

    @property
    def total(self) -> float:
        return sum(value or 0.0 for value in dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = [f"{f.name} {size(v)}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None]
        return f"{', '.join(parts)}: {size(self.total)} in all"


def estimate(cfg: Config, plan: Plan, parameters: int) -> Memory:
    """`parameters` of the whole model. model.vocab_size must be known, unless there is a model.factory."""
    m, sharded, width = cfg.model, plan.shard > 1, 4 if cfg.run.precision == "fp32" else 2
    weights = 4 * parameters / plan.shard
    if sharded:
        gathered = {"fp32": 4, "bf16": 2, "fp16": 2}[cfg.parallel.param_dtype or cfg.run.precision]
        blocks = 0 if m.factory else _block(m) * m.n_layers
        two = parameters - blocks + 2 * blocks / m.n_layers
        weights += gathered * (min(parameters, two) if cfg.parallel.reshard_after_forward else parameters)
    elif width < 4:
        weights += 2 * parameters
    deferred = sharded and cfg.parallel.defer_sync and plan.grad_accum_steps > 1
    gradients = 4 * parameters / (1 if deferred else plan.shard)
    per_parameter = 8 if cfg.optim.name == "adamw" else 4 if cfg.optim.momentum else 0
    optimizer = per_parameter * parameters / plan.shard
    if m.factory is not None:
        return Memory(weights, gradients, optimizer, None, None)
    return Memory(weights, gradients, optimizer, sum(activations(cfg, sharded)), 3 * softmax(cfg))


def softmax(cfg: Config) -> float:
    """Bytes that the output of the model takes in fp32, B T V of them."""
    return 4.0 * cfg.train.micro_batch * cfg.model.context_length * (cfg.model.vocab_size or 0)


def activations(cfg: Config, sharded: bool) -> tuple[float, float]:
    """Bytes of one micro-batch, without logits: kept from forward for backward, and what backward computes again at a time."""
    m, tokens, cpu = cfg.model, cfg.train.micro_batch * cfg.model.context_length, cfg.run.device == "cpu"
    c = 4 if cfg.run.precision == "fp32" else 2
    r = c if sharded else 4
    D, K, F, gated = m.d_model, m.d_model // m.n_heads * m.kv_heads, m.ff, m.mlp == "swiglu"
    mlp = 2 * F * (2 if gated else 1)
    # autocast makes a copy of what a norm returns for each product that reads it: q, k and v, and up (and gate)
    results = (4 + gated) * D * c if r != c else 2 * D * c
    heads = 2 * D + 2 * (D if cpu else K)  # the CPU's attention repeats k and v for each group
    unfused = r if cpu and m.norm == "rmsnorm" else 0  # what the CPU's rms_norm keeps besides its input
    each = 2 * D * (r + unfused) + results + heads * c + 4 * m.n_heads + mlp * c
    if m.qk_norm:
        each += (D + K) * (r + unfused)
    if m.dropout > 0:
        # a byte an element on CUDA; the CPU's masks are numbers, and with dropout its attention is not fused
        each += 2 * 4 * D + 12 * m.n_heads * m.context_length if cpu else 2 * D
    attention = 0 if m.dropout > 0 else D * c + 4 * m.n_heads  # selective: see model.Block
    kept = {
        "none": each,
        "selective": D * r + (3 * D + 2 * K + mlp / 2) * c + attention,
        "full": D * r,
    }[m.checkpointing]
    # the final norm, and the dropout of the embeddings
    last = D * (r + unfused) + D * c + (D * (4 if cpu else 1) if m.dropout > 0 else 0)
    total, again = tokens * (m.n_layers * kept + last), tokens * (each - kept)
    flex = m.flex_attention and m.dropout == 0 and cfg.run.device != "cpu"
    if cfg.data.document_mask and not flex:
        total += tokens * m.context_length * (1 + c)  # the mask, and as attention adds it to the scores
    return float(total), float(again)


def count_parameters(m: Model) -> int | None:
    """Of our own model, whole; None for a model.factory, and while model.vocab_size is unset."""
    if m.factory is not None or m.vocab_size is None:
        return None
    tables = -(-m.vocab_size // m.vocab_multiple) * m.vocab_multiple * (1 if m.tie_embeddings else 2)
    positions = m.context_length if m.position == "learned" else 0
    return (tables + positions) * m.d_model + m.n_layers * _block(m) + _norm(m, m.d_model)


def _norm(m: Model, width: int) -> int:
    return width * (2 if m.bias and m.norm == "layernorm" else 1)


def _block(m: Model) -> int:
    """Parameters of one block."""
    head, ups = m.d_model // m.n_heads, 2 if m.mlp == "swiglu" else 1
    outs = (
        m.d_model + 2 * m.kv_heads * head + m.d_model + ups * m.ff + m.d_model
    )  # of q, k and v, o, up (and gate), down
    products = m.d_model * (2 * m.d_model + 2 * m.kv_heads * head) + (ups + 1) * m.d_model * m.ff
    norms = 2 * _norm(m, m.d_model) + (2 * _norm(m, head) if m.qk_norm else 0)
    return products + norms + (outs if m.bias else 0)


def advise(cfg: Config, plan: Plan, parameters: int | None) -> list[str]:
    """For a rank that ran out of memory: what it holds, then each key that would free some of it, the most first.
    parameters: of the whole model; None: not known.
    """
    if parameters is None or (cfg.model.factory is None and cfg.model.vocab_size is None):
        return [
            "train.micro_batch: half of it halves activations and logits, which are most of the memory of most runs"
        ]
    now = estimate(cfg, plan, parameters)
    freed = [(now.total - estimate(c, p, parameters).total, text) for text, c, p in _changes(cfg, plan)]
    lines = [f"memory of one rank, estimated: {now}"]
    lines += [
        f"{text}: about {size(less)} less" for less, text in sorted(freed, reverse=True) if less > now.total / 100
    ]
    if now.activations is None:
        one = f"train.micro_batch = {cfg.train.micro_batch}: less of it frees activations, which are not known of your own model"
        lines.insert(1, f"{one} (model.factory)")
    return lines


def _changes(cfg: Config, plan: Plan) -> list[tuple[str, Config, Plan]]:
    """What may be changed without another result, but for rounding: (in words, the config, the plan)."""
    out = []
    micro, accum, m, p = cfg.train.micro_batch, plan.grad_accum_steps, cfg.model, cfg.parallel
    if micro > 1 and m.factory is None:
        fewer = max(n for n in range(1, micro) if micro % n == 0)
        times = micro // fewer
        same = "" if cfg.train.global_batch else f" and train.grad_accum_steps = {accum * times}"
        text = f"train.micro_batch {micro} -> {fewer}{same} (the same batch in {times} times as many passes)"
        out.append(
            (text, _with(cfg, "train", micro_batch=fewer), dataclasses.replace(plan, grad_accum_steps=accum * times))
        )
    for kind in ("selective", "full") if m.factory is None else ():
        if m.checkpointing not in (kind, "full"):
            again = "what is cheap" if kind == "selective" else "the whole forward pass"
            text = f"model.checkpointing = {kind} (backward computes {again} again)"
            out.append((text, _with(cfg, "model", checkpointing=kind), plan))
    if plan.shard < plan.world_size:
        text = f"parallel.shard = {plan.world_size} (FSDP over all ranks)"
        out.append((text, cfg, dataclasses.replace(plan, shard=plan.world_size, replicate=1)))
    if plan.shard > 1 and p.defer_sync and accum > 1:
        text = "parallel.defer_sync = false (gradients are sent in each micro-batch)"
        out.append((text, _with(cfg, "parallel", defer_sync=False), plan))
    if plan.shard > 1 and not p.reshard_after_forward:
        text = "parallel.reshard_after_forward = true (weights are gathered again for backward)"
        out.append((text, _with(cfg, "parallel", reshard_after_forward=True), plan))
    if cfg.run.precision == "fp32":
        out.append(("run.precision = bf16 (this one does change results)", _with(cfg, "run", precision="bf16"), plan))
    if cfg.data.document_mask and not m.flex_attention:
        out.append(("model.flex_attention = true (on CUDA)", _with(cfg, "model", flex_attention=True), plan))
    return out


def _with(cfg: Config, section: str, **values: object) -> Config:
    return cfg.model_copy(update={section: getattr(cfg, section).model_copy(update=values)})


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
