"""Experts of other ranks' tokens are not multiplied by the tokens' gates."""

from colotrain.models import expert_parallel
from colotrain.verify import worker

computed = expert_parallel._computed


def computed_without_gates(module, forward, tokens, gates, index):
    return computed(module, forward, tokens, gates * 0 + 0.5, index)


def main(path: str, *digests: str) -> int:
    expert_parallel._computed = computed_without_gates
    return worker.main(path, *digests)
