"""Architectures of transformers under every plugin, against plain transformers, and exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import plain
from tests.families import FAMILIES, Family
from tests.representatives import chosen, of_each_day

pytest.importorskip("transformers")
SHOWN = [f for f in FAMILIES if f.name == "Mixtral"]
DIFFERENT = (
    "Mixtral",
    "Llama, tied",
    "Gemma 3",
    "T5",
    "ViT",
    "GPT-2",
    "Falcon",
    "Qwen3-MoE",
    "BERT",
    "Cohere",
    "Qwen3-VL",
    "Llama 4",
    "GPT-OSS",
    "Falcon-H1",
    "DeepSeek V3",
)
"""One of each kind of architecture."""
TRIED = chosen(FAMILIES, among=[f for f in FAMILIES if f.name in DIFFERENT])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family",
    of_each_day(TRIED, kept=SHOWN),
    ids=lambda family: f"{family.name} {family.architecture}".replace(" ", "-"),
)
def test_every_plugin_trains_and_exports_as_plain_transformers(
    family: Family, tmp_path: Path
) -> None:
    folder = family.make(tmp_path / "made")
    results = plain.compare(family, folder, tmp_path / "cases")
    assert not [f"{r.plugin}: {r.difference}" for r in results if not r.passed]
    assert max(result.max_abs_gradient for result in results) <= family.rounding
    differences = list(plain.export_differences(family, folder, tmp_path / "cases"))
    assert len(differences) == len(results)
    assert max(differences) <= 1e-5
