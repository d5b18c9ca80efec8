"""Writing safetensors files a tensor at a time, so that memory is bounded by the largest one.

Format: https://github.com/huggingface/safetensors (a header of JSON, then the bytes of each
tensor, little-endian, in the order of the header).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.models.stored import INDEX, SINGLE

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype → its name in safetensors files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor to be written; `read` loads it only when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_files(
    folder: Path,
    entries: Sequence[Entry],
    *,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> list[Path]:
    """Write `model.safetensors`, or numbered files of about `shard_bytes` with their index.

    `progress` is called with the bytes written so far. Every file is synced to disk.
    """
    shards = _split(entries, shard_bytes)
    if len(shards) == 1:
        paths = [folder / SINGLE]
    else:
        numbers = range(1, len(shards) + 1)
        paths = [folder / f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in numbers]
    done = 0
    for path, shard in zip(paths, shards, strict=True):
        done = write_file(path, shard, progress=progress, done=done)
    if len(shards) > 1:
        where = {e.name: p.name for p, s in zip(paths, shards, strict=True) for e in s}
        index = {"metadata": {"total_size": done}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
        paths.append(folder / INDEX)
    return paths


def _split(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Split entries into consecutive parts of at most `shard_bytes`, or of one larger entry."""
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for entry in entries:
        if shards[-1] and entry.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.num_bytes
    return shards


def write_file(
    path: Path, entries: Sequence[Entry], *, progress: Callable[[int], None], done: int = 0
) -> int:
    """Write one safetensors file; returns `done` plus the bytes of its tensors."""
    with path.open("wb") as out:
        header = _header(entries)
        out.write(len(header).to_bytes(8, "little") + header)
        for entry in entries:
            tensor = entry.read().detach().to("cpu", entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, f"{entry.name}: {tuple(tensor.shape)}"
            out.write(bytes_of(tensor))
            done += entry.num_bytes
            progress(done)
        out.flush()
        os.fsync(out.fileno())
    return done


def _header(entries: Sequence[Entry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        described[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
