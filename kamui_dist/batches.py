"""Which windows a rank trains and evaluates on, and their tensors: pure functions of (seed, samples seen).

A training run is an endless stream of windows: position k is a window that (seed, k) alone decides (`shuffle.py`,
`mixture.py`). A step with a global batch of G takes the next G positions after the samples seen so far. Nothing else
enters: not the world size, not the micro-batch, not the accumulation; only what a rollback has left out of the order is passed
over. G may be larger than the data set (a step then
spans epochs) and need not divide it. Where the run's length is a number of epochs, positions past its last sample are
padding, whose targets are all -100, so N epochs see each window exactly N times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kamui_dist import shuffle
from kamui_dist.mixture import TrainingData
from kamui_dist.stream import TokenStream

IGNORE = -100  # the target that does not count
Batch = tuple[torch.Tensor, ...]  # (inputs, targets), with a document mask (inputs, targets, documents)
Gaps = Sequence[tuple[int, int]]
_AHEAD = 4096  # positions whose windows are worked out at once: the order costs as much for one as for hundreds


def rank_positions(first_sample: int, micro_batch: int, grad_accum_steps: int, rank: int, ranks: int) -> np.ndarray:
    """The stream positions of this rank's micro-batches in one step: int64 (A, B).

    A = grad_accum_steps, B = micro_batch, R = ranks. Micro-batch m of rank r takes first_sample + m*R*B + r*B and the
    next B - 1, so ranks and micro-batches together take each of the R*A*B positions of the step once. `rank` and
    `ranks` count data-parallel ranks.
    """
    micro_steps = np.arange(grad_accum_steps, dtype=np.int64)[:, None]  # (A, 1)
    rows = np.arange(micro_batch, dtype=np.int64)[None, :]  # (1, B)
    return first_sample + micro_steps * (ranks * micro_batch) + rank * micro_batch + rows


def positions_of(samples: np.ndarray | int, gaps: Gaps) -> np.ndarray:
    """Where in the data order the samples of a run lie (int64, as `samples`): sample k is the k-th position outside the gaps.

    gaps: [first, end) each, in order, apart from one another: what rollbacks have left out.
    """
    positions = np.asarray(samples, dtype=np.int64)
    for first, end in gaps:
        positions = np.where(positions >= first, positions + (end - first), positions)
    return positions


def global_batch(
    dataset: TokenStream, samples_seen: int, global_batch: int, context_length: int, seed: int
) -> np.ndarray:
    """The window ids of a whole step of one source, in stream order: int64 (global_batch,), for inspection and tests."""
    return shuffle.sample_windows(samples_seen, global_batch, dataset.windows(context_length), seed)


def steps(
    data: TrainingData, *, micro_batch: int, grad_accum_steps: int, rank: int, ranks: int, seed: int, first_sample: int,
    limit: int | None, gaps: Gaps = (),
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:  # fmt: skip
    """Step after step from `first_sample` on, endless: source, window, and whether it is no padding, (A, B) each."""
    a_step = micro_batch * grad_accum_steps
    ahead = max(1, _AHEAD // a_step)
    while True:
        firsts = first_sample + np.arange(ahead, dtype=np.int64) * (a_step * ranks)
        samples = firsts[:, None, None] + rank_positions(0, micro_batch, grad_accum_steps, rank, ranks)
        sources, windows = data.place(positions_of(samples, gaps), seed)  # (ahead, A, B) each
        valid = np.full(samples.shape, True) if limit is None else samples < limit
        yield from zip(sources, windows, valid, strict=True)
        first_sample += ahead * a_step * ranks


def read_batch(
    streams: list[TokenStream],
    sources: np.ndarray,
    window_ids: np.ndarray,
    valid: np.ndarray,
    context_length: int,
    vocab_size: int | None,
    pin: bool,
    document_mask: bool = False,
) -> torch.Tensor:
    """Inputs and targets of some micro-batches in one block: int64 (A, 2, B, T), on the CPU, pinned if `pin`.

    sources: int64 (A, B), the stream of each window. window_ids: int64 (A, B). valid: bool (A, B); rows that are not
    valid are padding: inputs 0, targets all -100, not read. block[m, 0] are the inputs of micro-batch m, block[m, 1]
    its targets: contiguous, and one copy moves all of it. With document_mask the block is (A, 3, B, T): block[m, 2]
    says of each input where in the window its document begins (see documents.py). Targets that the data's own mask
    leaves out, and those across a document border, are -100.
    """
    accum, micro_batch = window_ids.shape
    parts = 3 if document_mask else 2
    block = torch.empty((accum, parts, micro_batch, context_length), dtype=torch.int64, pin_memory=pin)
    numbers = block.numpy()
    inputs, targets = numbers[:, 0], numbers[:, 1]  # (A, B, T) views
    if not valid.all():
        inputs[~valid], targets[~valid] = 0, IGNORE
        if document_mask:
            numbers[:, 2][~valid] = 0
    for i, stream in enumerate(streams):
        here = valid & (sources == i) if len(streams) > 1 else valid  # (A, B)
        if not here.any():
            continue
        ids = window_ids[here]
        rows = stream.read_raw(ids, context_length, vocab_size)  # (here, T + 1)
        mask = stream.read_mask(ids, context_length)
        if mask is None and not document_mask:
            wanted: np.ndarray = rows[:, 1:]
        else:
            wanted = rows[:, 1:].astype(np.int64)
            if mask is not None:
                wanted[~mask] = IGNORE
            if document_mask:
                starts = stream.read_documents(ids, context_length, rows)
                wanted[starts[:, 1:] != starts[:, :-1]] = IGNORE
                numbers[:, 2][here] = starts[:, :-1]
        if here.all():
            inputs[:], targets[:] = rows[:, :-1].reshape(inputs.shape), wanted.reshape(targets.shape)
        else:
            inputs[here], targets[here] = rows[:, :-1], wanted
    return block


def evaluation_batches(
    dataset: TokenStream,
    context_length: int,
    micro_batch: int,
    rank: int,
    ranks: int,
    max_windows: int | None = None,
    vocab_size: int | None = None,
    document_mask: bool = False,
) -> Iterator[Batch]:
    """This rank's part of a fixed set of windows: (inputs, targets), each int64 (B, T), on the CPU; with document_mask
    a third tensor, as in `read_batch`.

    The set is `max_windows` windows spread evenly over the data set, all of them if that is None or more than there
    are. It does not depend on the ranks. Each window comes once on one rank; every rank yields the same number of
    batches, rows without a window being padding with targets -100, so that no rank waits for another and no window
    counts twice.

    Raises UserError as `Loader` does.
    """
    windows = dataset.windows(context_length)
    count = windows if max_windows is None else min(max_windows, windows)
    batches = -(-count // (micro_batch * ranks))
    for batch in range(batches):
        positions = rank_positions(batch * micro_batch * ranks, micro_batch, 1, rank, ranks)  # (1, B)
        ids = positions * windows // count  # distinct, since count <= windows
        valid, source = positions < count, np.zeros_like(positions)
        block = read_batch([dataset], source, ids, valid, context_length, vocab_size, False, document_mask)
        yield tuple(block[0])
