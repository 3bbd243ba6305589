"""What the model writes at each validation, if eval.sample_tokens asks for it.

    writer = Sampler(cfg, module, train_data.tokenizer, stream, device)
    metrics.sample(state.step, writer.prompt, writer.write(state.step))

The same (run.seed, step, weights) write the same text, but for rounding, on any number of ranks; training's random numbers are
not touched.
"""

from __future__ import annotations

import hashlib
import itertools
import time

import numpy as np
import torch
from torch import nn

from kamui_dist import distributed, generate, parallel, tokenizer
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.stream import TokenStream
from kamui_dist.tokenizer import Tokenizer

PROMPT = 32  # tokens of the data that are continued where eval.sample_prompt is unset


class Sampler:
    """Every rank makes one and calls `write` at the same steps.

    tokenizer: what `tokenizer.load` takes; None: the data do not say. stream: of which the prompt is taken if the config has none:
    the first validation set, or training data. Raises UserError on every rank, before training, if there is nothing to write with:
    no tokenizer of these data, or a model.factory whose model gives no logits.
    """

    def __init__(
        self, cfg: Config, module: nn.Module, tokenizer: str | None, stream: TokenStream, device: torch.device
    ) -> None:
        self.cfg, self.module, self.device = cfg, module, device
        self.prompt, self.seconds = "", 0.0  # seconds: of the last text
        if not cfg.eval.sample_tokens:
            return
        with distributed.together():
            self.words = _load(cfg, tokenizer, stream)
            self.ids = _prompt(cfg, self.words, stream)
        self.prompt = self.words.decode(self.ids) if cfg.eval.sample_prompt is None else cfg.eval.sample_prompt
        if cfg.model.factory is not None:
            with distributed.together():
                self._try_model(cfg.model.factory)

    def write(self, step: int) -> str | None:
        """What follows `prompt`, eval.sample_tokens long; None where no text is asked for. Collective.

        An end of a document does not end it: ranks whose logits differ in the last bit might draw it at different tokens, and under
        FSDP one would wait for the other for ever. The text is that of this rank.
        """
        if not self.cfg.eval.sample_tokens:
            return None
        began = time.perf_counter()
        key = hashlib.blake2b(f"{self.cfg.run.seed},{step},sample".encode(), digest_size=7).digest()
        drawn = self._continue(int.from_bytes(key, "little"), self.cfg.eval.sample_tokens)
        words = self.words
        name = next((name for name, i in words.special_tokens.items() if i == words.separator), "")
        first, *others = _split(drawn, words.separator)
        text = generate.text_after(words, self.ids, first) + "".join(name + words.decode(piece) for piece in others)
        self.seconds = time.perf_counter() - began
        return text

    def _continue(self, seed: int, count: int) -> list[int]:
        with parallel.evaluating(self.module):
            following = generate.tokens(
                self.module, self.ids, context_length=self.cfg.model.context_length, vocab_size=self.words.vocab_size,
                how=generate.Drawing(), generator=torch.Generator().manual_seed(seed), device=self.device,
                compute=self.cfg.run.precision,
            )  # fmt: skip
            return list(itertools.islice(following, count))

    def _try_model(self, factory: str) -> None:
        try:
            self._continue(seed=0, count=1)
        except Exception as error:  # of somebody else's code
            raise UserError(
                f"eval.sample_tokens = {self.cfg.eval.sample_tokens} needs a model whose forward(inputs, None) returns logits "
                f"(B, T, V); that of model.factory = {factory!r} fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error


def _load(cfg: Config, name: str | None, stream: TokenStream) -> Tokenizer:
    asked = f"eval.sample_tokens = {cfg.eval.sample_tokens}"
    if name is None:
        raise UserError(
            f"{asked} needs a tokenizer, and {stream.path} ({stream.format}) names none; prepare the text with `kamui-dist "
            "prepare`, or set eval.sample_tokens=0"
        )
    try:
        words = tokenizer.load(name)
    except UserError as error:
        raise UserError(f"{asked}: {error}") from None
    if stream.tokenizer_fingerprint not in (None, words.fingerprint):
        raise UserError(
            f"{asked}: {name} is not the tokenizer that {stream.path} was prepared with; bring that one back"
        )
    return words


def _prompt(cfg: Config, words: Tokenizer, stream: TokenStream) -> list[int]:
    if cfg.eval.sample_prompt is None:
        window = stream.read(np.zeros(1, np.int64), cfg.model.context_length, cfg.model.vocab_size)[0]
        return [int(i) for i in window[: min(PROMPT, cfg.model.context_length)]]
    return [int(i) for i in words.encode(cfg.eval.sample_prompt)] or [words.separator or 0]


def _split(ids: list[int], separator: int | None) -> list[list[int]]:
    """At least one piece; the separators are gone."""
    pieces: list[list[int]] = [[]]
    for i in ids:
        if i == separator:
            pieces.append([])
        else:
            pieces[-1].append(i)
    return pieces
