"""Causal attention within documents: which kernel, and the mask that it wants.

A window may hold several documents. `documents` (B, T) says of each token where in the window its document begins; token
t attends to tokens 0 .. t of the same number (documents.py).

On CUDA by FlexAttention, compiled, which skips the blocks that are masked throughout (Dong et al. 2024, arXiv:2412.05496);
it has no dropout, and elsewhere no backward pass. Otherwise a boolean mask (B, 1, T, T) in scaled_dot_product_attention.
The mask is made once for all layers of a forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLEX_HEAD_SIZES = (16, 32, 64, 128, 256)  # what its kernel tiles without padding
SCORES = 1 << 24  # that `largest_score` has in memory at a time: 64 MiB in fp32
Mask = Any  # None: causal only; a bool tensor; a BlockMask


def document_mask(documents: Tensor | None, head_size: int, dropout: float, flex: bool = True) -> Mask:
    """The mask for `attend`. documents: int64 (B, T); None: one document a sequence, which needs no mask. flex: use
    FlexAttention where it can be used.
    """
    if documents is None:
        return None
    if flex and documents.is_cuda and dropout == 0.0 and head_size in FLEX_HEAD_SIZES:
        return _block_mask(documents)
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal  # (B, 1, T, T)


def _block_mask(documents: Tensor) -> Mask:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    B, T = documents.shape
    return create_block_mask(visible, B, None, T, T, device=documents.device)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # uncompiled it would write all T x T scores to memory


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, grouped: bool) -> Tensor:
    """(B, H, T, Q), keys and values (B, K, T, Q) -> (B, H, T, Q). grouped: K < H. mask: of `document_mask`."""
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
        )
    return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=grouped)


@torch.no_grad()
def largest_score(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The largest pre-softmax score q.k / sqrt(Q) of all that the mask allows: 0-dim, fp32.

    q (B, H, T, Q), k (B, K, T, Q); mask: None for causal only, or bool (B, 1, T, T) (`document_mask` without flex). It grows
    before training becomes unstable (Dehghani et al. 2023, arXiv:2302.05442). Some rows of queries at a time, so
    that the T x T scores of all heads are never there together. Under autocast to its precision: 3 digits in bf16.
    """
    B, H, T, Q = q.shape
    grouped = q.unflatten(1, (k.shape[1], -1))  # (B, K, H / K, T, Q): the query heads of each key head
    rows, largest = max(1, SCORES // (B * H * T)), []
    for first in range(0, T, rows):
        end = min(first + rows, T)  # query `first` sees keys 0 .. first
        part = grouped[..., first:end, :]
        scores = (part.flatten(2, 3) @ k[:, :, :end].mT).unflatten(2, part.shape[2:4])  # (B, K, H / K, rows, end)
        if mask is None:
            visible = torch.ones(end - first, end, dtype=torch.bool, device=q.device).tril(first)
        else:
            visible = mask[:, :, None, first:end, :end]
        largest.append(scores.masked_fill_(~visible, -torch.inf).amax())
    return torch.stack(largest).amax().float() / Q**0.5
