"""A run goes on with other mesh axes: with the same values, losses and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colotrain.models.tensor_parallel_styles import SUMMED
from colotrain.rundir import RunDir
from tests.checkpoints import read_whole
from tests.dist import plain
from tests.dist.test_run import losses
from tests.dist.test_tensor_parallel import HEADS, MANY_HEADS
from tests.families import Family
from tests.running import SMALL, Colotrain


def test_a_run_goes_on_with_other_axes(colotrain: Colotrain) -> None:
    options = (*SMALL, *HEADS, "observe.grads_every=1", "checkpoint.every=2", "checkpoint.keep=3")
    steady = (*options, "optim.schedule.name=constant")
    whole = colotrain.run(*steady, "train.max_steps=4", "plugin=zero1", "name=whole")
    divided = colotrain.run(*steady, "train.max_steps=2", "plugin=zero3", "mesh.tp=2", "name=tp")
    assert losses(divided) == pytest.approx(losses(whole)[:2], abs=1e-6)
    seen = [
        [(e.fields["loss"], e.fields["tokens"]) for e in colotrain.events(name) if e.kind == "eval"]
        for name in ("whole", "tp")
    ]
    assert seen[1][0] == pytest.approx(seen[0][0], abs=1e-6)
    gradients = [
        [e.fields for e in colotrain.events(name) if e.kind == "gradients"]
        for name in ("whole", "tp")
    ]
    for before, after in zip(*gradients, strict=False):
        for column in ("norm", "rms", "max_abs", "zero_fraction", "update_ratio"):
            assert after[column] == pytest.approx(before[column], rel=1e-4, abs=1e-7), column
        assert after["global_norm"] == pytest.approx(before["global_norm"], rel=1e-6)
    resumed = colotrain("resume", "tp", "train.max_steps=4", "mesh.tp=1", "plugin=gemini", "--json")
    assert losses(resumed.json) == pytest.approx(losses(whole), abs=1e-6)


def test_a_checkpoint_holds_the_same_bits_for_all_axes(colotrain: Colotrain) -> None:
    options = (*SMALL, *HEADS, "checkpoint.every=2", "checkpoint.keep=3", "train.max_steps=4")
    folders = [RunDir(colotrain.cwd / "runs" / name).checkpoint(2) for name in ("a", "b", "c")]
    colotrain.run(*options, "plugin=zero2", "name=a", "train.eval_steps=0")
    # a run that may roll back saves what it resumed from before its first step
    again = (*options, "train.on_nonfinite=rollback", "train.eval_steps=0")
    colotrain.run(*again, "mesh.tp=2", "plugin=zero1", "name=b", f"checkpoint.resume={folders[0]}")
    colotrain.run(*again, "plugin=gemini", "name=c", f"checkpoint.resume={folders[1]}")
    assert_equal_states(*folders)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_of_data_go_on_with_any_axes_and_their_exports_load(
    tmp_path: Path, colotrain: Colotrain
) -> None:
    pytest.importorskip("transformers")
    family = Family("Llama, tied", "LlamaForCausalLM", "llama", MANY_HEADS)
    folder = family.make(tmp_path / "made")
    options = (
        *(f"model.hf={folder}", "data.target=tests.families:causal", "train.global_batch=8"),
        *("train.micro_batch=1", "train.max_steps=4", "checkpoint.every=2", "checkpoint.keep=3"),
        *("optim.lr=0.02", "train.on_nonfinite=rollback"),  # it saves what it resumes from
    )
    before = colotrain.run(*options, "cluster.procs_per_node=4", "plugin=zero3", "name=before")
    saved = colotrain.rundir("before").checkpoint(2)
    for axes in (
        ("plugin=zero1", "cluster.procs_per_node=4", "mesh.tp=2"),
        ("plugin=gemini", "cluster.procs_per_node=4", "mesh.cp=2"),
        ("plugin=zero2", "cluster.procs_per_node=1"),
    ):
        name = "-".join(axes).replace("=", "-")
        went_on = colotrain.run(*options, *axes, f"name={name}", f"checkpoint.resume={saved}")
        assert losses(went_on) == pytest.approx(losses(before)[2:], abs=1e-6), axes
        assert_equal_states(saved, colotrain.rundir(name).checkpoint(2))
        run, to = colotrain.rundir(name), tmp_path / f"exported-{name}"
        assert plain.export_difference(family, folder, run, to, step=4) <= 1e-5


def test_a_run_goes_on_with_another_plan_of_its_own(colotrain: Colotrain) -> None:
    options = (
        *("model.target=tests.dist.own_heads:make", "data.target=tests.dist.own_heads:samples"),
        *("train.global_batch=4", "cluster.procs_per_node=2", "train.eval_steps=0"),
        *("checkpoint.every=1", "checkpoint.keep=3", "train.on_nonfinite=rollback"),
    )
    heads = f"'blocks.*.query':colwise,'blocks.*.out':rowwise,'blocks.*.norm':{SUMMED}"
    inputs = "'blocks.*.down':rowwise_split_input,head:rowwise_split_input"
    divided = (f"mesh.tp_plan={{{heads}}}", "mesh.tp=2", "plugin=zero3")
    otherwise = (f"mesh.tp_plan={{{inputs}}}", "mesh.tp=2", "plugin=zero1")
    whole = colotrain.run(*options, "train.max_steps=3", "plugin=zero2", "name=whole")
    colotrain.run(*options, *divided, "train.max_steps=1", "name=plan")
    saved = colotrain.rundir("plan").checkpoint(1)
    again = (*options, "train.max_steps=3", f"checkpoint.resume={saved}")
    went_on = colotrain.run(*again, *otherwise, "name=other")
    assert losses(went_on) == pytest.approx(losses(whole)[1:], abs=1e-6)
    assert_equal_states(saved, colotrain.rundir("other").checkpoint(1))


COUNTING = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.seen += x.sum(0)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def samples():
    return [{"x": torch.full((4,), float(i))} for i in range(16)]
"""


