"""A token with two experts on one rank is sent there twice, and comes back twice."""

from colotrain.models import expert_parallel
from colotrain.verify import worker

computed = expert_parallel._computed


def computed_for_each_expert(module, forward, tokens, gates, index):
    several = (index >= 0).sum(1, keepdim=True).clamp(min=1)
    return computed(module, forward, tokens, gates, index) * several


def main(path: str, *digests: str) -> int:
    expert_parallel._computed = computed_for_each_expert
    return worker.main(path, *digests)
