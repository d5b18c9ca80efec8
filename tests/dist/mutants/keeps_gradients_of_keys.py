"""The gradients of keys and values are those of a rank's own queries alone."""

from colotrain.engine.comms.all_gather import Channel
from colotrain.verify import worker


def own_part(self, output, input):
    output.copy_(input.chunk(self.size)[self.rank])


def main(path: str, *digests: str) -> int:
    Channel.reduce_scatter = own_part
    return worker.main(path, *digests)
