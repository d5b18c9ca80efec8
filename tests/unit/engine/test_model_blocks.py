"""Which modules of a model are its blocks."""

from __future__ import annotations

from torch import nn

from colotrain.engine.model.model_blocks import find_blocks


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()


def test_sequences_of_layers_that_repeat_in_a_container_are_blocks() -> None:
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert names(nn.ModuleList([layers(), layers()])) == ["0", "1"]
    assert names(nn.Sequential(layers(), layers(), nn.Linear(4, 2))) == ["0", "1"]
    assert names(nn.ModuleList([layers(), layers(), other])) == ["0", "1", "2.0", "2.2"]


def test_sequences_of_blocks_are_lists_of_them() -> None:
    stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]
    assert names(nn.Sequential(Block(), Block())) == ["0", "1"]


def test_sequences_inside_a_block_are_no_blocks() -> None:
    assert names(nn.ModuleList([Block(), Block()])) == ["0", "1"]
