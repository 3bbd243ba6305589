"""The manifest of a checkpoint, and the few file operations that it must be able to rely on. No torch.distributed here.

    manifest.json    {"format", "version", "step", "state", "files", "tensors", "sha256"}
                     files: name -> bytes, sha256;  tensors: name -> dtype, shape, chunks;  chunk: offsets, sizes, file

The file is the writer's own rendering, byte for byte, and holds the SHA-256 of itself without that field.
What is read here may be damaged or forged: every name, size and offset is checked before anybody uses it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT, VERSION = "kamui_dist checkpoint", 1
DTYPES = {  # safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors", re.ASCII)
_STEP_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_MANIFEST_BYTES = 1 << 30


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or cannot be read. The message is one line.

    errnos: of a save that failed for nothing but the storage (no space, quota, input/output error, ...), what the
    operating system said on the ranks that failed; the same on all ranks. Empty for any other fault.
    """

    def __init__(self, message: str, errnos: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.errnos = errnos


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint and its manifest, which has been checked."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file["bytes"] for file in self.manifest["files"].values())

    @property
    def state(self) -> dict[str, Any]:
        """The small dict that was saved with the tensors."""
        return dict(self.manifest["state"])


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """The published checkpoints in `directory` as (step, path), lowest step first."""
    if not directory.is_dir():
        return []
    found = [(_STEP_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(name[1]), path) for name, path in found if name and path.is_dir() and not path.is_symlink())


def step_links(directory: Path) -> list[Path]:
    """Symbolic links in `directory` that have the name of a checkpoint: `step_directories` takes them for none."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_symlink())


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the manifest and the names of one checkpoint; its files are not hashed (`verify` does).

    Raises CheckpointError if the manifest is missing or damaged, or another step's; OSError if something cannot be read.
    """
    manifest = read_manifest(path)
    name = _STEP_NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest["step"]:
        raise CheckpointError(f"{path} holds step {manifest['step']}: it was renamed")
    return Checkpoint(path, manifest["step"], manifest)


def strangers(checkpoint: Checkpoint) -> list[str]:
    """What lies in its directory and is none of its files: somebody's note, or what a file server leaves. Nobody reads it."""
    known = {MANIFEST, "reason.txt", *checkpoint.manifest["files"]}
    return sorted(entry.name for entry in checkpoint.path.iterdir() if entry.name not in known)


def verify(path: Path) -> None:
    """Reads everything: manifest, names, sizes, hashes. Raises CheckpointError; OSError if something is unreadable."""
    check_files(path, open_checkpoint(path).manifest["files"])


def check_sizes(checkpoint: Checkpoint) -> None:
    """Compares the sizes of the files with the manifest, without reading them. Raises as `verify`."""
    for name, expected in checkpoint.manifest["files"].items():
        with open_regular(checkpoint.path / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{checkpoint.path / name} has {size} bytes, the manifest says {expected['bytes']}")


def render(manifest: dict[str, Any]) -> bytes:
    """The one spelling of a manifest: JSON, keys sorted, one line a file and a tensor."""

    def line(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    parts = []
    for key, value in sorted(manifest.items()):
        if key in ("files", "tensors") and value:
            value = "{\n" + ",\n".join(f"  {line(name)}:{line(value[name])}" for name in sorted(value)) + "\n }"
        else:
            value = line(value)
        parts.append(f" {line(key)}:{value}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint directory `path`, every field checked.

    Raises CheckpointError if it is missing, damaged, or says something impossible; OSError if it cannot be read.
    """
    with open_regular(path / MANIFEST) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path / MANIFEST}: {size} bytes are too many for a manifest")
        data = file.read()
    try:
        return parse_manifest(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error


def parse_manifest(data: bytes) -> dict[str, Any]:
    """Raises CheckpointError; see read_manifest. Every chunk lies inside its tensor, and together they fill it."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not JSON ({error})") from error
    require(isinstance(manifest, dict) and manifest.get("format") == FORMAT, f"not a {FORMAT}")
    require(manifest.get("version") == VERSION, f"format version {manifest.get('version')!r}, expected {VERSION}")
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    # The bytes too, not only the content: a changed space is a changed file.
    try:
        intact = render(manifest) == data and hashlib.sha256(render(body)).hexdigest() == manifest.get("sha256")
    except (ValueError, TypeError, AttributeError, RecursionError):
        intact = False
    require(intact, "its own checksum does not match: damaged or edited")
    require(is_size(manifest.get("step")) and isinstance(manifest.get("state"), dict), "step or state is missing")
    files, tensors = manifest.get("files"), manifest.get("tensors")
    require(isinstance(files, dict) and isinstance(tensors, dict), "files or tensors are missing")
    for name, file in files.items():
        require(_FILE_NAME.fullmatch(name) is not None, f"{name!r} is not a plain file name")
        known = isinstance(file, dict) and is_size(file.get("bytes")) and isinstance(file.get("sha256"), str)
        require(known and _SHA256.fullmatch(file["sha256"]) is not None, f"{name}: size or sha256 is wrong")
    used: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        known = (
            isinstance(tensor, dict) and str(tensor.get("dtype")) in DTYPES and isinstance(tensor.get("chunks"), list)
        )
        require(known and is_shape(tensor.get("shape")), f"tensor {name}: dtype, shape or chunks are wrong")
        shape, seen, elements = tensor["shape"], set(), 0
        for chunk in tensor["chunks"]:
            known = isinstance(chunk, dict) and is_shape(chunk.get("offsets")) and is_shape(chunk.get("sizes"))
            require(known and isinstance(chunk.get("file"), str), f"tensor {name}: a chunk is wrong")
            offsets, sizes = chunk["offsets"], chunk["sizes"]
            inside = len(offsets) == len(sizes) == len(shape) and all(
                offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
            )
            require(inside, f"tensor {name}: chunk {offsets} + {sizes} lies outside the shape {shape}")
            require(chunk["file"] in files, f"tensor {name}: its file {chunk['file']!r} is not listed")
            seen.add(tuple(offsets))
            elements += prod(sizes)
            used[chunk["file"]] += prod(sizes) * DTYPES[tensor["dtype"]].itemsize
        filled = elements == prod(shape) and len(seen) == len(tensor["chunks"])
        require(filled, f"tensor {name}: its chunks hold {elements} elements, its shape {shape} has {prod(shape)}")
    for name, size in used.items():  # bounds every tensor by the bytes that are on the disk
        require(size < files[name]["bytes"], f"{name}: {size} bytes of tensors in {files[name]['bytes']} bytes")
    return dict(manifest)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(map(is_size, value))


def open_regular(path: Path) -> io.FileIO:
    """Opens for reading; never follows a link, never blocks on a pipe. Raises CheckpointError if it is not a file."""
    try:
        regular = stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    if not regular:
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)


def check_files(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Compares the files in `path` with their manifest entries {"bytes", "sha256"}. Raises as `verify`."""
    for name, expected in files.items():
        with open_regular(path / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path / name} has {size} bytes, the manifest says {expected['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise CheckpointError(f"{path / name} is damaged: its SHA-256 is not the manifest's")


def remove(path: Path) -> None:
    """A file, a link or a whole directory; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
