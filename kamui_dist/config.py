"""Every knob of a run: type, default, meaning, bounds. A TOML file plus `section.key=value` overrides. Imports no torch.

    cfg = load(Path("configs/austen_tiny.toml"), ["train.steps=20", "optim.lr=3e-4"])

Order: defaults < file < overrides. All faults are reported together, one line each. A value on the command line is in TOML
syntax; a bare word is a string, and `none` takes an optional key back to unset. Relative paths are relative to the working
directory. Where only one of several keys may be set (train.steps, train.tokens, train.epochs; train.global_batch,
train.grad_accum_steps; data.path, data.sources), one on the command line replaces another one in the file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator

from kamui_dist.errors import UserError

# What other trainers call our keys, for "did you mean".
ALIASES = {
    "learning_rate": "optim.lr", "batch_size": "train.micro_batch", "max_steps": "train.steps", "max_iters": "train.steps",
    "seq_len": "model.context_length", "block_size": "model.context_length", "n_layer": "model.n_layers",
    "n_head": "model.n_heads", "n_embd": "model.d_model", "max_norm": "optim.grad_clip", "gradient_accumulation_steps":
    "train.grad_accum_steps", "warmup_steps": "schedule.warmup", "save_every": "checkpoint.every", "seed": "run.seed",
}  # fmt: skip
UNSET = ("none", "null")  # as the value on the command line
EITHER_OR = [
    ("train.steps", "train.tokens", "train.epochs"),
    ("train.global_batch", "train.grad_accum_steps"),
    ("data.path", "data.sources"),
]


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


class Watch(Section):
    spike_factor: Float = knob(3.0, "a loss above this many times its moving average is a spike", gt=1)
    window: Int = knob(128, "steps in the moving average", ge=1)
    max_skipped: Int = knob(20, "this many non-finite updates in a row stop the run", ge=1)


class Log(Section):
    every: Int = knob(10, "steps between lines on the console and points in TensorBoard", ge=1)
    tensorboard: bool = knob(True, "write TensorBoard event files")
    peak_flops: Float | None = knob(None, "FLOP/s of one device, for MFU; unset: from a table of known GPUs", gt=0)


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


def load(path: Path, overrides: list[str]) -> tuple[Config, list[str]]:
    """The effective config, and notes on what an override replaced. Raises UserError with one line a fault.

    Contradictions between keys are in plan.py, which also knows the number of processes.
    """
    values, faults = _read(path)
    origin = {f"{s}.{k}": str(path) for s, table in values.items() for k in table}
    notes, wrong = _apply(values, origin, overrides)
    faults += wrong
    if values.setdefault("run", {}).get("dir") is None:
        values["run"]["dir"] = f"runs/{path.stem}"
    try:
        cfg = Config.model_validate(values)
    except ValidationError as error:
        faults += [_explain(e, origin) for e in error.errors()]
    if faults:
        raise UserError("\n".join(dict.fromkeys(faults)))  # the members of a union each complain: once is enough
    return cfg, notes


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The sections of the file, and a fault for each thing in it that is none."""
    if path.is_dir():
        raise UserError(f"{path.absolute()} is a directory; give a config file (.toml)")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no config file {path.absolute()}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path.absolute()} is not a readable TOML file: {error}") from None
    stray = [k for k, v in values.items() if not (k in Config.model_fields and isinstance(v, dict))]
    return {k: v for k, v in values.items() if k not in stray}, [f"{_suggest(k)} ({path})" for k in stray]


def _apply(values: dict[str, Any], origin: dict[str, str], overrides: list[str]) -> tuple[list[str], list[str]]:
    """Puts the overrides into `values`. Returns (notes, faults)."""
    notes, faults = [], []
    told = {key for key, _, text in (o.partition("=") for o in overrides) if text.strip().lower() not in UNSET}
    for group in EITHER_OR:
        if told & set(group):
            for key in [k for k in group if k in origin and k not in told]:
                section, name = key.split(".")
                given = ", ".join(o for o in overrides if o.partition("=")[0] in told & set(group))
                notes.append(f"{given} (command line) replaces {key} = {values[section].pop(name)} ({origin.pop(key)})")
    for override in overrides:
        key, equals, text = override.partition("=")
        section, _, name = key.partition(".")
        if not (equals and name and text.strip()):
            faults.append(f"{override!r}: an override is section.key=value, for example optim.lr=3e-4")
        elif section not in Config.model_fields:
            faults.append(f"{override!r}: {_suggest(key)}")
        else:
            try:
                values.setdefault(section, {})[name] = _parse(text.strip())
                origin[key] = "command line"
            except ValueError:
                faults.append(f"{override!r}: the value is not valid TOML")
    return notes, faults


