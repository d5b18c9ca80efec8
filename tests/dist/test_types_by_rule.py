"""Types of transformers that no list ever had train on ranks that divide them, by comparison alone.

The reference is transformers and torch in one process, in float64, sample by sample.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import plain
from tests.families import FAMILIES
from tests.representatives import representatives

pytest.importorskip("transformers")
TYPES = {
    f.architecture: f
    for f in FAMILIES
    if f.architecture in ("Glm4ForCausalLM", "Ernie4_5ForCausalLM")
}
PLUGINS = ("zero1", "zero3")


@pytest.mark.parametrize("axis", ["mesh.tp", "mesh.cp"])
@pytest.mark.parametrize("architecture", representatives(TYPES, kept=["Glm4ForCausalLM"]))
def test_a_type_that_no_list_had_equals_plain_transformers(
    architecture: str, axis: str, tmp_path: Path
) -> None:
    family = TYPES[architecture]
    folder = family.make(tmp_path / "made")
    plans = [plain.plan_of(family, folder, plugin, f"{axis}=2") for plugin in PLUGINS]
    for result in plain.compare(family, folder, tmp_path / "cases", plans):
        assert result.passed, result.difference
        assert result.max_abs_gradient <= family.rounding
