"""Runs a function on N real processes that form a gloo group: the tests' way to have ranks."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HEAVY = ["numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`fn(*args)` in `world_size` processes; returns the result of each rank, in rank order.

    The processes are forks of one that has imported torch and done nothing else (that import is most of what a small test
    takes): as fresh as spawned ones, with the environment and working directory of now. `fn` is a module-level function; `args`
    and results are picklable. Every rank has joined the process group (none for world_size 1, which still gets a process of its
    own) and leaves it afterwards.

    Raises AssertionError with the traceback text of every rank that failed, or if `timeout` seconds pass. Ranks that
    wait for a failed peer are killed after a short grace, in which they may report too; no process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    pipes: list[Connection] = []
    children: list[Any] = []
    results: dict[int, Any] = {}
    faults: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            place = str(Path.cwd()), {**os.environ, **ranks, **meeting, "OMP_NUM_THREADS": "1"}
            child = context.Process(target=_child, args=(send, place, fn, args), daemon=True)
            child.start()
            send.close()  # so that a dead child reads as end of file here
            pipes.append(receive)
            children.append(child)
        waiting = set(range(world_size))
        while waiting and time.monotonic() < deadline:
            remaining = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], timeout=remaining)
            for rank in [rank for rank in waiting if pipes[rank] in ready]:
                waiting.discard(rank)
                try:
                    fault, result = pipes[rank].recv()
                except EOFError:
                    children[rank].join(5)
                    fault = f"the process ended without a result, exit code {children[rank].exitcode}"
                if fault is None:
                    results[rank] = result
                else:
                    faults[rank] = fault
                    deadline = min(deadline, time.monotonic() + 10)
        if waiting and not faults:
            raise AssertionError(f"ranks {sorted(waiting)} had not finished after {timeout} s: killed")
        for rank in waiting:
            faults[rank] = "was still waiting when another rank had failed: killed"
    finally:
        for child in children:
            child.join(0 if faults or len(results) < world_size else 10)
            if child.is_alive():
                child.kill()
                child.join()
        for pipe in pipes:
            pipe.close()
    if faults:
        raise AssertionError("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(faults.items())))
    return [results[rank] for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(send: Connection, place: tuple[str, dict[str, str]], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.chdir(place[0])
    os.environ.clear()
    os.environ.update(place[1])
    try:
        import torch

        from kamui_dist import distributed

        gc.freeze()  # training collects garbage when it begins: what was imported takes 0.2 s each time
        torch.set_num_threads(1)
        distributed.start(torch.device("cpu"), timeout_minutes=1)
        result = fn(*args)
        pickle.dumps(result)  # fails here, where the traceback can be told
        distributed.stop()
        send.send((None, result))
    except BaseException:  # SystemExit and KeyboardInterrupt are failures of a rank too
        send.send((traceback.format_exc(), None))
    finally:
        send.close()
