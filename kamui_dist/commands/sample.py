"""Lets a trained model write: continues a prompt with text drawn from the newest checkpoint of a run.

kamui-dist sample runs/austen_tiny --prompt "It was a truth" --max-tokens 200
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kamui_dist.errors import UserError

if TYPE_CHECKING:
    from kamui_dist.manifest import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, or one checkpoint in it")
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens to draw at most (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="below 1 safer, above 1 wilder, 0: the likeliest"
    )
    parser.add_argument("--top-k", type=int, default=200, help="draw from so many likeliest tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--samples", type=int, default=1, help="texts to write")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    parser.add_argument("--step", default="newest", help="newest, best, or a number (default: newest)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a run without an intact checkpoint, a model that gives no logits, and values out of range."""
    for name, good in (("temperature", args.temperature >= 0), ("top-k", args.top_k >= 0), ("samples", args.samples >= 1),
                       ("top-p", 0 < args.top_p <= 1), ("max-tokens", args.max_tokens >= 1)):  # fmt: skip
        if not good:
            raise UserError(f"--{name} {getattr(args, name.replace('-', '_'))} is out of range")
    import torch

    from kamui_dist import checkpoint, distributed, generate, parallel, start, tokenizer
    from kamui_dist.config import Config
    from kamui_dist.plan import make_plan

    device = distributed.choose_device(args.device)
    found = _find(Path(args.run).absolute(), args.step)
    cfg = Config.model_validate(found.state["config"])
    own = found.path.parent.parent / "tokenizer.json"
    words = tokenizer.load(own if own.exists() else "bytes")
    if words.vocab_size > (cfg.model.vocab_size or 0):
        raise UserError(
            f"{own} is missing or not this run's: {words.vocab_size} ids, the model has {cfg.model.vocab_size}"
        )
    one = cfg.model_copy(
        update={"parallel": type(cfg.parallel)(), "train": cfg.train.model_copy(update={"global_batch": None})}
    )
    model = parallel.parallelize(start.build_model(cfg), one, make_plan(one, 1, windows=1), None, device).eval()
    checkpoint.load_weights(found, model)

    ids = [int(i) for i in words.encode(args.prompt)] or [words.separator or 0]
    for number in range(args.samples):
        print(args.prompt, end="", flush=True)
        following = generate.tokens(
            model, ids, context_length=cfg.model.context_length, vocab_size=words.vocab_size,
            how=generate.Drawing(args.temperature, args.top_k, args.top_p),
            generator=torch.Generator().manual_seed(args.seed + number), device=device, compute=cfg.run.precision,
        )  # fmt: skip
        drawn: list[int] = []
        shown = ""
        for token in itertools.islice(following, args.max_tokens):
            if token == words.separator:
                break
            drawn.append(token)
            text = generate.text_after(words, ids, drawn)
            if not text.endswith("\ufffd"):  # the rest of a character may be in the next token
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print("\n" + "-" * 40 if number + 1 < args.samples else "")
    return 0


def _find(path: Path, step: str) -> Checkpoint:
    import json

    from kamui_dist import manifest

    steps = dict(manifest.step_directories(path / "checkpoints"))
    if not steps and (path / "manifest.json").exists():
        chosen = path
    elif not steps:
        raise UserError(f"{path} has no checkpoint")
    elif step == "newest":
        chosen = steps[max(steps)]
    else:
        best = path / "checkpoints" / "best.json"
        if step == "best" and not best.exists():
            raise UserError(f"{path} has no validation loss, so no best checkpoint")
        wanted = json.loads(best.read_text())["step"] if step == "best" else int(step) if step.isdigit() else -1
        if wanted not in steps:
            raise UserError(f"--step {step}: {path} has checkpoints of steps {', '.join(map(str, sorted(steps)))}")
        chosen = steps[wanted]
    try:
        manifest.verify(chosen)
        return manifest.open_checkpoint(chosen)
    except manifest.CheckpointError as error:
        print("hint: --step chooses an older one", file=sys.stderr)
        raise UserError(str(error)) from None
