"""What `kamui-dist check` tests and measures, one function a subject. All are collective: every rank calls all of them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import kamui_dist
from kamui_dist import distributed, sources, start
from kamui_dist.config import Config
from kamui_dist.errors import UserError

Faults = list[tuple[int, str]]  # (rank, what)


def identity(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu, {torch.get_num_threads()} thread(s) a rank",
        "uuid": str(getattr(properties, "uuid", "")),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else "",
        "python": platform.python_version(),
        "kamui_dist": kamui_dist.__version__,
        "code": str(Path(kamui_dist.__file__).parent),
    }


def differences(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Ranks that run something else than most, and ranks that share a GPU."""
    faults = []
    for key in ("torch", "nccl", "python", "kamui_dist", "device", "code"):
        [(usual, _)] = Counter(row[key] for row in rows).most_common(1)
        faults += [
            f"{names[r]}: {key} is {row[key]!r}, most have {usual!r}" for r, row in enumerate(rows) if row[key] != usual
        ]
    owner: dict[tuple[str, str], str] = {}
    for r, row in enumerate(rows):
        if row["uuid"] and (other := owner.setdefault((row["host"], row["uuid"]), names[r])) != names[r]:
            faults.append(f"{names[r]}: uses the same GPU as {other}")
    return faults


def slow(rows: list[dict[str, Any]], names: list[str], key: str, what: str, factor: float) -> list[str]:
    """Ranks whose rate is less than the median's `factor`th part. With two ranks the faster one stands for the median."""
    rates = [row[key] for row in rows if row[key]]
    if len(rates) < 2:
        return []
    usual = max(rates) if len(rates) == 2 else statistics.median(rates)
    return [f"{names[r]}: {what} {usual / row[key]:.1f} times slower than the others ({row[key]:,.0f} against {usual:,.0f})"
            for r, row in enumerate(rows) if row[key] and row[key] * factor < usual]  # fmt: skip


def compute(device: torch.device) -> float:
    """GFLOP/s of a matrix product, the best of some: a slow or throttled device shows, a busy moment does not."""
    n = 512 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    return 2 * n**3 / 1e9 / _best(lambda: a @ a, device, 8)


def clock_offset() -> float:
    """This clock minus rank 0's, in seconds, as they leave a barrier; good to some milliseconds."""
    offsets = []
    for _ in range(5):
        distributed.barrier()
        times = distributed.gather_objects(time.time())
        offsets.append(times[distributed.rank()] - times[0])
    return statistics.median(offsets)


def storage(run_dir: Path, size: int) -> tuple[dict[str, float], Faults]:
    """Each rank writes a file into the run directory, and reads that of a rank on another node, if there is one: MB/s, and free
    bytes. What was made for it is removed."""
    rank, ranks = distributed.rank(), distributed.world_size()
    here = distributed.gather_objects(platform.node()).count(platform.node())
    writer = (rank + here) % ranks
    ours = distributed.broadcast_object(f".check-{os.getpid()}-{time.time_ns()}")
    existed = distributed.broadcast_object(run_dir.exists())
    place, fault, written, read, free = run_dir / ours, "", 0.0, 0.0, 0
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    try:
        block = bytes([rank % 256]) * (1 << 20)
        written = _rate(lambda: _write(place / str(rank), block, size), size)
        free = shutil.disk_usage(place).free
    except OSError as error:
        fault = f"cannot write into {run_dir}: {error.strerror or error}"
    distributed.barrier()
    try:
        path = place / str(writer)
        began = time.perf_counter()
        content = _read(path)
        read = size / 1e6 / (time.perf_counter() - began)
        if content != bytes([writer % 256]) * size and not fault:
            fault = f"reads other bytes from {path} than rank {writer} has written"
    except FileNotFoundError:
        fault = (
            fault
            or f"does not see what rank {writer} wrote into {run_dir}: it is not on a file system that all nodes share"
        )
    except OSError as error:
        fault = fault or f"cannot read {path}: {error.strerror or error}"
    faults = [(r, text) for r, text in enumerate(distributed.gather_objects(fault)) if text]
    shutil.rmtree(place, ignore_errors=True)
    if not existed:
        distributed.barrier()
        with contextlib.suppress(OSError):
            run_dir.rmdir()
    return {"write": written, "read": read, "free": free}, faults


