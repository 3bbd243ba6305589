"""Reads ahead what each rank trains on (`batches.py` says what that is) and moves it to the device."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from kamui_dist import batches
from kamui_dist.batches import IGNORE, Batch, evaluation_batches, global_batch, rank_positions, read_batch
from kamui_dist.mixture import TrainingData
from kamui_dist.shards import TokenDataset
from kamui_dist.stream import TokenStream

__all__ = ["IGNORE", "Loader", "TokenDataset", "evaluation_batches", "global_batch", "rank_positions", "read_batch"]

DEPTH = 2  # steps that are read ahead

Sent = tuple[list[torch.Tensor], torch.cuda.Event | None]


class _Copier:
    """Moves blocks to the device. On CUDA by a stream of its own, so that copies run under the compute. All that knows
    streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None

    def send(self, tensors: list[torch.Tensor]) -> Sent:
        """In the reading thread: starts the copy. The event says when it is done."""
        if self.stream is None:
            return [tensor.to(self.device) for tensor in tensors], None  # themselves on the CPU
        with torch.cuda.stream(self.stream):
            # Pinned memory may be dropped at once: torch's host allocator reuses it only after this copy.
            on_device = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            event = torch.cuda.Event()
            event.record(self.stream)
        return on_device, event

    def receive(self, on_device: list[torch.Tensor], event: torch.cuda.Event | None) -> list[torch.Tensor]:
        """In the training thread: whatever is queued on its stream from now on runs after the copy. Does not block the
        host.
        """
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for tensor in on_device:
                # The memory belongs to the copy stream's pool; without this it could be reused while compute still
                # reads it.
                tensor.record_stream(current)
        return on_device


class _Shared:
    """What the reading thread and the loader share. The thread holds this and not the loader, so that a dropped loader
    ends it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Sent] = deque()
        self.error: BaseException | None = None
        self.closed = False


class Loader:
    """This rank's micro-batches, step after step from `first_sample` on, read ahead by a daemon thread. Endless.

    data: the sources, or one token stream. context_length: T. micro_batch: B. grad_accum_steps: A. rank, ranks: among
    the data-parallel ranks; the global batch is A * B * ranks samples. seed: of the order. first_sample: samples seen
    before. device: where the batches go. limit: the run's total samples if it is a number of epochs, else None; later
    positions are padding. vocab_size: the model's number of ids, if it may be smaller than the data set's.
    document_mask: also say where in its window each token's document begins, and ignore targets across a border.
    gaps: parts of the order that are left out (`batches.positions_of`). repeat: the first step again and again.

    After `next`, `sources` says of which source each row of that step is: int64 (A, B) on the device; None if there is
    only one source. `data_seconds` is how long that `next` waited for the thread.

    Use as a context manager, or call `close`. Raises UserError if a source has no whole window, or if documents are
    asked for and it does not say where they end.
    """

    def __init__(
        self,
        data: TrainingData | TokenStream,
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
        document_mask: bool = False,
        gaps: batches.Gaps = (),
        repeat: bool = False,
    ) -> None:
        whole = data if isinstance(data, TrainingData) else TrainingData([data], ["data"], [1.0], context_length)
        for stream in whole.streams if document_mask else []:
            stream.check_documents()
        pin = device.type == "cuda"
        order = batches.steps(
            whole, micro_batch=micro_batch, grad_accum_steps=grad_accum_steps, rank=rank, ranks=ranks, seed=seed,
            first_sample=first_sample, limit=limit, gaps=gaps,
        )  # fmt: skip

        def read_step() -> list[torch.Tensor]:
            sources, windows, valid = next(order)  # (A, B) each
            block = read_batch(
                whole.streams, sources, windows, valid, context_length, vocab_size, pin, document_mask
            )  # (A, 2 or 3, B, T)
            if not whole.mixed:
                return [block]
            labels = torch.from_numpy(sources.copy())  # (A, B)
            return [block, labels.pin_memory() if pin else labels]

        self.sources: torch.Tensor | None = None
        self.data_seconds = 0.0
        self._repeat = repeat
        self._first: list[Batch] | None = None
        self._copier = _Copier(device)
        self._shared = _Shared()
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._shared, read_step, self._copier),
            name="kamui-data",
            daemon=True,
        )
        # Runs on close, when the loader is dropped, and before the interpreter ends (a thread that is inside torch
        # while the interpreter is taken down can abort the process).
        self._stop = weakref.finalize(self, _stop_thread, self._shared, thread)
        thread.start()

    def next(self) -> list[Batch]:
        """The next step's A micro-batches: (inputs, targets), each int64 (B, T) on the device; with document_mask
        (inputs, targets, documents).

        Raises what the thread raised, each time: UserError for a file that is short or holds an id beyond the
        vocabulary.
        """
        shared = self._shared
        if self._first is not None:
            self.data_seconds = 0.0
            return self._first
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
        block, *labels = self._copier.receive(on_device, event)  # (A, 2 or 3, B, T)
        self.sources = labels[0] if labels else None
        micro_batches: list[Batch] = [tuple(micro) for micro in block]
        self._first = micro_batches if self._repeat else None
        return micro_batches

    def close(self) -> None:
        """Ends the thread and drops what it has read. May be called again."""
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ahead(shared: _Shared, read_step: Callable[[], list[torch.Tensor]], copier: _Copier) -> None:
    try:
        if copier.cuda:
            torch.cuda.set_device(copier.device)  # the current device is each thread's own
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.closed or len(shared.ready) < DEPTH)
                if shared.closed:
                    return
            batch = copier.send(read_step())
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
