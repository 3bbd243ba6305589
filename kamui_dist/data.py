"""What each rank trains and evaluates on: pure functions of (seed, samples seen), and a thread that reads ahead.

A training run is an endless stream of windows: position k is a window of epoch k // n in that epoch's own order
(`shuffle.py`). A step with a global batch of G takes the next G positions after the samples seen so far. Nothing else
enters: not the world size, not the micro-batch, not the accumulation. G may be larger than the data set (a step then
spans epochs) and need not divide it. Where the run's length is a number of epochs, positions past its last sample are
padding, whose targets are all -100, so N epochs see each window exactly N times.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kamui_dist import shuffle
from kamui_dist.shards import TokenDataset

__all__ = ["IGNORE", "Loader", "TokenDataset", "evaluation_batches", "global_batch", "rank_positions", "read_batch"]

IGNORE = -100  # the target that does not count
DEPTH = 2  # steps that are read ahead


def rank_positions(first_sample: int, micro_batch: int, grad_accum_steps: int, rank: int, ranks: int) -> np.ndarray:
    """The stream positions of this rank's micro-batches in one step: int64 (A, B).

    A = grad_accum_steps, B = micro_batch, R = ranks. Micro-batch m of rank r takes first_sample + m*R*B + r*B and the
    next B - 1, so ranks and micro-batches together take each of the R*A*B positions of the step once. `rank` and
    `ranks` count data-parallel ranks.
    """
    micro_steps = np.arange(grad_accum_steps, dtype=np.int64)[:, None]  # (A, 1)
    rows = np.arange(micro_batch, dtype=np.int64)[None, :]  # (1, B)
    return first_sample + micro_steps * (ranks * micro_batch) + rank * micro_batch + rows


def global_batch(
    dataset: TokenDataset, samples_seen: int, global_batch: int, context_length: int, seed: int
) -> np.ndarray:
    """The window ids of a whole step, in stream order: int64 (global_batch,), for inspection and tests."""
    return shuffle.sample_windows(samples_seen, global_batch, dataset.windows(context_length), seed)


def read_batch(
    dataset: TokenDataset,
    window_ids: np.ndarray,
    valid: np.ndarray,
    context_length: int,
    vocab_size: int | None,
    pin: bool,
) -> torch.Tensor:
    """Inputs and targets of some micro-batches in one block: int64 (A, 2, B, T), on the CPU, pinned if `pin`.

    window_ids: int64 (A, B). valid: bool (A, B); rows that are not valid are padding: inputs 0, targets all -100, not
    read. block[m, 0] are the inputs of micro-batch m, block[m, 1] its targets: contiguous, and one copy moves all of
    it.
    """
    accum, micro_batch = window_ids.shape
    block = torch.empty((accum, 2, micro_batch, context_length), dtype=torch.int64, pin_memory=pin)
    rows = dataset.read_raw(window_ids[valid], context_length, vocab_size)  # (valid rows, T + 1)
    inputs, targets = block.numpy()[:, 0], block.numpy()[:, 1]  # (A, B, T) views
    if valid.all():
        inputs[:] = rows[:, :-1].reshape(inputs.shape)
        targets[:] = rows[:, 1:].reshape(targets.shape)
    else:
        inputs[:], targets[:] = 0, IGNORE
        inputs[valid], targets[valid] = rows[:, :-1], rows[:, 1:]
    return block


class _Copier:
    """Moves blocks to the device. On CUDA by a stream of its own, so that copies run under the compute. All that knows
    streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None

    def send(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """In the reading thread: starts the copy. The event says when it is done."""
        if self.stream is None:
            return block.to(self.device), None  # itself on the CPU
        with torch.cuda.stream(self.stream):
            # The pinned block may be dropped at once: torch's host allocator reuses it only after this copy.
            on_device = block.to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return on_device, event

    def receive(self, on_device: torch.Tensor, event: torch.cuda.Event | None) -> torch.Tensor:
        """In the training thread: whatever is queued on its stream from now on runs after the copy. Does not block the
        host.
        """
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            # The memory belongs to the copy stream's pool; without this it could be reused while compute still reads
            # it.
            on_device.record_stream(current)
        return on_device


class _Shared:
    """What the reading thread and the loader share. The thread holds this and not the loader, so that a dropped loader
    ends it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ready: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self.error: BaseException | None = None
        self.closed = False


class Loader:
    """This rank's micro-batches, step after step from `first_sample` on, read ahead by a daemon thread. Endless.

    dataset: the token stream. context_length: T. micro_batch: B. grad_accum_steps: A. rank, ranks: among the
    data-parallel ranks; the global batch is A * B * ranks samples. seed: of the order. first_sample: samples seen
    before. device: where the batches go. limit: the run's total samples if it is a number of epochs, else None; later
    positions are padding. vocab_size: the model's number of ids, if it may be smaller than the data set's.

    Use as a context manager, or call `close`. Raises UserError if the data set has no whole window.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        context_length: int,
        micro_batch: int,
        grad_accum_steps: int,
        rank: int,
        ranks: int,
        seed: int,
        first_sample: int,
        device: torch.device,
        limit: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        windows = dataset.windows(context_length)
        pin = device.type == "cuda"

        def read_step(sample: int) -> torch.Tensor:
            positions = rank_positions(sample, micro_batch, grad_accum_steps, rank, ranks)  # (A, B)
            valid = np.full(positions.shape, True) if limit is None else positions < limit
            return read_batch(
                dataset, shuffle.windows_at(positions, windows, seed), valid, context_length, vocab_size, pin
            )

        self.data_seconds = 0.0  # how long the last `next` waited for the thread
        self._copier = _Copier(device)
        self._shared = _Shared()
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._shared, read_step, self._copier, first_sample, grad_accum_steps * micro_batch * ranks),
            name="kamui-data",
            daemon=True,
        )
        # Runs on close, when the loader is dropped, and before the interpreter ends (a thread that is inside torch
        # while the interpreter is taken down can abort the process).
        self._stop = weakref.finalize(self, _stop_thread, self._shared, thread)
        thread.start()

    def next(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The next step's A micro-batches: (inputs, targets), each int64 (B, T) on the device.

        Raises what the thread raised, each time: UserError for a file that is short or holds an id beyond the
        vocabulary.
        """
        shared = self._shared
        start = time.perf_counter()
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.error is not None or shared.closed)
            self.data_seconds = time.perf_counter() - start
            if shared.closed:
                raise RuntimeError("the loader is closed")
            if not shared.ready:
                assert shared.error is not None
                raise shared.error
            on_device, event = shared.ready.popleft()
            shared.changed.notify_all()
        block = self._copier.receive(on_device, event)  # (A, 2, B, T)
        return [(micro[0], micro[1]) for micro in block]

    def close(self) -> None:
        """Ends the thread and drops what it has read. May be called again."""
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ahead(
    shared: _Shared, read_step: Callable[[int], torch.Tensor], copier: _Copier, sample: int, samples_per_step: int
) -> None:
    try:
        if copier.cuda:
            torch.cuda.set_device(copier.device)  # the current device is each thread's own
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.closed or len(shared.ready) < DEPTH)
                if shared.closed:
                    return
            batch = copier.send(read_step(sample))
            sample += samples_per_step
            with shared.changed:
                shared.ready.append(batch)
                shared.changed.notify_all()
    except BaseException as error:  # all of it belongs to the caller of next()
        with shared.changed:
            shared.error = error
            shared.changed.notify_all()


def _stop_thread(shared: _Shared, thread: threading.Thread) -> None:
    with shared.changed:
        shared.closed = True
        shared.ready.clear()
        shared.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout=5)  # it is in one read at most; a file system that hangs must not hang the exit too
    shared.ready.clear()


def evaluation_batches(
    dataset: TokenDataset,
    context_length: int,
    micro_batch: int,
    rank: int,
    ranks: int,
    max_windows: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of a fixed set of windows: (inputs, targets), each int64 (B, T), on the CPU.

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
        block = read_batch(dataset, ids, positions < count, context_length, vocab_size, pin=False)
        yield block[0, 0], block[0, 1]