def checkpoint_bytes(cfg: Config) -> int | None:
    """Of fp32 weights and two moments; None if the model cannot be built without its data."""
    try:
        if cfg.model.vocab_size is None:
            sources.open_datasets(cfg)
        return 12 * sum(p.numel() for p in start.build_model(cfg).parameters())
    except UserError:
        return None


def links(device: torch.device, size: int) -> tuple[dict[str, float], Faults]:
    """MB/s from the previous rank to this one, all neighbours at once."""
    rates, fault = {"link_local": 0.0, "link_remote": 0.0}, ""
    rank, ranks = distributed.rank(), distributed.world_size()
    if ranks > 1:
        hosts = distributed.gather_objects(platform.node())
        outgoing = torch.full((size // 4,), float(rank), device=device)
        incoming = torch.full_like(outgoing, -1.0)

        def exchange() -> None:
            for request in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % ranks),
            ]):  # fmt: skip
                request.wait()

        key = "link_local" if hosts[rank - 1] == hosts[rank] else "link_remote"
        rates[key] = size / 1e6 / _best(exchange, device, 3)
        if not bool((incoming == (rank - 1) % ranks).all()):
            fault = f"receives other numbers than rank {(rank - 1) % ranks} ({hosts[rank - 1]}) sends"
    return rates, [(r, text) for r, text in enumerate(distributed.gather_objects(fault)) if text]


def collectives(
    mesh: DeviceMesh | None, device: torch.device, size: int, names: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """(what was measured, faults) for each collective over the world and over each dimension of the mesh. Bus bandwidth as
    nccl-tests define it: what each link has to carry."""
    if mesh is None:
        yield "collectives: none, one process", []
        return
    groups: list[tuple[str, Any]] = [("world", None)]
    groups += [
        (n, mesh.get_group(n)) for n in mesh.mesh_dim_names or () if 1 < mesh[n].size() < distributed.world_size()
    ]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for name, group in groups:
        n, me = dist.get_world_size(group), dist.get_rank(group)
        part = max(1, size // 4 // n)
        whole, piece = torch.empty(n * part, device=device), torch.empty(part, device=device)
        total = n * (n + 1) / 2  # of the values 1 to n; whole numbers: exact in fp32

        def reduced(whole: torch.Tensor = whole, group: Any = group, me: int = me) -> None:
            whole.fill_(me + 1)
            dist.all_reduce(whole, group=group)

        def gathered(
            whole: torch.Tensor = whole, piece: torch.Tensor = piece, group: Any = group, me: int = me
        ) -> None:
            piece.fill_(me + 1)
            gather(whole, piece, group=group)

        def scattered(
            whole: torch.Tensor = whole, piece: torch.Tensor = piece, group: Any = group, me: int = me
        ) -> None:
            whole.fill_(me + 1)
            scatter(piece, whole, group=group)

        expected = torch.arange(1, n + 1, device=device).repeat_interleave(part).float()
        for what, call, factor, right in (
            ("all-reduce", reduced, 2 * (n - 1) / n, lambda w=whole, t=total: bool((w == t).all())),
            ("all-gather", gathered, (n - 1) / n, lambda w=whole, e=expected: torch.equal(w, e)),
            ("reduce-scatter", scattered, (n - 1) / n, lambda p=piece, t=total: bool((p == t).all())),
        ):  # fmt: skip
            seconds = max(distributed.gather_objects(_best(call, device, 3)))
            wrong = [r for r, fine in enumerate(distributed.gather_objects(right())) if not fine]
            rate = whole.numel() * 4 / seconds / 1e6
            yield (
                f"{what:<15}{name} of {n}: {1000 * seconds:,.2f} ms for {whole.numel() * 4 / 2**20:,.0f} MiB, {rate:,.0f} MB/s, "
                f"bus {rate * factor:,.0f} MB/s{', WRONG' if wrong else ''}"
            ), [f"{names[r]}: {what} over {name} of {n} gives wrong numbers" for r in wrong]  # fmt: skip


def _best(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Seconds, after one call to warm up."""
    found = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)


def _rate(call: Callable[[], Any], size: int) -> float:
    began = time.perf_counter()
    call()
    return size / 1e6 / (time.perf_counter() - began)


def _write(path: Path, block: bytes, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read from the storage and not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> bytes:
    for attempt in range(20):  # network file systems show new files late
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if attempt == 19:
                raise
            time.sleep(0.5)
    raise AssertionError("not reached")
