"""The seekable shuffle: which window stands at position k of the run, as a pure function of (seed, k). No torch.

O(1) memory: the order needs no table and no generator state, so a run resumes at any position on any number of ranks by
knowing one number, the samples seen. The values are part of the contract: changing them changes what a resumed run sees
(golden test).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

MAX_WINDOWS = 1 << 48
_ROUNDS = 12  # even; with 8, pairs of images are visibly uneven at n = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix_int(x: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) on one Python integer."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix(x: np.ndarray) -> np.ndarray:
    """The same on a uint64 array, which wraps modulo 2**64 as the method wants."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, n: int, key: int) -> np.ndarray:
    """The images of `indices` under the pseudo-random permutation of range(n) that `key` selects.

    indices: int64, any shape, each in [0, n). n: 1 to 2**48. key: 0 to 2**64 - 1. Returns int64 of the same shape.

    Method: generalised Feistel network on pairs (left, right) in Z_a x Z_b with a * b >= n, and cycle walking back into
    range(n): J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 5. With
    a ~ b ~ sqrt(n) the domain exceeds n by less than about sqrt(n), so walking is rare whatever n is; a power-of-two
    domain would walk up to four times. `a` is even because on an odd by odd grid every round is an even permutation,
    and so half of all orders would never come up. The round function is splitmix64: good statistics, no cryptographic
    claim.
    """
    assert 1 <= n <= MAX_WINDOWS, f"permute: n must be 1 to 2**48, got {n}"
    assert 0 <= key <= _MASK, f"permute: key must fit 64 bits, got {key}"
    flat = np.asarray(indices, dtype=np.int64).reshape(-1)
    assert flat.size == 0 or (flat.min() >= 0 and flat.max() < n), f"permute: an index is outside [0, {n})"
    if n == 1:
        return np.zeros(np.shape(indices), dtype=np.int64)
    a = math.isqrt(n - 1) + 1
    a += a % 2
    b = -(-n // a)
    round_keys = [_mix_int((key + (i + 1) * _GOLDEN) & _MASK) for i in range(_ROUNDS)]

    out = flat.astype(np.uint64)
    outside = np.arange(out.size)  # where the walk has not yet come back into range(n)
    while outside.size:
        out[outside] = walked = _feistel(out[outside], a, b, round_keys)
        outside = outside[walked >= n]
    return out.astype(np.int64).reshape(np.shape(indices))


def _feistel(x: np.ndarray, a: int, b: int, round_keys: list[int]) -> np.ndarray:
    """One pass of the network over uint64 values in range(a * b)."""
    left, right = np.divmod(x, np.uint64(b))  # left in Z_a, right in Z_b; the two take turns
    for i, round_key in enumerate(round_keys):
        modulus = np.uint64(a if i % 2 == 0 else b)
        # The high half of the hash, scaled to Z_modulus: (hash * modulus) >> 32 fits, since a and b are below 2**26.
        shift = ((_mix(right + np.uint64(round_key)) >> np.uint64(32)) * modulus) >> np.uint64(32)
        shifted = left + shift
        left, right = right, np.where(shifted >= modulus, shifted - modulus, shifted)
    return left * np.uint64(b) + right  # an even number of rounds: left is back in Z_a


def epoch_key(seed: int, epoch: int) -> int:
    """The key of an epoch's permutation: 64 bits of BLAKE2b over (seed, epoch), the same on every platform."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "little")


def windows_at(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The window at each stream position: int64 in, int64 window ids in [0, n) out, same shape.

    Position k lies in epoch k // n. Within an epoch each of the n windows comes exactly once, in an order of its own.
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, indices = np.divmod(positions, n)
    windows = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        windows[here] = permute(indices[here], n, epoch_key(seed, epoch))
    return windows


def sample_windows(first: int, count: int, n: int, seed: int) -> np.ndarray:
    """The windows at stream positions first .. first + count - 1: int64 (count,). Endless: epochs follow each other."""
    return windows_at(np.arange(first, first + count, dtype=np.int64), n, seed)
