"""Every rank adds the bias of a sum to its part of the sum."""

import torch.nn.functional as F

from colotrain.models import tensor_parallel_styles
from colotrain.models.tensor_parallel import leave
from colotrain.verify import worker


def rowwise(module, shard, draws, x):
    return leave(F.linear(x, module.weight, module.bias), shard)


def main(path: str, *digests: str) -> int:
    tensor_parallel_styles._FORWARDS["rowwise"] = rowwise
    return worker.main(path, *digests)
