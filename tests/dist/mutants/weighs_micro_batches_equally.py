"""Every micro-batch counts as much as any other, however many targets it has."""

from colotrain.engine.gradients import accumulation
from colotrain.verify import worker

weigh = accumulation.weighted_loss


def weighted_loss(model, batch):
    loss_sum, count = weigh(model, batch)
    return loss_sum / count.clamp(min=1) * 100, count * 0 + 100


def main(path: str, *digests: str) -> int:
    accumulation.weighted_loss = weighted_loss
    return worker.main(path, *digests)
