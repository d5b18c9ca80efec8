"""DoRA's product over packed layers has its scale twice."""

from colotrain.models.adapter_kinds import magnitude
from colotrain.verify import worker

product = magnitude.product


def scaled_again(layer, x):
    return product(layer, x) * layer.lora_scale


def main(path: str, *digests: str) -> int:
    magnitude.product = scaled_again
    return worker.main(path, *digests)
