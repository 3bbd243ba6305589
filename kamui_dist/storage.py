"""Storage for torch.distributed.checkpoint (DCP): one safetensors file a rank. Nothing is ever unpickled.

    rank-00000.safetensors   what rank 0 wrote: 8-byte little-endian header length, JSON header, raw data
    manifest.json            which tensors there are, in which file (see manifest.py)

A tensor that one rank wrote whole has its own name as key in the file; a shard has `name@row,column,...`, the offsets
of its first element in the whole tensor. Parts without elements are not stored. Any safetensors reader opens the files.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from kamui_dist.files import write_text
from kamui_dist.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    VERSION,
    CheckpointError,
    is_shape,
    is_size,
    open_regular,
    parse_manifest,
    render,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BLOCK_BYTES = 32 << 20  # how much is read at a time
_HASHED_ASIDE = 128 << 10  # below, handing it to the thread takes longer than the hash


def save_tensors(
    tensors: dict[str, torch.Tensor], writer: SafetensorsWriter, copies: dict[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Collective. Writes tensors (plain or DTensor) through DCP, which divides the work; returns the manifest.

    copies: this rank's parts of those that it will write (see `planned`), to be written in place of `tensors`, which
    may then change meanwhile. Uses no group but `checkpoint_group`, so it may run in a thread.
    Raises CheckpointError on every rank, naming the ranks that failed and why.
    """
    planner = _CopiesPlanner(copies)
    _run_dcp(dcp.save, tensors, storage_writer=writer, planner=planner)
    box = [writer.manifest]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=checkpoint_group())
    assert box[0] is not None, "DCP returned without calling finish"
    return box[0]


def planned(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Collective. The names of those tensors that this rank writes (a part of) when they are saved; nothing is written.

    A function of names, shapes, dtypes and placements alone. Raises as save_tensors.
    """
    recorder = _PlanRecorder(Path(), {})
    _run_dcp(dcp.save, tensors, storage_writer=recorder, planner=_CopiesPlanner(None))
    return recorder.names


def load_tensors(tensors: dict[str, torch.Tensor], reader: SafetensorsReader) -> None:
    """Collective. Fills tensors (plain or DTensor, any mesh) in place. Raises CheckpointError as save_tensors."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _run_dcp(dcp.load, tensors, storage_reader=reader, planner=planner)


_group: tuple[Any, dist.ProcessGroup] | None = None


def checkpoint_group() -> dist.ProcessGroup | None:
    """A gloo group for checkpoints alone, made once (collective): apart from NCCL and from the training's messages.

    None without a process group.
    """
    global _group
    if not dist.is_initialized():
        return None
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]


def _run_dcp(call: Callable[..., Any], tensors: dict[str, torch.Tensor], **options: Any) -> None:
    alone = not dist.is_initialized()
    if alone:  # for good: catch_warnings is not for threads, and a save may run in one
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
    try:
        call(tensors, process_group=checkpoint_group(), no_dist=alone, **options)
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        faults = [(rank, fault) for rank, (fault, _) in sorted(error.failures.items())]
        lines = [
            f"rank {rank}: {fault if isinstance(fault, CheckpointError) else f'{type(fault).__name__}: {fault}'}"
            for rank, fault in faults
        ]
        errnos = [fault.errno or errno.EIO for _, fault in faults if isinstance(fault, OSError)]
        raise CheckpointError("; ".join(lines), tuple(errnos if len(errnos) == len(faults) else ())) from faults[0][1]
    except RuntimeError as error:  # a rank that died: gloo's message
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class _File:
    """One written file. All results of a rank share one object, so that it travels to the coordinator once."""

    name: str
    bytes: int
    sha256: str


