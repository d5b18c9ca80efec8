"""gemini's budgets: bytes of each tier that a rank may use, and checks of what they can hold."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from colotrain.config.schema import Plugin
from colotrain.config.sizes import check_size, parse_size
from colotrain.errors import Problem
from colotrain.planner.context import PlanningContext
from colotrain.planner.machine import Machine
from colotrain.planner.offload import least_bytes, predict
from colotrain.planner.scale import Scale
from colotrain.rundir import OFFLOAD, RUNS
from colotrain.spec.offload import SAFETY, Budget
from colotrain.spec.plan import PluginPlan
from colotrain.spec.quantities import format_size

AUTOMATIC_SHARE = 0.9
"""Share of the free memory that a budget of `auto` may use."""
AUTOMATIC_DISK_SHARE = 0.5
"""Share of the free space that the disk tier may use in the run's own folder, which also holds the
run's checkpoints."""
LAUNCHER_BYTES = 512 << 20
"""Most host memory of the launcher and of the server that workers are forked from, together."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
REMOTE = ("nfs*", "cifs", "smb*", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse.*")
"""File systems too slow for an automatic disk tier."""
LEAST_SPACE_BYTES = 1 << 30
"""Free space that an automatic disk tier needs at least."""


def _names_folder(asked: Plugin) -> bool:
    """Whether the user has named a folder for the disk tier."""
    return asked.disk_path not in (None, "none", "auto")


def find_budget(
    asked: Plugin, scale: Scale, machine: Machine, *, with_disk: bool = False
) -> Budget | None:
    """The budget of a plugin that `check_budget` accepts; None where nothing can be offloaded.

    On CPU, where device and host are one memory, it is None unless a folder or a limit is given.
    `with_disk`: where no folder is named, the disk tier is in the run's own folder.
    """
    budget = asked.budget
    is_named, is_limited = _names_folder(asked), (budget.host, budget.disk) != ("auto", "auto")
    if scale.device == "cpu" and not (is_named or is_limited or with_disk):
        return None
    if scale.device != "cpu" and not scale.memory_bytes and budget.device == "auto":
        return None  # the device's memory is not known
    with_disk = with_disk or (asked.disk_path == "auto" and budget.disk != "auto")
    whole = host_bytes(scale, machine)
    free = machine.host_free_bytes or whole * scale.procs_per_node
    free = min(whole, max(0, free - LAUNCHER_BYTES) // scale.procs_per_node)
    folder, room = None, 0
    if is_named:
        folder = str(Path(str(asked.disk_path)).expanduser().absolute())
        room = int(_free_bytes(Path(folder)) * AUTOMATIC_SHARE) // scale.procs_per_node
    elif with_disk:
        folder = OFFLOAD
        room = int(_free_bytes(RUNS.absolute()) * AUTOMATIC_DISK_SHARE) // scale.procs_per_node
    device = 0
    if scale.device != "cpu":
        device = _size(budget.device, scale.memory_bytes, int(scale.memory_bytes * AUTOMATIC_SHARE))
    return Budget(
        device_bytes=device,
        host_bytes=_size(budget.host, whole, int(free * AUTOMATIC_SHARE)),
        disk_bytes=_size(budget.disk, room, room) if folder else 0,
        disk_path=folder,
    )


def with_own_folder(plan: PluginPlan, asked: Plugin, context: PlanningContext) -> PluginPlan:
    """`plan` with a disk tier in the run's own folder, where memory might not suffice.

    The disk must have room for everything that memory cannot hold.
    """
    if not _allows_own_folder(asked):
        return plan
    if asked.budget.host == "auto" and context.option(plan).verdict == "yes":
        return plan
    scale = context.scale
    budget = find_budget(asked, scale, context.machine, with_disk=True)
    lowered = replace(plan, budget=budget)
    if budget is None:
        return lowered
    placed = (predict(lowered, s.survey, context.optim, scale.device)[1] for s in context.stages)
    has_room = all(placement.need["disk"] <= budget.disk_bytes for placement in placed)
    return lowered if has_room else plan


def _allows_own_folder(asked: Plugin) -> bool:
    """Whether the run's own folder may be a disk tier: nothing else is asked for, and it can be."""
    where = existing(RUNS.absolute())
    kind = file_system(where)
    is_remote = any(fnmatchcase(kind, remote) for remote in REMOTE)
    if asked.disk_path != "auto" or kind in IN_MEMORY or is_remote:
        return False
    return os.access(where, os.W_OK) and _free_bytes(where) >= LEAST_SPACE_BYTES


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(existing(folder)).free


def _size(asked: float | str, whole: int, automatic: int) -> int:
    return automatic if asked == "auto" else parse_size(asked, whole=whole)


