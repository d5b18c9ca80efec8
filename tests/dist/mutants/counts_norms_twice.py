"""Parameters that all ranks of a tensor-parallel group hold count once per rank in the norm."""

from dataclasses import replace

from colotrain.engine.parts.part_map import PartMap
from colotrain.spec.axes import TP
from colotrain.verify import worker

correct = PartMap.part_of


def part_of(self, *args, **options):  # type: ignore[no-untyped-def]
    first = replace(self, rank=self.ranks.peers(self.rank, TP)[0])
    counts = correct(first, *args, **options).counts
    return replace(correct(self, *args, **options), counts=counts)


def main(path: str, *digests: str) -> int:
    PartMap.part_of = part_of
    return worker.main(path, *digests)
