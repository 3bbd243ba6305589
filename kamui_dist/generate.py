"""Continues a text: a token at a time, drawn from what the model says comes next. For `kamui-dist sample` and samples.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kamui_dist import precision
from kamui_dist.tokenizer import Tokenizer


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn from its probabilities."""

    temperature: float = 0.8  # below 1 safer, above 1 wilder, 0: the likeliest
    top_k: int = 200  # from so many likeliest tokens; 0: from all (Fan et al. 2018, arXiv:1805.04833)
    top_p: float = 1.0  # from the likeliest of this probability (nucleus, Holtzman et al. 2020, arXiv:1904.09751)


def draw(logits: torch.Tensor, how: Drawing, generator: torch.Generator) -> int:
    """One token id. logits: (V,), on the generator's device. Those of a model that has diverged are no reason to fail."""
    if how.temperature == 0:
        return int(logits.nan_to_num().argmax())
    values, order = torch.softmax((logits / how.temperature).nan_to_num(), dim=-1).sort(descending=True)  # (V,)
    keep = values.cumsum(0) - values < how.top_p  # a token counts as long as those before it have not filled top_p
    if how.top_k:
        keep[how.top_k :] = False
    return int(order[torch.multinomial(values * keep, 1, generator=generator)])


def tokens(
    model: nn.Module, prompt: Sequence[int], *, context_length: int, vocab_size: int, how: Drawing,
    generator: torch.Generator, device: torch.device, compute: str,
) -> Iterator[int]:  # fmt: skip
    """The ids that follow `prompt` (at least one id), without end. Collective under FSDP: every rank asks for as many.

    model(inputs (1, T), None) -> logits (1, T, V), in eval mode. It sees the last `context_length` ids. Ids from vocab_size on,
    which the tokenizer does not have, are never drawn. generator: on the CPU, where ids are drawn, so that the same seed gives
    the same text on every device; torch's own random numbers stay as they are.
    """
    seen = list(prompt)
    while True:
        inputs = torch.tensor([seen[-context_length:]], device=device)  # (1, T)
        with precision.eager(), torch.no_grad(), precision.autocast(device, compute):
            logits = model(inputs, None)
        seen.append(draw(logits[0, -1, :vocab_size].float().cpu(), how, generator))
        yield seen[-1]


def text_after(words: Tokenizer, prompt: Sequence[int], drawn: Sequence[int]) -> str:
    """The text of `drawn` where it follows `prompt`: at the very beginning of a text some tokenizers leave out a space."""
    before, whole = words.decode(prompt), words.decode([*prompt, *drawn])
    return whole[len(before) :] if whole.startswith(before) else words.decode(drawn)
