"""Every knob of a run: type, default, meaning, bounds. config.py reads them from a file and the command line. Imports no torch."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator


def _number(value: Any) -> Any:
    """true is not the number 1, and "3e-4" in quotes is the number 0.0003 (YAML users write it so)."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("should be a number") from None
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]


def knob(default: Any, meaning: str, **bounds: Any) -> Any:
    return Field(default, description=meaning, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=())


class Run(Section):
    dir: str | None = knob(
        None, "where everything of this run is kept; unset: runs/<name of the config file>", min_length=1
    )
    seed: Int = knob(1337, "initial weights, data order and dropout are functions of it", ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "auto: cuda if there is one, else cpu")
    precision: Literal["bf16", "fp16", "fp32"] = knob(
        "bf16", "compute type; weights and optimizer state are fp32 always"
    )
    deterministic: bool = knob(False, "deterministic kernels only (slower)")
    max_minutes: Float | None = knob(None, "stop in time with a checkpoint after this many minutes", gt=0)
    timeout_minutes: Float = knob(
        10.0,
        "start-up, the first step, a validation or a checkpoint in which nothing moves for so long ends the run",
        gt=0,
    )
    hang_minutes: Float = knob(5.0, "any other step in which a rank does not move for so long ends the run", gt=0)
    resume_strict: bool = knob(
        False, "refuse to resume if a change would change the trajectory (--resume-strict sets it)"
    )
    debug: bool = knob(False, "anomaly detection in backward, pdb on an error (launch/debug.sh sets it)")