def host_bytes(scale: Scale, machine: Machine) -> int:
    """One rank's share of the host's memory, in bytes."""
    if scale.device == "cpu":
        return scale.memory_bytes
    return machine.host_memory_bytes // scale.procs_per_node


def check_budget(asked: Plugin, scale: Scale, machine: Machine) -> Iterator[Problem]:
    """Problems of budgets and folder that show without the model."""
    budget = asked.budget
    if budget.device != "auto" and scale.device == "cpu":
        fix = "set plugin.budget.host"
        expected = "auto: on CPU the device's memory is the host's"
        yield Problem(key="plugin.budget.device", value=budget.device, expected=expected, fix=fix)
    elif budget.device != "auto":
        yield from check_size("plugin.budget.device", budget.device, scale.memory_bytes)
    if budget.host != "auto":
        yield from check_size("plugin.budget.host", budget.host, host_bytes(scale, machine))
    if budget.disk != "auto":
        if asked.disk_path in (None, "none"):
            fix = "name a folder in plugin.disk_path"
            expected = "auto without plugin.disk_path"
            yield Problem(key="plugin.budget.disk", value=budget.disk, expected=expected, fix=fix)
        else:
            yield from check_size("plugin.budget.disk", budget.disk, 1 << 40)
    if _names_folder(asked):
        yield from _check_folder(str(asked.disk_path))


def _check_folder(text: str) -> Iterator[Problem]:
    key, fix = "plugin.disk_path", "name a folder on a local disk"
    folder = Path(text).expanduser().absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        yield Problem(key=key, value=text, expected="a folder", fix=fix)
        return
    where = existing(folder)
    kind = file_system(where)
    if kind in IN_MEMORY:
        expected = f"a file system on disk ({where} is {kind}, which is memory itself)"
        yield Problem(key=key, value=text, expected=expected, fix=fix)
        return
    try:
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        expected = f"a folder that can be written ({where}: {error.strerror})"
        yield Problem(key=key, value=text, expected=expected, fix=fix)


def existing(folder: Path) -> Path:
    """`folder`, or its nearest parent that exists."""
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))


def file_system(place: Path) -> str:
    """Type of the file system that `place` is on; empty where it is unknown."""
    try:
        device = place.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    rows = [line.partition(" - ") for line in lines]
    found = [after.split()[0] for before, _, after in rows if before.split()[2] == wanted]
    return found[-1] if found else ""


def check_room(context: PlanningContext, plugin: PluginPlan) -> Iterator[Problem]:
    """Problems of budgets the user set that cannot hold one group, or of a disk that is too small.

    Automatic budgets need no check: the plan's verdict covers them.
    """
    if plugin.budget is None:
        return
    asked, scale = context.settings.plugin, context.scale
    of_stages = [
        predict(plugin, stage.survey, context.optim, scale.device, safety=SAFETY)
        for stage in context.stages
    ]
    top = of_stages[0][1].top
    least = max(least_bytes(sizes, plugin) for sizes, *_ in of_stages)
    on_disk = [placement.need["disk"] for _, placement, _ in of_stages]
    room = plugin.budget.room(top)
    if room < least and getattr(asked.budget, top) != "auto":
        expected = f"at least {format_size(least)} for the largest group at work"
        fix = f"raise plugin.budget.{top}, or lower plugin.chunk_size"
        yield Problem(
            key=f"plugin.budget.{top}", value=format_size(room), expected=expected, fix=fix
        )
    if _names_folder(asked) or asked.budget.disk != "auto":
        yield from _check_space(plugin.budget, on_disk, scale)


def _check_space(budget: Budget, needs: Sequence[int], scale: Scale) -> Iterator[Problem]:
    """Problems if the plan's bytes on disk exceed the budget or the space; `needs`: by stage."""
    need = max(needs)
    if budget.disk_path is None or need == 0:
        return
    if need > budget.disk_bytes:
        expected = f"at least {need:,} bytes per rank for what plugin.budget.host cannot hold"
        fix = "raise either"
        yield Problem(key="plugin.budget.disk", value=budget.disk_bytes, expected=expected, fix=fix)
        return
    free = _free_bytes(RUNS.absolute() / budget.disk_path)
    most = sum(needs) / len(needs) if scale.nodes == 1 else need  # a node may have one stage alone
    whole = round(most * scale.procs_per_node)
    if whole > free:
        expected = (
            f"a folder with {whole:,} bytes free for {scale.procs_per_node} ranks, not {free:,}"
        )
        fix = "free some space, name another folder, or raise plugin.budget.host"
        yield Problem(key="plugin.disk_path", value=budget.disk_path, expected=expected, fix=fix)
