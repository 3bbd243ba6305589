"""A map over processes whose results come in order. The processes die with their parent. No torch.

Not concurrent.futures: its workers share a pipe whose writing end each of them holds, so that none sees its parent die.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from kamui_dist.errors import UserError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_IN_FLIGHT = 2  # items a worker has: one in work, one waiting
_AHEAD = 4  # items a worker that may be done before they are their turn


def ordered_map(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Generator[_Result, None, None]:
    """function(item) of each item, in order, computed by `workers` processes; by this one if that is 1.

    function, items and results must pickle. At most 4 items a worker are read ahead. What `items` or `function` raises
    is raised at its place in the order. Close the generator to end the processes early. Raises UserError if one of them
    ends by itself (out of memory, say).
    """
    if workers == 1:
        yield from map(function, items)
        return
    with _pool(function, workers) as (processes, connections):
        iterator, fault = iter(items), None
        exhausted, sent, turn = False, 0, 0
        busy: dict[Connection, list[int]] = {connection: [] for connection in connections}
        done: dict[int, Any] = {}
        while not exhausted or turn < sent:
            # The least busy one first, so that all begin before any has two.
            for connection in sorted(busy, key=lambda c: len(busy[c])):
                if exhausted or len(busy[connection]) == _IN_FLIGHT or sent - turn >= _AHEAD * workers:
                    continue
                try:
                    item = next(iterator)
                except StopIteration:
                    exhausted = True
                except Exception as error:
                    exhausted, fault = True, error
                else:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen below, when it is read
                        connection.send(item)
                    busy[connection].append(sent)
                    sent += 1
            while turn in done:
                failed, result = done.pop(turn)
                turn += 1
                if failed:
                    raise result
                yield result
            # Results that are there already are taken before more is read, and waited for if nothing else can be done.
            idle = not exhausted and sent - turn < _AHEAD * workers and any(len(b) < _IN_FLIGHT for b in busy.values())
            waiting = [connection for connection, indices in busy.items() if indices]
            for ready in wait(waiting, timeout=0 if idle else None) if waiting else []:
                assert isinstance(ready, Connection)
                try:
                    done[busy[ready].pop(0)] = ready.recv()
                except (EOFError, ConnectionResetError) as error:
                    process = processes[connections.index(ready)]
                    process.join(5)
                    raise UserError(
                        f"a worker process ended by itself (exit code {process.exitcode}); if memory ran out, use fewer"
                        " --workers"
                    ) from error
        if fault is not None:
            raise fault


@contextlib.contextmanager
def _pool(function: Callable[..., Any], workers: int) -> Iterator[tuple[list[Any], list[Connection]]]:
    # A fresh interpreter each: a fork of a process with threads (a tokenizer's, a progress bar's) can hang.
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        with _interrupts_ignored():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, function), daemon=True)
                process.start()
                theirs.close()  # so that we see the worker die
                processes.append(process)
                connections.append(ours)
        yield processes, connections
    finally:
        for process in processes:
            process.kill()  # there is nothing in a worker to save
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches the whole process group. A child inherits what is ignored, so none of them ever sees it; the parent
    ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, function: Callable[..., Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        # In a thread, so that the parent never waits for a worker to take an item, and its death ends us at once.
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        item = inbox.get()
        try:
            answer = (False, function(item))
        except Exception as error:
            answer = (True, error)
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)
