"""A worker of verify in which no rank shares its parameters: every group is gathered."""

from __future__ import annotations

from colotrain.engine.build import transforms
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    transforms.share_parameters = lambda sharded: None
    return worker.main(path, *digests)
