"""docs/models.md says of mesh axes what runs and comparisons have shown."""

from __future__ import annotations

import runpy

from tests.dist.test_context_parallel import DIVIDED as SEQUENCES
from tests.dist.test_divided_objectives import ENCODERS
from tests.dist.test_tensor_parallel import DIVIDED as MATRICES
from tests.families import FAMILIES
from tests.pages import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "verified_models.py"))
TEXT = (ROOT / "docs" / "models.md").read_text("utf-8")


def test_no_run_with_an_axis_differs_from_one_process() -> None:
    _, _, table = TEXT.partition(SCRIPT["MARK"])
    rows = {tuple(line.split(" | ")[:2]): line.split(" | ")[6:] for line in table.splitlines()}
    shown = [(f.kind, rows[SCRIPT["key_of"](f)]) for f in FAMILIES]
    assert all(len(axes) == 3 for _, axes in shown)
    assert not [kind for kind, axes in shown if "differs |" in " | ".join(axes)]


def test_types_that_ranks_of_their_own_divide_are_the_same_in_the_table() -> None:
    _, _, rest = TEXT.partition(SCRIPT["TYPES"])
    table, _, _ = rest.partition(SCRIPT["END_OF_TYPES"])
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    tp = {kind.strip("`") for kind, _, matrices, _ in lines if matrices == "same"}
    cp = {kind.strip("`") for kind, _, _, sequences in lines if sequences == "same"}
    assert set(MATRICES) <= tp
    assert {*SEQUENCES, *ENCODERS} <= cp
