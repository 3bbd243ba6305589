"""Is what a checkpoint would hold good: finite, and the same on every replica? Two passes over the weights, at the speed
of memory, each with one wait for the device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from kamui_dist.watch import Finding


@torch.no_grad()
def non_finite(parts: Mapping[str, Tensor]) -> list[str]:
    """The names of those of `parts` (plain tensors of this rank) that hold NaN or an infinity."""
    floats = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    if not floats:
        return []
    norms = torch._foreach_norm(list(floats.values()))  # one fused pass; NaN and infinities come through
    # A norm may overflow where no element does: a second look at what is suspect, which is rare.
    suspect = [name for name, fine in zip(floats, torch.stack(norms).isfinite().tolist(), strict=True) if not fine]
    return [name for name in suspect if not bool(floats[name].isfinite().all())]


@torch.no_grad()
def checksums(parts: Mapping[str, Tensor]) -> dict[str, int]:
    """For each tensor the sum of its bytes, taken as 64-bit integers, modulo 2**64: any single change changes it.

    No cryptographic hash: it is to find two replicas that drifted apart, at the speed of memory.
    """
    sums = []
    for part in parts.values():
        flat = part.detach().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # a view as wider integers needs an aligned start
        raw = flat.view(torch.uint8)
        whole = raw.numel() // 8 * 8
        total = raw[:whole].view(torch.int64).sum() if whole else torch.zeros((), dtype=torch.int64, device=raw.device)
        for i, byte in enumerate(raw[whole:]):
            total = total + (byte.to(torch.int64) << (8 * i))
        sums.append(total)
    devices = {total.device for total in sums}
    if len(devices) == 1:
        values = torch.stack(sums).tolist()
    else:
        values = [int(total) for total in sums]
    return dict(zip(parts, values, strict=True))


def digest(sums: Mapping[str, int]) -> str:
    """A short name for all of `sums`: equal for equal ones."""
    return hashlib.blake2b(repr(sorted(sums.items())).encode(), digest_size=16).hexdigest()


def not_finite(step: int, broken: dict[int, list[str]]) -> Finding:
    """`broken`: rank -> names of some of its weights that are not finite."""
    where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in list(broken.items())[:8])
    return Finding(
        "non-finite-weights", step, f"NaN or infinity in the weights ({where}); they are not saved.",
        "an update that overflowed, or a defective device (then only some ranks have it).",
        "start the same command again: it goes on from the last good checkpoint; if it comes back, lower optim.lr.", "stop",
    )  # fmt: skip


def divergence(step: int, groups: list[list[tuple[int, str]]], names: list[str], total: int) -> Finding:
    """`groups`: for each group of replicas its (rank, digest)s. Names the ranks: those that differ from the majority of their
    group, or both sides if there is none. `names`: the parameters that differ, of `total`."""
    told = []
    for group in groups:
        by_digest: dict[str, list[int]] = {}
        for rank, digest in group:
            by_digest.setdefault(digest, []).append(rank)
        sides = sorted(by_digest.values(), key=len)
        if len(sides) > 1 and len(sides[-1]) > len(group) / 2:
            odd = sorted(rank for side in sides[:-1] for rank in side)
            told.append(f"{_ranks(odd)} against the others ({_ranks(sides[-1])})")
        elif len(sides) > 1:
            told.append(" against ".join(_ranks(side) for side in sorted(sides)))
    return Finding(
        "replica-divergence", step, f"replicas that must be equal are not: {'; '.join(told)}; in {len(names)} of {total} "
        f"parameters, the first is {names[0]}. Nothing is saved.",
        "a defective device or its memory, a kernel that is not deterministic, or code that changes weights on some ranks only.",
        "test the devices of these ranks; the same command again goes on from the last checkpoint, where all were equal.",
        "stop",
    )  # fmt: skip


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
