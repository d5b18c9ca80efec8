"""Copies of all ranks of an earlier attempt as one whole, which any number of ranks can read.

Each copy says which parts of which tensors it has, as a checkpoint's index does. A rank finds the
copies in its own launcher's memory; those of other launchers it reads over a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from colotrain.engine.comms import exchange
from colotrain.engine.state.buddy import RemoteFile, RemoteLauncher
from colotrain.engine.state.index import (
    INVALID,
    FileSource,
    Index,
    Source,
    index_of,
    join,
    own_name,
)
from colotrain.engine.state.manifest import Manifest
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.engine.state.shard_file import Piece
from colotrain.errors import ConfigError
from colotrain.records import from_plain, to_plain
from colotrain.spec.elastic import COPIES, CopyPlaces


class Key(NamedTuple):
    """What the copies of one moment have alike on all ranks; a later one is greater."""

    number: int
    """Number of the copy in this launch."""
    step: int
    world_size: int
    attempt: str
    """Random text of the attempt that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The state after a step in memory: in this rank's own copy, or in those of all ranks."""

    key: Key
    manifest: Manifest
    index: Index
    """Where the tensors are; in a rank's own copy, the parts that it had."""

    @property
    def step(self) -> int:
        return self.key.step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopy:
    """The copy of one rank, in the memory of this rank's launcher."""

    key: Key
    file: MemoryFile
    about: dict[str, Any]
    handle: int
    """The file's handle in the launcher."""

    @property
    def rank(self) -> int:
        """Rank that made it."""
        return int(self.about["rank"][0])

    def open(self) -> Copied | None:
        """Return the state, as far as the rank had it; None on all ranks where one has it damaged.

        All ranks must call, each for its own copy.
        """
        copied = None
        with suppress(ConfigError, *INVALID):
            if self.file.is_intact():
                source, tensors = FileSource(self.file.path), self.about["tensors"]
                copied = Copied(
                    key=self.key,
                    manifest=from_plain(Manifest, self.about["manifest"]),
                    index=index_of(tensors, lambda _: source, whole=False),
                )
        return _agreed(copied)

    def joined(self) -> dict[str, Any]:
        """Return what it adds to the index of the whole: each number comes from one rank."""
        return {name: self.about["tensors"][key] for name, key in self.about["joined"].items()}


def _agreed(copied: Copied | None) -> Copied | None:
    """Return the state where every rank has found it, else None. All ranks must call."""
    return None if exchange.is_any(copied is None) else copied


def names_to_join(pieces: Sequence[Piece], rank: int) -> dict[str, str]:
    """Return the names in the whole for those pieces of a rank's copy that no other rank adds.

    Buffers and plain state may differ between ranks: each adds its own.
    """
    return {
        (p.part.name if p.part.writes else own_name(rank, p.part.name)): p.part.name
        for p in pieces
        if p.part.writes or not p.lasts
    }


def key_of(about: dict[str, Any]) -> Key | None:
    """Return the key of a copy with this description; None where it says only what is void."""
    if "manifest" not in about:
        return None
    number, world_size = about["number"], about["rank"][1]
    return Key(number, about["manifest"]["step"], world_size, about["attempt"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """This rank's share of the files in its launcher's memory."""

    places: CopyPlaces
    copies: list[RankCopy]
    newest: int
    """Number of the newest copy in these files, be it void."""
    valid_from: int
    """Copies with smaller numbers are void, wherever they are."""


def look(places: CopyPlaces, local_rank: int, ranks: int) -> Memory:
    """Read the descriptions in this rank's files, and in its share of those kept for other nodes.

    `ranks` is the number of the launcher's ranks.
    """
    copies, newest, valid_from = [], 0, 0
    kept = places.files[COPIES * ranks :]
    for handle in (*places.own_files(local_rank), *kept[local_rank::ranks]):
        with suppress(OSError, *INVALID):
            file = MemoryFile(places.path(handle))
            if (about := file.read()) is None:
                continue
            newest = max(newest, about["number"])
            valid_from = max(valid_from, about["valid_from"])
            if (key := key_of(about)) is not None:
                copies.append(RankCopy(key=key, file=file, handle=handle, about=about))
    return Memory(places=places, copies=copies, newest=newest, valid_from=valid_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """An intact copy and the launcher that has it, as told to all ranks."""

    rank: int
    launcher: str
    """Address of the launcher's keeper."""
    handle: int
    num_bytes: int
    index: dict[str, Any]
    manifest: dict[str, Any]


def join_copies(
    key: Key, memory: Memory, tell: Callable[[str], None], readers: ExitStack
) -> Copied | None:
    """Return the whole that the copies with this key are, if every one is somewhere and intact.

    All ranks must call, each with its share of its launcher's files. `tell` is called with why
    copies that are there cannot be read; `readers` end the connections on which they are read.
    """
    mine = [
        _Holder(
            rank=copy.rank,
            launcher=memory.places.own,
            handle=copy.handle,
            num_bytes=copy.file.end(),
            index=copy.joined(),
            manifest=copy.about["manifest"],
        )
        for copy in memory.copies
        if copy.key == key and copy.file.is_intact()
    ]
    everyone = exchange.all_gather(to_plain(mine))
    told = (from_plain(_Holder, holder) for one in everyone for holder in one)
    holders = choose_holders(memory.places.own, told)
    whole = None
    if len(holders) == key.world_size:
        try:
            sources = open_sources(memory.places, holders, readers)
            parts = [holder.index for holder in holders]
            whole = Copied(
                key=key,
                manifest=from_plain(Manifest, holders[0].manifest),
                index=index_of(join(parts)["tensors"], sources.__getitem__),
            )
        except (ConfigError, *INVALID) as error:
            tell(f"{type(error).__name__}: {error}")
    return _agreed(whole)


def choose_holders(own: str, told: Iterable[_Holder]) -> list[_Holder]:
    """Return one holder of each rank's copy, by rank: this rank's launcher where it has one."""
    chosen: dict[int, _Holder] = {}
    for holder in told:
        if holder.rank not in chosen or holder.launcher == own:
            chosen[holder.rank] = holder
    return [chosen[rank] for rank in sorted(chosen)]


def open_sources(
    places: CopyPlaces, holders: Sequence[_Holder], readers: ExitStack
) -> dict[str, Source]:
    """Return the file of each rank's copy, by its name in the index, until `readers` are closed.

    `OSError` or `ValueError` where a launcher does not answer.
    """
    launchers: dict[str, RemoteLauncher] = {}
    sources: dict[str, Source] = {}
    for holder in holders:
        address = holder.launcher
        if address == places.own:
            sources[str(holder.rank)] = FileSource(Path(places.path(holder.handle)))
            continue
        if address not in launchers:
            launcher = RemoteLauncher(address, secret=places.secret)
            launchers[address] = readers.enter_context(closing(launcher))
        file = RemoteFile(launchers[address], holder.handle, holder.num_bytes)
        file.read_into(0, memoryview(bytearray(1)))  # `OSError` where it may not be read
        sources[str(holder.rank)] = file
    return sources
