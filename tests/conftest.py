"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _children_hear_every_signal() -> Iterator[None]:
    """nohup and a shell's background have signals ignored, and what is ignored is inherited; what has a handler is not."""
    deaf = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) == signal.SIG_IGN]
    for number in deaf:
        signal.signal(number, lambda *_: None)
    yield
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)
