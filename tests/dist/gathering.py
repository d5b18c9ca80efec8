"""A worker of verify in which no rank shares its parameters: every group is gathered."""

from __future__ import annotations

from colotrain.engine import worker as engine_worker
from colotrain.verify import worker


def main(path: str) -> int:
    engine_worker.share_parameters = lambda sharded: None
    return worker.main(path)