def _parse(text: str) -> Any:
    if text.lower() in UNSET:
        return None
    try:
        parsed = tomllib.loads(f"x = {text}")
        if len(parsed) == 1:
            return parsed["x"]
    except tomllib.TOMLDecodeError:
        if text[0] not in "[{\"'" and "\n" not in text:
            return text  # a bare word is a string
    raise ValueError(text)


def _explain(error: Any, origin: dict[str, str]) -> str:
    key = top = ".".join(str(part) for part in error["loc"][:2])
    if len(error["loc"]) > 3 and isinstance(error["loc"][2], int):  # in a list of tables
        key = f"{top}[{error['loc'][2]}].{error['loc'][3]}"
    if error["type"] == "extra_forbidden":
        if key != top:
            tables: dict[str, type[Section]] = {"data.sources": Source, "eval.sets": EvalSet}
            return f"unknown key {key}; there are {', '.join(tables[top].model_fields)} ({origin.get(top, 'config')})"
        return f"{_suggest(key)} ({origin.get(key, 'config')})"
    if error["type"] == "missing":
        return f"{key} is missing ({origin.get(top, 'config')})"
    message = re.sub(r"^(Value error, |Input )", "", error["msg"])
    return f"{key} = {error['input']!r} ({origin.get(top, 'default')}): {message}"


def _suggest(key: str) -> str:
    """unknown key, with the nearest valid one: what another trainer means by it, the same name in another section, else the
    most similar spelling."""
    plain = key.replace("-", "_")
    name = plain.rpartition(".")[2]
    near = [ALIASES[name]] if name in ALIASES else [k for k in KEYS if k.endswith(f".{name}")]
    near = near or difflib.get_close_matches(plain, KEYS, 1, 0.75)
    if "." not in key:
        near = [f"[{s}]" for s in difflib.get_close_matches(plain, list(Config.model_fields), 1)] or near
    for alias in difflib.get_close_matches(name, [*ALIASES, *(k.partition(".")[2] for k in KEYS)], 1, 0.7):
        near = near or [ALIASES.get(alias) or next(k for k in KEYS if k.endswith(f".{alias}"))]
    return f"unknown key {key}; " + (
        f"did you mean {near[0]}?" if near else f"sections are {', '.join(Config.model_fields)}"
    )


def to_toml(cfg: Config, meanings: bool = False) -> str:
    """The config as TOML that `load` reads back to an equal one; with `meanings`, each key has its description."""
    lines = []
    for section in Config.model_fields:
        lines.append(f"[{section}]")
        table = getattr(cfg, section)
        for name, field in type(table).model_fields.items():
            value = getattr(table, name)
            if meanings:
                lines.append(f"# {field.description}{_bounds(field)}")
            key = field.alias or name
            lines.append(f"{key} = {_toml(value)}" if value is not None else f"# {key} is unset")
        lines.append("")
    return "\n".join(lines)


def _bounds(field: Any) -> str:
    choices = [str(c) for a in (field.annotation, *typing.get_args(field.annotation))
               if typing.get_origin(a) is Literal for c in typing.get_args(a)]  # fmt: skip
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [f"{words[n]} {v}" for m in field.metadata for n in words if (v := getattr(m, n, None)) is not None]
    told = " | ".join(choices) or ", ".join(limits)
    return f"  [{told}]" if told else ""


def _toml(value: Any) -> str:
    if isinstance(value, Section):
        return _toml({name: given for name, given in value if given is not None})
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):  # JSON's strings but for two: TOML has no surrogate pairs, and wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
