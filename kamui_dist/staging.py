"""Copies of a rank's tensors in host memory: what an asynchronous save writes while training changes the originals."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor


class Staging:
    """The buffers are made at the first `capture` and used again at each later one: host memory does not grow.

    Weights and optimizer state change in the update only, so their copy may take as long as the next forward and backward:
    on CUDA it runs on a stream of its own into pinned memory, on the CPU in the thread that calls `finish`.
    `before_update` waits for it. What a forward pass may change as well (buffers of the model) is copied at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._later: list[tuple[Tensor, Tensor]] = []  # (buffer, original) that `finish` copies
        self._finished = threading.Event()
        self._finished.set()
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def capture(self, parts: dict[str, Tensor], at_once: set[str]) -> dict[str, Tensor]:
        """Begins to copy `parts` (plain tensors of this rank), those in `at_once` before it returns.

        The result is filled when a thread has called `finish`, which it must. What the last capture returned is
        overwritten.
        """
        old, self._buffers, self._later = self._buffers, {}, []
        for name, part in parts.items():
            buffer = old.pop(name, None)
            if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._buffers[name] = buffer
            if name in at_once:
                buffer.copy_(part)
            else:
                self._later.append((buffer, part))
        del old
        if any(part.is_cuda for _, part in self._later):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # the update that made these values
            with torch.cuda.stream(self._stream):
                for buffer, part in self._later:
                    buffer.copy_(part, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
            self._later = []
        self._finished.clear()
        return dict(self._buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Blocks until the copies are whole; on the CPU it makes them. Called by the thread that reads them."""
        try:
            for buffer, part in self._later:
                buffer.copy_(part)
            if self._copied is not None:
                self._copied.synchronize()
        finally:
            self._later = []
            self._finished.set()

    def before_update(self) -> float:
        """Call before the originals are changed. Returns the seconds that the host was held; CUDA's queue waits for itself."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            return 0.0
        began = time.perf_counter()
        self._finished.wait()
        return time.perf_counter() - began
