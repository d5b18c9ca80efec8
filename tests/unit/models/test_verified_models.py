"""docs/models.md says of mesh axes what runs have shown."""

from __future__ import annotations

import runpy

from colotrain.models.huggingface_tensors import VERIFIED
from tests.families import FAMILIES
from tests.pages import ROOT


def test_types_with_tensor_parallelism_are_those_with_equal_runs() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "verified_models.py"))
    _, _, table = (ROOT / "docs" / "models.md").read_text("utf-8").partition(script["MARK"])
    rows = {tuple(line.split(" | ")[:2]): line.split(" | ")[6:] for line in table.splitlines()}
    shown = [(f.kind, rows[script["key_of"](f)]) for f in FAMILIES]
    same = {kind for kind, axes in shown if axes[0] == "same"}
    assert same == set(VERIFIED)
    assert all(len(axes) == 3 for _, axes in shown)
    assert not [kind for kind, axes in shown if "differs" in " ".join(axes)]
