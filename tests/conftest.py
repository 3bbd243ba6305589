"""What holds for every test."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Iterator

import pytest

LONGEST = ("test_start_up", "test_chaos", "test_failing")  # they begin first: what begins last should be short
HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


@pytest.fixture(scope="session", autouse=True)
def _children_hear_every_signal() -> Iterator[None]:
    """nohup and a shell's background have signals ignored, and what is ignored is inherited; what has a handler is not."""
    deaf = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) == signal.SIG_IGN]
    for number in deaf:
        signal.signal(number, lambda *_: None)
    yield
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _handlers_are_given_back() -> Iterator[None]:
    """The end of training ignores signals. What one test left ignored, the processes of the next would not hear."""
    before = {number: signal.getsignal(number) for number in HEARD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _what_was_imported_is_no_garbage() -> None:
    """Training collects garbage when it begins; to look through all of torch takes 0.2 s each time."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # the first optimizer does
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
