"""Detects silent data corruption: values that change between updates or differ between copies.

Every `elastic.check_every` steps three kinds of values are compared, by checksums of their bits:

- memory: this rank's parameters and optimizer state after an update, and before the next one;
- replicas: values that several ranks hold alike (shards of a hybrid mesh, unsharded parameters);
- gathered: the whole parameters of each group, of which all ranks of a shard group get a copy.

Values that differ are compared again at once: a fault that is gone then was transient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms import exchange
from colotrain.engine.comms.raw_bytes import checksum
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.sharding.fsdp_internals import name_of, unsharded_of
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.participant import Agreed, Participant, StepResult
from colotrain.events.kinds import CorruptionFound, Note
from colotrain.records import from_plain, to_plain
from colotrain.spec.axes import DP_REPLICATE, EP, STAGE, TP
from colotrain.spec.batch import is_due
from colotrain.spec.phases import Phase


class Corruption(RuntimeError):
    """Values are persistently wrong. The run is restarted from its last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that fails a check."""

    check: str
    """Name of the check: memory, replicas or gathered."""
    name: str
    ranks: tuple[int, ...]
    """Ranks whose value is wrong, or all that disagree if there is no majority."""

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if self.check == "memory":
            return f"{self.name} on {who} changed between two updates"
        what = "copies of" if self.check == "replicas" else "gathered"
        return f"{what} {self.name} differ: {who}"


class Guard(Participant):
    """Searches for corruption every `elastic.check_every` steps."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.checksums: dict[str, int] | None = None
        """Checksums of this rank's state after the last update, until the next one."""

    def before_update(self, agreed: Agreed) -> None:
        """Compare this rank's memory with the stored checksums, if any."""
        if self.checksums is None or not agreed.finite:
            return
        first = _agree(_changed(self.checksums, self.run))
        second = _agree(_changed(self.checksums, self.run)) if first else []
        self.checksums = None
        if first:
            _judge(self.run, first, second)

    def after_step(self, result: StepResult | None) -> None:
        """Store checksums of what must not change, and compare copies."""
        run = self.run
        if result is None:  # after a rollback they are those of other values
            self.checksums = None
        elif is_due(run.step, run.plan.elastic.check_every):
            run.at(Phase.CORRUPTION_SEARCH)
            self.checksums = dict(_sums(_state(run)))
            found = _differing(run)
            if found:
                _judge(run, found, _differing(run))


def _sums(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    return ((name, checksum(tensor)) for name, tensor in tensors if tensor.numel())


def _state(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters and optimizer state."""
    for name, parameter in run.sharded.named_parameters():
        yield name, local_part(parameter)
    for name, values in run.optimizer.state().items():
        yield from ((f"{key} of {name}", local_part(value)) for key, value in values.items())


def _changed(noted: dict[str, int], run: Run) -> list[Finding]:
    now = dict(_sums((n, t) for n, t in _state(run) if n in noted))
    rank = dist.get_rank()
    return [
        Finding(check="memory", name=name, ranks=(rank,))
        for name, before in noted.items()
        if now.get(name, before) != before
    ]


def _agree(mine: list[Finding]) -> list[Finding]:
    """Return the findings of all ranks; one small all-reduce where there are none."""
    if not exchange.is_any(bool(mine)):
        return []
    everyone = exchange.all_gather(to_plain(mine))
    return [from_plain(Finding, finding) for found in everyone for finding in found]


def _differing(run: Run) -> list[Finding]:
    """Compare replicas, and gathered parameters unless groups stream from lower tiers."""
    found = _differing_replicas(run)
    return found if run.optimizer.streams else found + _differing_gathered(run.sharded)


def _differing_replicas(run: Run) -> list[Finding]:
    comms = run.sharded.comms
    held = [(n, t, run.sharded.parts[n.rpartition(" of ")[2]]) for n, t in _state(run)]
    replicated = [(n, t) for n, t, part in held if not part.is_sharded]
    found = _compare("replicas", replicated, comms[STAGE])
    for axis in (TP, EP, DP_REPLICATE):
        if axis in comms.ranks.sizes:
            alike = [(n, t) for n, t, p in held if p.is_sharded and axis not in p.divided]
            found += _compare("replicas", alike, comms[axis])
    return _agree(found)


def _differing_gathered(sharded: ShardedModel) -> list[Finding]:
    """Compare the gathered parameters of groups; of shared parameters there is only one copy."""
    group = sharded.shard_group
    if group.size() == 1:
        return []
    found = []
    for part in (part for part in sharded.groups if part.name not in sharded.in_common):
        part.handle.unshard()
        gathered = [
            (name_of(param), whole.detach())
            for param in part.params
            if (whole := unsharded_of(param)) is not None
        ]
        found += _compare("gathered", gathered, group)
        part.handle.reshard()
    return _agree(found)


def _compare(check: str, held: list[tuple[str, Tensor]], group: Any) -> list[Finding]:
    """Compare checksums among the ranks of `group`, which must all call."""
    ranks = dist.get_process_group_ranks(group)
    if not held or len(ranks) == 1:
        return []
    device = held[0][1].device
    mine = torch.tensor([checksum(tensor) for _, tensor in held], device=device)
    every = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(every, mine, group=group)
    table = torch.stack(every).tolist()
    found = []
    for column, (name, _) in enumerate(held):
        values = [row[column] for row in table]
        if len(set(values)) == 1:
            continue
        wrong = minority(values)
        if dist.get_rank() == ranks[0]:  # one of them reports
            found.append(Finding(check=check, name=name, ranks=tuple(ranks[i] for i in wrong)))
    return found


def minority(values: list[int]) -> list[int]:
    """Return the indices of values that differ from the majority's; all if there is no majority."""
    most = max(set(values), key=values.count)
    if values.count(most) * 2 <= len(values):
        return list(range(len(values)))
    return [index for index, value in enumerate(values) if value != most]


def _judge(run: Run, first: list[Finding], second: list[Finding]) -> None:
    """Report the findings; those found twice end this attempt."""
    what = "; ".join(str(finding) for finding in (second or first)[:4])
    if run.rank == 0:
        run.events.write(
            CorruptionFound(
                step=run.step,
                persistent=bool(second),
                found=[str(finding) for finding in (second or first)],
            )
        )
        if not second:
            run.events.write(Note(text=f"warning: corrupt for a moment, then not: {what}"))
    if second:
        if run.copies is not None:
            run.copies.clear()  # they may hold it, too
        raise Corruption(f"silent data corruption, and persistent: {what}")
