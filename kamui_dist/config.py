"""The knobs of a run (knobs.py) from a TOML file plus `section.key=value` overrides. Imports no torch.

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
from typing import Any, Literal

from pydantic import ValidationError

from kamui_dist.errors import UserError
from kamui_dist.knobs import (
    KEYS,
    Config,
    EvalSet,
    Section,
    Source,
)

__all__ = ["KEYS", "Config", "load", "to_toml"]

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
