"""Process group, device, rank helpers, and the packed reduction. Works the same without a process group (one process).

Python knows one launch contract: RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, as torchrun sets them; none set means
one process and no process group (the debug mode). Only this file starts a process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kamui_dist.errors import UserError

_groups: list[dist.ProcessGroup] = []  # of the mesh


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def choose_device(name: str) -> torch.device:
    """The device of this rank. `name`: "auto" (cuda if there, else cpu), "cpu" or "cuda".

    Raises UserError if cuda is asked for and absent, or if there are more local ranks than devices.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"run.device = {name!r}, but this torch ({torch.__version__}) sees no CUDA device; set run.device to cpu or auto",
            alike=True,
        )
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"LOCAL_RANK {local_rank} has no GPU: this node has {count}; set --nproc_per_node to {count} or less"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start(device: torch.device, timeout_minutes: float) -> None:
    """Joins the process group that the environment describes; with one process there is none. Blocks until all ranks are there."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if dist.is_initialized():  # after a rollback: the ranks are the same
        set_timeout(timeout_minutes)
        return
    # The gloo half carries objects and checkpoint planning, so that neither touches the GPU's queue. Without device_id: NCCL
    # takes the current device, which choose_device has set, and groups of gloo alone can still be made beside it.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **_own_store())


def _own_store() -> dict[str, Any]:
    """After a restart torchrun's store still has the addresses of the dead ranks, and gloo would fail or wait for them (pytorch
    issue 135712): each attempt gets its own part of it. On several nodes each torchrun counts for itself; there launch/env.sh keeps
    torchrun from sharing its store."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("LOCAL_WORLD_SIZE") != env["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["WORLD_SIZE"]), is_master=False)
    part = dist.PrefixStore(f"kamui/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return {"store": part, "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}


def make_mesh(device: torch.device, replicate: int, shard: int) -> DeviceMesh | None:
    """A (replicate, shard) mesh over all ranks, neighbours in the same shard group; None for one process."""
    if world_size() == 1:
        return None
    mesh = init_device_mesh(device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    _groups[:] = mesh.get_all_groups()
    return mesh


def stop() -> None:
    """Leaves the process group. Only after an orderly end: after a failure the peers may never answer."""
    global _timeout
    if dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()
    _timeout = None


_timeout: float | None = None  # what set_timeout has set


def set_timeout(minutes: float) -> None:
    """The longest that a collective of training may wait from now on. Costs nothing while it does not change. Not for the group of
    checkpoints, which has its own. A torch that cannot change it keeps the first one, and the watchdog ends what hangs."""
    global _timeout
    if minutes == _timeout or not dist.is_initialized():
        return
    _timeout = minutes
    if (change := getattr(dist.distributed_c10d, "_set_pg_timeout", None)) is not None:
        for group in [None, *_groups]:
            change(timedelta(minutes=minutes), group)


def agreed_max(value: float, device: torch.device) -> float:
    """The largest of all ranks' values, on all ranks. Collective."""
    return max(row[0] for row in gather_rows(value, device=device))


def barrier() -> None:
    if dist.is_initialized():
        gather_objects(None)  # over gloo: a barrier on NCCL would launch a kernel


def gather_objects(obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`obj` of every rank, in rank order, on every rank. Plain picklable objects only; small ones. `group`: another one of all
    ranks than the training's."""
    if not dist.is_initialized():
        return [obj]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, obj, group=group)  # over gloo, also beside NCCL
    return out


def broadcast_object(obj: Any) -> Any:
    """Rank 0's `obj` on every rank."""
    return gather_objects(obj if is_main() else None)[0]


def raise_together(error: Exception | None) -> None:
    """Every rank passes its error or None; if any has one, all raise. Call where ranks meet anyway (set-up, load), so that a
    fault that one rank sees never leaves the others waiting.

    Raises UserError (every fault with its rank) if all faults are the user's, else RuntimeError.
    """
    told = None if error is None else (isinstance(error, UserError), str(error) or repr(error))
    faults = [(r, *e) for r, e in enumerate(gather_objects(told)) if e is not None]
    if not faults:
        return
    texts = {text for _, _, text in faults}
    # All ranks saw the same fault: once is enough, and no rank is to blame.
    message = (
        texts.pop()
        if len(texts) == 1 and len(faults) == world_size()
        else "\n".join(f"rank {r}: {t}" for r, _, t in faults)
    )
    kind = UserError if all(is_user for _, is_user, _ in faults) else RuntimeError
    agreed: Exception = kind(message)
    agreed.agreed = True  # type: ignore[attr-defined]  # all ranks have it: rank 0 tells it for everybody
    raise agreed from error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around work without collectives that can fail on one rank: a fault of one is raised by all (see raise_together)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error)


def seed_random(seed: int, step: int, micro_batch: int) -> None:
    """Every random draw of a micro-batch (dropout, ...) becomes a function of (seed, step, micro-batch, rank), so that masks
    differ between ranks and a resumed run draws what an uninterrupted one would have drawn. No state to save."""
    key = hashlib.blake2b(f"{seed},{step},{micro_batch},{rank()}".encode(), digest_size=7).digest()
    # Not torch.manual_seed, which seeds these two and, for each kind of device that is not there, notes the stack (0.1 ms each).
    torch.default_generator.manual_seed(int.from_bytes(key, "little"))
    if torch.cuda.is_available():
        torch.cuda.manual_seed(int.from_bytes(key, "little"))
    random.seed(key)


def gather_rows(*values: torch.Tensor | float, device: torch.device) -> list[list[float]]:
    """The packed reduction, and the one host synchronisation of a step: this rank's few numbers in, every rank's row out,
    the same on all ranks (0-dim tensors on `device` or plain floats; carried in float64).

    A gather and not an all-reduce: sums, maxima and "which rank" come from one message, and every rank adds them up in the
    same order, so whatever is decided from them is decided alike.
    """
    # full() and not tensor(): a fill kernel, where a copy from the host would wait for the device
    row = torch.stack(
        [
            v.double() if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=device)
            for v in values
        ]
    )  # (k,)
    rows = row.new_empty(world_size(), len(values))  # (world, k)
    if dist.is_initialized():
        # 2.13 renamed it and warns of the old name; 2.11 has only that one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(rows.view(-1), row)
    else:
        rows[0] = row
    return rows.tolist()