class Model(Section):
    n_layers: Int = knob(6, "number of transformer blocks", ge=1)
    n_heads: Int = knob(6, "attention heads", ge=1)
    n_kv_heads: Int | None = knob(None, "key/value heads (grouped-query attention); unset: n_heads", ge=1)
    d_model: Int = knob(384, "width of the residual stream", ge=1)
    d_ff: Int | None = knob(None, "width of the MLP; unset: 4 d_model, for swiglu 8/3 d_model rounded up to 64", ge=1)
    vocab_size: Int | None = knob(None, "token ids; unset: taken from the data", ge=1)
    vocab_multiple: Int = knob(
        64, "the embedding is padded to a multiple of this; padding never gets probability", ge=1
    )
    context_length: Int = knob(256, "tokens a sequence", ge=1)
    dropout: Float = knob(0.0, "on the embeddings, the attention weights, and both branches of a block", ge=0, lt=1)
    norm: Literal["layernorm", "rmsnorm"] = knob("layernorm", "normalisation before attention and MLP, and at the end")
    norm_eps: Float = knob(1e-5, "epsilon of the norms", gt=0)
    position: Literal["learned", "rope"] = knob("learned", "position table (GPT-2) or rotation of q and k (Llama)")
    rope_theta: Float = knob(10000.0, "base of the rotary frequencies", gt=0)
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = knob("gelu", "gelu (exact), gelu_tanh (GPT-2's), swiglu (Llama's)")
    bias: bool = knob(True, "biases in linear layers and layer norms")
    tie_embeddings: bool = knob(True, "the output projection is the token embedding")
    qk_norm: bool = knob(False, "normalise q and k in every head before the dot product")
    init_std: Float = knob(0.02, "standard deviation of initial weights", gt=0)
    checkpointing: Literal["none", "selective", "full"] = knob(
        "none", "recompute activations in backward; selective keeps matrix products and attention, full keeps nothing"
    )
    compile: bool = knob(False, "torch.compile for each block")
    flex_attention: bool = knob(True, "data.document_mask on CUDA: by FlexAttention; false: by a T x T boolean mask")
    factory: str | None = knob(
        None, '"package.module:function": your own model; called with this section, returns an nn.Module with '
        "forward(inputs (B, T), targets (B, T)) -> cross-entropy summed over targets != -100"
    )  # fmt: skip
    factory_args: dict[str, JsonValue] = knob({}, "free table for the factory to read (no dates)")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ff(self) -> int:
        default = -(-8 * self.d_model // 3 // 64) * 64 if self.mlp == "swiglu" else 4 * self.d_model
        return self.d_ff or default


class Source(Section):
    """One of several sources in [[data.sources]]."""

    path: str = knob(..., "as data.path", min_length=1)
    weight: Float = knob(1.0, "share of the windows, relative to the weights of the others", gt=0)
    name: str | None = knob(
        None, "in metrics and messages; unset: the last part of the path that says something", pattern=r"^[\w.-]+$"
    )
    dtype: Literal["uint16", "uint32"] | None = knob(None, "as data.dtype")
    separator: Int | None = knob(None, "as data.separator", ge=0)

    @property
    def label(self) -> str:
        return self.name or label(self.path)


class EvalSet(Section):
    """One of several validation sets in [[eval.sets]]."""

    name: str = knob(..., "in metrics and messages", pattern=r"^[\w.-]+$")
    path: str = knob(..., "as data.val_path", min_length=1)
    dtype: Literal["uint16", "uint32"] | None = knob(None, "as data.dtype")
    separator: Int | None = knob(None, "as data.separator", ge=0)


def label(path: str) -> str:
    """A name for a source by its path: data/austen/train -> austen, /x/owt_train.bin -> owt_train."""
    named = [part for part in Path(path).parts if part.strip("/.") and not re.search(r"[*?\[]", part)]
    parts = [re.sub(r"[^\w.-]+", "_", part) for part in named] or ["data"]
    parts[-1] = re.sub(r"\.(bin|npy|idx|json)$", "", parts[-1])
    return next((part for part in reversed(parts) if part not in ("train", "val", "dataset")), parts[-1])


class Data(Section):
    path: str | None = knob(
        None, "what to train on: token shards as `kamui-dist prepare` writes them, or nanoGPT, llm.c, Megatron or .npy "
        "files (a file, a directory, a glob)"
    )  # fmt: skip
    sources: list[Source] = knob([], "instead of path: several, each {path, weight, name, dtype, separator}")
    val_path: str | None = knob(None, "what to validate with, as data.path; unset: no validation, but for eval.sets")
    dtype: Literal["uint16", "uint32"] | None = knob(None, "type of path's files if they have no header; unset: uint16")
    separator: Int | None = knob(None, "token id that ends a document in path and val_path, if they do not say", ge=0)
    document_mask: bool = knob(
        False, "attend within a document only, restart positions at its start, and predict nothing across its end"
    )
    allow_change: bool = knob(False, "let a resumed run go on with data other than its checkpoint saw")


class Optim(Section):
    name: Literal["adamw", "sgd"] = knob("adamw", "optimizer")
    lr: Float = knob(3e-4, "peak learning rate", ge=0)
    weight_decay: Float = knob(0.1, "decay of matrices, never of biases and norms (adamw: decoupled, sgd: L2)", ge=0)
    decay_embeddings: bool = knob(True, "decay the embedding tables too")
    beta1: Float = knob(0.9, "adamw: decay of the first moment", ge=0, lt=1)
    beta2: Float = knob(0.95, "adamw: decay of the second moment", ge=0, lt=1)
    eps: Float = knob(1e-8, "adamw: added to the root of the second moment", gt=0)
    momentum: Float = knob(0.0, "sgd: momentum", ge=0, lt=1)
    grad_clip: Float = knob(1.0, "largest global gradient norm; 0: no clipping", ge=0)


class Schedule(Section):
    kind: Literal["constant", "linear", "cosine", "wsd"] = knob("cosine", "course of the learning rate after warmup")
    warmup: Float = knob(0.0, "length of warmup: steps, or below 1 a fraction of the run", ge=0)
    min_lr: Float = knob(0.0, "floor that the decay ends on", ge=0)
    decay: Float = knob(0.1, "wsd: length of the decay: steps, or below 1 a fraction of the run", ge=0)
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = knob("sqrt", "wsd: sqrt is 1 - sqrt(x)")


class Parallel(Section):
    replicate: Int = knob(-1, "copies of the model, each on its part of the batch (DDP); -1: the rest of the ranks")
    shard: Int = knob(1, "ranks that weights, gradients and optimizer state are divided among (FSDP); -1: the rest")
    tensor: Literal[1] = knob(1, "tensor parallelism; only 1 so far")
    defer_sync: bool = knob(
        True, "accumulate on each rank and communicate gradients once a step; false (FSDP): reduce-scatter each "
        "micro-batch, which keeps only the shard of the gradients"
    )  # fmt: skip
    reshard_after_forward: bool = knob(True, "FSDP: free gathered weights after forward, gather again for backward")
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = knob(
        None, "FSDP: type in which weights are gathered and used; unset: run.precision"
    )
    reduce_dtype: Literal["bf16", "fp32"] = knob("fp32", "FSDP: type in which gradients are reduced")

    @model_validator(mode="after")
    def _shard_takes_the_rest(self) -> Parallel:
        """parallel.shard = -1 alone is FSDP over all ranks: only one of the two can be the rest."""
        if self.shard == -1 and "replicate" not in self.model_fields_set:
            self.replicate = 1
        return self


class Train(Section):
    steps: Int | None = knob(None, "duration in optimizer steps; give steps, tokens or epochs", ge=1)
    tokens: Float | None = knob(None, "duration in tokens", ge=1)
    epochs: Float | None = knob(None, "duration in passes over the data", gt=0)
    micro_batch: Int = knob(8, "sequences a rank and pass", ge=1)
    global_batch: Int | None = knob(None, "sequences a step over all ranks; accumulation is derived", ge=1)
    grad_accum_steps: Int | None = knob(None, "micro-batches a step; unset: derived from global_batch, or 1", ge=1)
    gc_every: Int = knob(1000, "steps between garbage collections, the same on all ranks", ge=1)
    overfit_one_batch: bool = knob(False, "train on the first batch again and again; its loss must go to 0")


class Eval(Section):
    every: Int = knob(250, "steps between validations; 0: only at the end", ge=0)
    sets: list[EvalSet] = knob([], "further validation sets, each {name, path}; the first set decides what is best")
    batches: Int = knob(20, "size of the validation set in global batches; 0: all of it", ge=0)
    patience: Int = knob(0, "stop after this many validations without improvement; 0: never", ge=0)
    min_improvement: Float = knob(0.0, "a validation loss counts as better if lower by more than this", ge=0)
    sample_tokens: Int = knob(0, "tokens of text to let the model write at every validation; 0: none", ge=0)
    sample_prompt: str | None = knob(
        None, "what the text begins with; unset: the first 32 tokens of the first validation set"
    )


class CheckpointSection(Section):
    every: Int = knob(500, "steps between checkpoints; one is always written at the end", ge=1)
    keep: Int = knob(3, "newest checkpoints kept; 0: all", ge=0)
    keep_every: Int = knob(0, "steps that are a multiple of this are kept for ever; 0: none", ge=0)
    best: bool = knob(True, "write and keep a checkpoint whenever the validation loss is the best so far")
    async_: bool = knob(
        False, "copy the state to host memory and write it while training goes on; the last save waits", alias="async"
    )
    init_from: str | None = knob(
        None, "weights to begin from: a run directory, one of its checkpoints, or a .safetensors file"
    )


Action = Literal["off", "note", "warn", "skip", "rollback", "stop"]


class Watch(Section):
    window: Int = knob(128, "steps in the moving average, and in most other windows (at most a fifth of the run)", ge=1)
    spike_factor: Float = knob(3.0, "a loss above this many times its moving average is a spike", gt=1)
    spike_z: Float = knob(
        6.0, "sharper: a loss this many robust deviations above its median, if the gradient norm is large too", gt=0
    )
    spike_norm_factor: Float = knob(2.0, "how large: this many times its median over the window", gt=1)
    max_skipped: Int = knob(20, "this many non-finite updates in a row are too many", ge=1)
    divergence_nats: Float = knob(0.3, "the fast average of the loss above the best slow average by this", gt=0)
    divergence_steps: Int = knob(50, "for so many steps in a row is divergence", ge=1)
    plateau_nats: Float = knob(0.005, "an improvement of the loss below this", gt=0)
    plateau_steps: Int = knob(2000, "in so many steps (a fifth of a short run) is a plateau, while lr is high", ge=2)
    start_steps: Int = knob(
        200,
        "a loss still near ln(vocabulary) after so many steps (a fifth of a short run, at least 100): nothing is learnt",
        ge=2,
    )
    norm_limit: Float = knob(10.0, "a gradient norm before clipping above this for a whole window is too large", gt=0)
    clip_share: Float = knob(0.9, "clipping on more than this share of a window's steps is too much", gt=0, le=1)
    overfit_evals: Int = knob(3, "validations in a row above the best one while the training loss falls", ge=2)
    starvation_share: Float = knob(0.1, "waiting for data for more than this share of a window's time", gt=0, lt=1)
    slow_rank_factor: Float = knob(1.3, "a rank's own time above this many times the median rank's is slow", gt=1)
    throughput_drop: Float = knob(0.3, "tokens per second below its best window by more than this share", gt=0, lt=1)
    memory_growth: Float = knob(0.1, "memory that creeps up by more than this share of itself", gt=0)
    on_spike: Action = knob(
        "warn", "off, note, warn, skip (the update, at most 5 in a row), rollback (to the last good checkpoint), stop"
    )
    on_non_finite: Action = knob("stop", "after max_skipped in a row; a single non-finite update is always skipped")
    on_divergence: Action = knob("warn", "as on_spike")
    on_plateau: Action = knob("note", "as on_spike")
    on_not_learning: Action = knob("warn", "as on_spike")
    on_slow_learning: Action = knob("warn", "as on_spike")
    on_leak: Action = knob("warn", "as on_spike; the model sees tokens that it is to predict")
    on_bad_init: Action = knob("warn", "as on_spike; first loss far from ln(vocabulary)")
    on_large_norm: Action = knob("warn", "as on_spike")
    on_clipping: Action = knob("note", "as on_spike")
    on_overfitting: Action = knob("warn", "as on_spike")
    on_data_starvation: Action = knob("warn", "as on_spike")
    on_slow_rank: Action = knob("note", "as on_spike")
    on_throughput_drop: Action = knob("note", "as on_spike")
    on_memory_growth: Action = knob("warn", "as on_spike")
    on_dead_layers: Action = knob("warn", "as on_spike; looked at every log.detail_every steps")
    max_rollbacks: Int = knob(3, "so many rollbacks in a run; the next one stops it", ge=0)
    rollback_steps: Int = knob(100, "a rollback goes back, and leaves out the data, from so many steps before", ge=0)
    rollback_lr_factor: Float = knob(1.0, "the learning rate after a rollback, times this", gt=0, le=1)
    rollback_warmup: Int = knob(0, "steps in which the learning rate comes back after a rollback", ge=0)


class Log(Section):
    every: Int = knob(10, "steps between lines on the console and points in TensorBoard", ge=1)
    detail_every: Int = knob(100, "steps between looks into the layers, and the first; 0: never", ge=0)
    tensorboard: bool = knob(True, "write TensorBoard event files")
    peak_flops: Float | None = knob(None, "FLOP/s of one device, for MFU; unset: from a table of known GPUs", gt=0)
    profile_steps: list[Int] = knob(
        [], "[first, last] step to record with torch.profiler, into RUN/profile", max_length=2
    )
    memory_history: bool = knob(
        False, "CUDA: record allocations, for a snapshot at the end of profile_steps and at out-of-memory"
    )


class Config(Section):
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: CheckpointSection = CheckpointSection()
    watch: Watch = Watch()
    log: Log = Log()

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """By the names that a config file has: `async` and not `async_`, which Python forces on us."""
        return super().model_dump(**{"by_alias": True, **options})


KEYS = [
    f"{section}.{field.alias or name}"
    for section, table in Config.model_fields.items()
    for name, field in typing.cast(Any, table.annotation).model_fields.items()
]
