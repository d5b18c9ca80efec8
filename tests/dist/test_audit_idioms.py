"""`colotrain audit` on the ways in which people write training scripts: no false alarms."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.audit import exit_code_of
from tests.dist import audited_idioms
from tests.dist.test_audit import observed
from tests.representatives import of_each_day, selected

SCRIPT = Path(audited_idioms.__file__)
LINES = SCRIPT.read_text("utf-8").splitlines()
NAMES = [
    name
    for name, value in vars(audited_idioms).items()
    if inspect.isfunction(value)
    and value.__module__ == audited_idioms.__name__
    and not inspect.signature(value).parameters
    and name != "main"
]
ON_TWO = {
    "adversarial",
    "averaged_after_each_step",
    "averaged_seldom",
    "averaged_weights",
    "by_all_tokens",
    "by_hand",
    "compiled",
    "compressed",
    "ends_of_epochs",
    "evaluated_with_gradients",
    "exchanged_in_step",
    "first_step_alone",
    "gan",
    "half_of_squares",
    "half_of_squares_each_step",
    "lbfgs",
    "mean_of_two_terms",
    "moving_average",
    "sam",
    "returns_its_loss",
    "several_losses",
    "sharded_optimizer",
    "another_order",
    "in_the_files_order",
    "one_epoch",
    "summed_over_ranks",
    "tensor_parallel",
    "tied_and_masked",
    "two_lines",
    "two_terms_by_all_tokens",
    "wrong_averaged_twice",
    "wrong_by_all_ranks_tokens",
    "wrong_means_times_ranks",
    "wrong_never_synced",
    "wrong_same_order",
    "wrong_seed_of_a_sampler",
    "wrong_stepped_alone",
    "wrong_sum_so_far",
    "wrong_criterion_outside_ddp",
    "wrong_outside_ddp",
}
"""Scripts that are run by two ranks."""
WRONG = {
    "wrong_adapters_not_added": ("parameters", "wrong", "0.0.up, 0.0.down.weight"),
    "wrong_averaged_twice": ("gradient", "wrong", "divided by 2 ranks once more"),
    "wrong_backward_twice": ("accumulation", "wrong", "a loss that had one in this step"),
    "wrong_backward_twice_divided": ("accumulation", "wrong", "a loss that had one in this step"),
    "wrong_by_all_ranks_tokens": ("accumulation", "wrong", "divided by those of all 2 ranks"),
    "wrong_by_tokens_and_micro_batches": ("accumulation", "wrong", "and by 2 micro-batches again"),
    "wrong_clips_a_part": ("clipping", "cannot tell", "1.weight, 1.bias; that may be meant"),
    "wrong_clips_gradients": ("clipping", "wrong", "clips nothing"),
    "wrong_compiled_and_not_divided": ("accumulation", "wrong", "not divided"),
    "wrong_criterion_outside_ddp": ("gradient", "wrong", "its own gradient of log"),
    "wrong_divided_by_a_function_too": ("accumulation", "wrong", "divided by 3 twice"),
    "wrong_stack_of_terms": ("accumulation", "wrong", "a step is the sum of 3"),
    "wrong_frozen_by_hand": ("frozen", "cannot tell", "changes 0.0.bias between"),
    "wrong_frozen_decays": ("frozen", "wrong", "0.0.bias"),
    "wrong_frozen_norm_between_evaluations": ("frozen", "wrong", "frozen BatchNorms move"),
    "wrong_frozen_statistics": ("frozen", "wrong", "running statistics of frozen BatchNorms move"),
    "wrong_gan_never_steps": ("parameters", "wrong", "never change: Sequential.0.0.bias"),
    "wrong_lbfgs_old_copy": ("parameters", "wrong", "4 parameters of another model"),
    "wrong_means_times_ranks": ("accumulation", "wrong", "multiplied by 2, the number of ranks"),
    "wrong_new_optimizer_each_step": ("update", "wrong", "3 of 4 steps are by a new optimizer"),
    "wrong_parameters_in_a_list": (
        "parameters",
        "cannot tell",
        "in no optimizer: one of shape [16]",
    ),
    "wrong_rate_of_a_group": ("parameters", "cannot tell", "zero in all steps looked into: 0.0."),
    "wrong_rest_of_an_epoch": ("accumulation", "cannot tell", "step 5 has 1 of 4 micro-batches"),
    "wrong_same_order": ("data", "wrong", "the order of epoch 0"),
    "wrong_seed_of_a_sampler": ("data", "wrong", "seed=0, drop_last=False; shuffle=True, seed=1"),
    "wrong_stepped_alone": ("gradient", "wrong", "each rank steps with its own gradient"),
    "wrong_sum_so_far": ("accumulation", "wrong", "a loss that had one in this step"),
    "wrong_taken_away_by_hand": ("gradient", "wrong", "the script takes all gradients away"),
    "wrong_tie_is_broken": ("parameters", "wrong", "these are two: table.weight, head.weight"),
    "wrong_moved_by_hand_too": ("update", "cannot tell", "itself changes 0.0.bias, 0.0.weight, 1"),
    "wrong_never_synced": ("update", "wrong", "though backward computed gradients"),
    "wrong_not_finite": ("update", "wrong", "made parameters that are not finite"),
    "wrong_outside_ddp": ("gradient", "wrong", "its own gradient of scale"),
    "wrong_own_means": ("accumulation", "wrong", "a step is the sum of 2"),
    "wrong_scale_left": ("gradient", "wrong", "a GradScaler's scale is still on it"),
    "wrong_still_in_eval_mode": ("mode", "wrong", "so that these are off: body.1, body.3"),
    "wrong_zeroed_after_clip": ("gradient", "not checked", "after it clips them: 0.0.bias"),
    "wrong_zeroed_in_place": ("update", "wrong", "though backward computed gradients"),
    "wrong_zeroed_between": ("zeroing", "wrong", "1 of 2 micro-batches are zeroed"),
    "wrong_zeroes_another": ("zeroing", "wrong", "gradients of the last step are still there"),
}
"""Script that is wrong → the check that says so, its outcome, and what it says."""
RIGHT = [name for name in NAMES if not name.startswith("wrong_")]
LEFT_OPEN = {
    "all_zero",
    "averaged_after_each_step",
    "averaged_seldom",
    "averaged_weights",
    "backward_twice_after_zero_grad",
    "by_a_constant",
    "by_autograd_grad",
    "by_hand",
    "divided_in_compiled_model",
    "ends_of_epochs",
    "exchanged_in_step",
    "first_step_alone",
    "gan",
    "gan_with_a_judge_of_batch_norm",
    "groups",
    "half_of_squares",
    "half_of_squares_each_step",
    "in_backward",
    "layer_by_layer",
    "left_out",
    "loss_network",
    "master_weights",
    "mean_of_two_terms",
    "momentum_encoder",
    "moving_average_inside",
    "one_optimizer_for_each_phase",
    "own_means",
    "probe",
    "sam_optimizer",
    "second_order",
    "smoothed",
    "style_of_an_image",
    "tasks_in_turns",
    "terms_divided_by_a_setting",
    "two_optimizers",
    "updated_by_hand",
    "without_autograd",
}
"""Right scripts of which a check cannot be made, or whose author alone knows what is meant."""
KNOWN = {"lbfgs", "sam", "adversarial", "moving_average", "several_losses", "two_lines"}
"""Right scripts of which everything is known."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The verdicts of all scripts that tests ask for, observed in one process and its forks."""
    names = sorted(name for (name,) in selected(request, "name"))
    scripts = [(name, 2 if name in ON_TWO else 1, str(SCRIPT), name) for name in names]
    return observed(tmp_path_factory.mktemp("idioms"), scripts)


@pytest.mark.parametrize("name", of_each_day(RIGHT, kept=["lbfgs", "sam", "gan", "moving_average"]))
def test_a_right_script_is_not_called_wrong(verdicts: Any, name: str) -> None:
    found = verdicts[name].values()
    assert not [verdict for verdict in found if verdict.outcome == "wrong"]
    assert "no Python process" not in next(iter(found)).text
    assert exit_code_of(0, list(found)) == (5 if name in LEFT_OPEN else 0), found
    if name in KNOWN:
        assert {v.outcome for v in found} == {"ok"}


@pytest.mark.parametrize(
    "name", of_each_day(WRONG, kept=["wrong_outside_ddp", "wrong_clips_a_part"])
)
def test_a_wrong_script_is_named_by_its_line(verdicts: Any, name: str) -> None:
    check, outcome, text = WRONG[name]
    found = verdicts[name][check]
    assert (found.outcome, text in found.text) == (outcome, True), found
    named = [LINES[int(site.rpartition(":")[2]) - 1] for site in found.sites]
    assert any(line.endswith("# here") for line in named), (found, named)