class SafetensorsWriter(StorageWriter):
    """Writes into the directory `path`, which exists. `body` (JSON-able: step, state) goes into the manifest as it is.

    DCP calls each method on all ranks but prepare_global_plan and finish, which run on the coordinator only; what a
    rank raises in one of them is raised on all, as CheckpointException. After finish, `manifest` is what was written.
    """

    def __init__(self, path: Path, body: dict[str, Any]) -> None:
        self.path = path
        self.body = body
        self.manifest: dict[str, Any] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the path of a SafetensorsWriter is fixed when it is made"

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is not a tensor: only tensors are stored")
            if item.tensor_data.properties.dtype not in _NAMES:
                raise TypeError(f"{item.index.fqn} has dtype {item.tensor_data.properties.dtype}, which is not stored")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Streams this rank's parts to its file: one tensor at a time is copied to the CPU, hashed and written."""
        # Widest type first keeps every tensor aligned to its element size, as safetensors itself does.
        items = [(item, item.tensor_data) for item in plan.items if item.tensor_data is not None]
        items = [(item, data) for item, data in items if prod(data.chunk.sizes)]
        items.sort(key=lambda pair: (-pair[1].properties.dtype.itemsize, pair[0].index.fqn, pair[1].chunk.offsets))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item, data in items:
            key = chunk_key(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
            if key in header:
                raise ValueError(f"two tensors would be stored under the name {key}: rename one")
            start, end = end, end + prod(data.chunk.sizes) * data.properties.dtype.itemsize
            header[key] = {
                "dtype": _NAMES[data.properties.dtype],
                "shape": list(data.chunk.sizes),
                "data_offsets": [start, end],
            }
        results: list[WriteResult] = []
        if items:
            head = json.dumps(header, separators=(",", ":")).encode()
            head += b" " * (-len(head) % 8)
            with _HashedFile(self.path / plan.storage_data) as out:
                out.write(len(head).to_bytes(8, "little") + head)
                for item, data in items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor), f"{item.index.fqn} resolved to {type(tensor)}"
                    assert tensor.shape == data.chunk.sizes, f"{item.index.fqn} changed its shape while it was saved"
                    assert tensor.dtype == data.properties.dtype, f"{item.index.fqn} changed its dtype while saved"
                    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
                    out.write(flat.view(torch.uint8).numpy().data)
                file = out.finish()
            results = [
                WriteResult(item.index, prod(data.chunk.sizes) * data.properties.dtype.itemsize, file)
                for item, data in items
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest (the coordinator only, after every rank has written and synced its file)."""
        stored = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": stored[MetadataIndex(name, chunk.offsets)].name,
                }
                for chunk in tensor.chunks
                if prod(chunk.sizes)
            ]
            tensors[name] = {"dtype": _NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
        files = {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in set(stored.values())}
        manifest = {"format": FORMAT, "version": VERSION, **self.body, "files": files, "tensors": tensors}
        manifest["sha256"] = hashlib.sha256(render(manifest)).hexdigest()
        # As it will be read: what JSON would change (a tuple, a number as key) differs here already.
        self.manifest = parse_manifest(render(manifest))
        write_text(self.path / MANIFEST, render(manifest).decode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by DCP for a bare path


class _PlanRecorder(SafetensorsWriter):
    names: set[str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.names = {item.index.fqn for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


class _CopiesPlanner(dcp.DefaultSavePlanner):
    """Plans from the metadata of the live tensors, which do not change, and takes the data from copies if there are."""

    def __init__(self, copies: dict[str, torch.Tensor] | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self.copies is None else self.copies[index.fqn]


class _HashedFile:
    """A new file whose SHA-256 is computed while it is written. What a failure leaves goes with its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _HashedFile:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._sha256, self._bytes = hashlib.sha256(), 0
        self._thread = ThreadPoolExecutor(1)  # hashing and writing both release the GIL
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        aside = len(view) >= _HASHED_ASIDE
        hashed = self._thread.submit(self._sha256.update, view) if aside else None
        try:
            written = 0
            while written < len(view):
                written += os.write(self._fd, view[written:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            if hashed is not None:
                hashed.result()
        if not aside:
            self._sha256.update(view)
        self._bytes += len(view)

    def finish(self) -> _File:
        os.fsync(self._fd)
        return _File(self.path.name, self._bytes, self._sha256.hexdigest())


class SafetensorsReader(StorageReader):
    """Reads a checkpoint directory, whose `manifest` has been read and checked (read_manifest).

    Only the rows that a rank asks for are read, in blocks. Raises CheckpointError for whatever does not agree with the
    manifest, OSError for a file that cannot be read.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the path of a SafetensorsReader is fixed when it is made"

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor["dtype"]]),
                size=torch.Size(tensor["shape"]),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                    for chunk in tensor["chunks"]
                ],
            )
            for name, tensor in self.manifest["tensors"].items()
        }
        return Metadata(state_dict_metadata=dict(tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_options: Any) -> None:
        self._chunks = {
            MetadataIndex(name, chunk["offsets"]): chunk
            for name, tensor in self.manifest["tensors"].items()
            for chunk in tensor["chunks"]
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn} is not a tensor: only tensors are stored")
            by_file[self._chunks[item.storage_index]["file"]].append(item)
        for name, items in by_file.items():
            path = self.path / name
            with open_regular(path) as file:
                header, data_start = _read_header(file, path, self.manifest["files"][name]["bytes"])
                for item in items:
                    tensor = self.manifest["tensors"][item.storage_index.fqn]
                    chunk = self._chunks[item.storage_index]
                    key = chunk_key(item.storage_index.fqn, chunk["offsets"], chunk["sizes"], tensor["shape"])
                    entry = header.get(key)
                    if entry is None or entry["dtype"] != tensor["dtype"] or entry["shape"] != chunk["sizes"]:
                        raise CheckpointError(f"{path}: {key} is not there as the manifest says")
                    target = planner.resolve_tensor(item).detach()
                    if target.dtype != DTYPES[tensor["dtype"]]:
                        raise CheckpointError(f"{key} is {DTYPES[tensor['dtype']]}, wanted as {target.dtype}")
                    begin = data_start + entry["data_offsets"][0]
                    _read_part(file, path, begin, chunk["sizes"], item.storage_offsets, item.lengths, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def chunk_key(name: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """The key of a part in its safetensors file: the tensor's name, with `@offsets` if it is not the whole tensor."""
    return name if list(sizes) == list(shape) else f"{name}@{','.join(map(str, offsets))}"


def _read_header(file: io.FileIO, path: Path, expected_bytes: int) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors header, each checked against the file's size, and where the data starts."""
    size = os.fstat(file.fileno()).st_size
    if size != expected_bytes:
        raise CheckpointError(f"{path} has {size} bytes, the manifest says {expected_bytes}")
    length = int.from_bytes(file.read(8) or b"", "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is not a safetensors file: its header would have {length} bytes")
    raw = bytearray(length)
    _read_exactly(file, path, 8, memoryview(raw))
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start, end = entry["data_offsets"]
            fits = is_size(start) and is_size(end) and is_shape(entry["shape"]) and end <= size - 8 - length
            if not fits or end - start != prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
                raise CheckpointError(f"{path}: the header places {key} where it cannot be")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read") from error
    return header, 8 + length


def _read_part(
    file: io.FileIO,
    path: Path,
    begin: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Copies the box (`offsets`, `lengths`) of the array of `shape` at byte `begin` into `target`, rows by rows."""
    if not shape:  # 0-dim: one row of one element
        shape, offsets, lengths, target = (1,), (0,), (1,), target.reshape(1)
    assert list(target.shape) == list(lengths), f"{path}: asked for {list(lengths)}, target is {list(target.shape)}"
    row_bytes = prod(shape[1:]) * target.dtype.itemsize
    rows_at_once = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, lengths[0], rows_at_once):
        rows = min(rows_at_once, lengths[0] - first)
        raw = torch.empty(rows * row_bytes, dtype=torch.uint8)
        # Positioned reads, not a memory map: a file that shrinks meanwhile gives an error here, not SIGBUS.
        _read_exactly(file, path, begin + (offsets[0] + first) * row_bytes, raw.numpy().data)
        block = raw.view(target.dtype).view(rows, *shape[1:])
        for dim in range(1, len(shape)):
            block = block.narrow(dim, offsets[dim], lengths[dim])
        target.narrow(0, first, rows).copy_(block)


def _read_exactly(file: io.FileIO, path: Path, position: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file.fileno(), [into[done:]], position + done)
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {position + done}: truncated")
        done += count