def test_buffers_that_differ_are_the_first_ranks_on_another_mesh(colotrain: Colotrain) -> None:
    """The rank of the same number has other samples there: with its buffer it would go on wrong."""
    (colotrain.cwd / "counting.py").write_text(COUNTING)
    options = (
        *("model.target=counting:Counting", "data.target=counting:samples", "plugin=zero1"),
        *("train.global_batch=4", "cluster.procs_per_node=2", "train.eval_steps=0"),
        *("data.validation_fraction=0", "checkpoint.every=1", "train.on_nonfinite=rollback"),
    )
    colotrain.run(*options, "train.max_steps=1", "name=apart")
    saved = colotrain.rundir("apart").checkpoint(1)
    stored = read_whole(saved)
    assert not torch.equal(stored["rank.1.model.seen"], stored["model.seen"])
    (told,) = notes_of_buffers(colotrain, "apart")
    assert "step 1: buffers that forward changes differ between ranks: seen. " in told
    plan = "mesh.tp_plan={layers.0:colwise,layers.1:rowwise}"
    again = (*options, "train.max_steps=2", f"checkpoint.resume={saved}", plan, "mesh.tp=2")
    result = colotrain("run", *again, "name=together")
    assert result.code == 0
    assert "buffers differed: seen (1 in all) begin with those of the first rank" in result.err
    first = read_whole(colotrain.rundir("together").checkpoint(1))
    assert torch.equal(first["model.seen"], stored["model.seen"])
    assert "rank.1.model.seen" not in first
    assert not notes_of_buffers(colotrain, "together")


def notes_of_buffers(colotrain: Colotrain, name: str) -> list[str]:
    texts = [e.fields["text"] for e in colotrain.events(name) if e.kind == "note"]
    return [text for text in texts if "buffers that forward changes" in text]


def assert_equal_states(*folders: Path) -> None:
    """Assert that checkpoints hold the same bits of parameters and optimizer state."""
    first, *others = ({n: t for n, t in read_whole(f).items() if n[:3] != "rng"} for f in folders)
    assert any(name.startswith("optim.") for name in first)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
