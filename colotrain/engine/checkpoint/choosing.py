"""The checkpoint that a run goes on from: the newest that is intact, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colotrain.engine.checkpoint.manifest import MANIFEST, complete, damage
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter


def choose(folder: Path, events: EventWriter) -> Path | None:
    """Return the newest intact checkpoint in `folder` (or `folder` itself if it is one), or None.

    All ranks must call, and all get the same; each checks a part of the files. If there are
    checkpoints and none is intact, that is an error.
    """
    candidates = _candidates(folder)
    for path in candidates:
        found = damage(path, part=dist.get_rank(), parts=dist.get_world_size())
        bad = torch.tensor(float(found is not None))
        dist.all_reduce(bad)
        if bad.item() == 0:
            return path
        if found is not None:
            events.write(Note(text=f"warning: checkpoint {path.name} passed over: {found}"))
    if candidates:
        raise ColotrainError(
            f"{folder}: none of {len(candidates)} checkpoints is intact ({damage(candidates[0])})",
            "start again with another name, or give checkpoint.resume=PATH of an older one",
        )
    return None


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints to try, the same on every rank: rank 0 looks and tells the others."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        is_one = (folder / MANIFEST).is_file()
        names = [[str(folder)] if is_one else [str(path) for path in complete(folder)]]
    dist.broadcast_object_list(names)
    return [Path(name) for name in names[0]]
