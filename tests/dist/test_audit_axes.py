"""`colotrain audit` where ranks share a model, a sequence or experts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.audit import exit_code_of
from tests.dist import audited_axes
from tests.dist.test_audit import observed
from tests.representatives import of_each_day, selected

SCRIPT = Path(audited_axes.__file__)
LINES = SCRIPT.read_text("utf-8").splitlines()
NAMES = [
    name
    for name, value in vars(audited_axes).items()
    if inspect.isfunction(value)
    and value.__module__ == audited_axes.__name__
    and not inspect.signature(value).parameters
    and name not in ("main", "two_by_two")
]
ON_FOUR = {
    "by_torch_and_sharded",
    "context_and_data_parallel",
    "experts_and_data",
    "sharded_context",
    "split_by_hand_and_by_data",
    "split_by_sequence_and_by_data",
    "wrong_exchanged_over_data_alone",
    "wrong_not_averaged_over_data",
    "wrong_readers_of_groups",
    "wrong_undivided",
}
"""Scripts that are run by four ranks, the others by two."""
RIGHT = [name for name in NAMES if not name.startswith("wrong_")]
NOT_CHECKED = {"stages"}
"""Right scripts of which a check that concerns them cannot be made."""
CLIPPED_IN_PART = {"by_torch_and_clipped"}
"""Right scripts that clip some parameters alone: whether that is meant is left open."""
WRONG = {
    "wrong_all_summed_after_each_backward": ("gradient", "sum again what they have of earlier"),
    "wrong_copies_are_summed": ("gradient", "2.00 of the reference, in head.bias"),
    "wrong_divided_by_parts": ("accumulation", "0.50 of the mean of 2 micro-batches"),
    "wrong_exchanged_over_data_alone": ("gradient", "not all of them are exchanged"),
    "wrong_experts_are_averaged": ("weights", "expert.weight, expert.bias"),
    "wrong_experts_of_all_losses": ("gradient", "2.00 of the reference, in expert.bias"),
    "wrong_norm_counts_copies_twice": ("clipping", "that of the whole gradient is"),
    "wrong_norm_is_averaged": ("gradient", "0.50 of the reference, in norm.weight"),
    "wrong_norm_is_not_summed": ("gradient", "its own gradient of norm.weight"),
    "wrong_norm_of_own_parts": ("clipping", "norm"),
    "wrong_not_averaged_over_data": ("gradient", "its own gradient of head.bias"),
    "wrong_one_parameter_of_all_losses": ("gradient", "2.00 of the reference, in experts alone"),
    "wrong_part_in_no_optimizer": ("parameters", "down.weight, down.bias"),
    "wrong_parts_are_averaged": ("gradient", "different parts of down.weight"),
    "wrong_readers_of_groups": ("data", "equal inputs"),
    "wrong_readers_of_parts": ("data", "share parameters by parts, and have different inputs"),
    "wrong_router_is_not_exchanged": ("gradient", "its own gradient of router.bias"),
    "wrong_summed_after_each_backward": ("gradient", "of earlier micro-batches of norm.weight"),
    "wrong_undivided": ("accumulation", "a step is the sum of 2"),
}
"""Script that is wrong → the check that says so, and what it says."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The verdicts of all scripts that tests ask for, observed in one process and its forks."""
    names = sorted(name for (name,) in selected(request, "name"))
    scripts = [(name, 4 if name in ON_FOUR else 2, str(SCRIPT), name) for name in names]
    return observed(tmp_path_factory.mktemp("axes"), scripts)


def test_every_script_is_tried() -> None:
    assert {name for name in NAMES if name.startswith("wrong_")} == WRONG.keys()


@pytest.mark.parametrize(
    "name", of_each_day(RIGHT, kept=["by_torch_and_sharded", "split_by_sequence", "experts"])
)
def test_a_right_script_is_not_called_wrong(verdicts: Any, name: str) -> None:
    found = verdicts[name]
    assert not [verdict for verdict in found.values() if verdict.outcome == "wrong"]
    assert exit_code_of(0, list(found.values())) == (
        5 if name in NOT_CHECKED | CLIPPED_IN_PART else 0
    ), found
    if name not in NOT_CHECKED:
        assert found["gradient"].text.startswith("1.0000 of the reference"), found
        assert found["accumulation"].text.startswith("1.00 of the mean of 2"), found


@pytest.mark.parametrize(
    "name", of_each_day([*WRONG], kept=["wrong_norm_is_not_summed", "wrong_readers_of_parts"])
)
def test_a_wrong_script_is_named(verdicts: Any, name: str) -> None:
    check, text = WRONG[name]
    found = verdicts[name][check]
    assert (found.outcome, text in found.text) == ("wrong", True), verdicts[name]
    named = [LINES[int(site.rpartition(":")[2]) - 1] for site in found.sites]
    without_line = name == "wrong_readers_of_groups"  # it is the data of all ranks together
    assert without_line or any(line.endswith("# here") for line in named), (found, named)
