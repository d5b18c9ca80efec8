"""The last stage computes the loss of a micro-batch with the labels of the one before."""

from colotrain.engine.gradients import accumulation
from colotrain.verify import worker

weigh = accumulation.weighted_loss
before = []


def weigh_otherwise(model, batch):
    before.append(batch["labels"])
    return weigh(model, {**batch, "labels": before[max(0, len(before) - 2)]})


def main(path: str, *digests: str) -> int:
    accumulation.weighted_loss = weigh_otherwise
    return worker.main(path, *digests)
