"""Matrices divided over ranks."""

from __future__ import annotations

import random
import secrets

from colotrain.spec.optimizers import newton_schulz_flops, rounds_of


def test_every_matrix_has_one_owner_and_ranks_have_about_the_same_work() -> None:
    draw = random.Random(seed := secrets.randbits(32))
    print(f"drawn from {seed}")
    for ranks in (1, 2, 3, 8):
        shapes = [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(draw.randint(1, 60))]
        rounds = rounds_of(shapes, ranks)
        assert sorted(index for pairs in rounds for index, _ in pairs) == list(range(len(shapes)))
        assert len(rounds) == -(-len(shapes) // ranks)
        work = [0] * ranks
        for pairs in rounds:
            owners = [owner for _, owner in pairs]
            assert len(set(owners)) == len(owners)
            for index, owner in pairs:
                work[owner] += newton_schulz_flops(shapes[index])
        costs = [newton_schulz_flops(shape) for shape in shapes]
        assert max(work) - min(work) <= max(costs)
