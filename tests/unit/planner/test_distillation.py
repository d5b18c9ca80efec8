"""A teacher is in the plan: its weights for certain, what it computes and reads as an estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colotrain.planner.distillation import memory_of_pass
from colotrain.planner.layout import Layout
from colotrain.planner.memory import Estimate
from colotrain.planner.stages import Stage
from colotrain.planner.traced.survey import survey, trace_micro_batch
from colotrain.spec.objectives import DPO, DistillPlan
from colotrain.spec.plan import DataPlan, FreezePlan, ModelPlan
from colotrain.spec.survey import Survey, Trace
from colotrain.spec.teacher import COPIES, PART_BYTES, kept_bytes, teacher_of
from tests.unit.known_surveys import planning_context
from tests.unit.planner.test_memory import ADAM

SIZES = {"vocab_size": 128, "d_model": 64, "num_layers": 4, "num_heads": 4, "d_hidden": 128}
TEACHER = ModelPlan(target="colotrain.models.llm:LLM", args=SIZES)
STUDENT = ModelPlan(target="colotrain.models.llm:LLM", args={**SIZES, "num_layers": 1})
DATA = DataPlan(
    source="corpus", seq_len=32, tokenizer="bytes", shuffle=False, validation_fraction=0.0
)
WHOLE = FreezePlan(patterns=("*",))


def traced(freeze: FreezePlan) -> Trace:
    found = trace_micro_batch(TEACHER, freeze, DATA, "fp32", "none", "cpu", 2)
    assert isinstance(found, Trace)
    return found


def estimate(folder: Path, **changes: Any) -> Estimate:
    made = {"device": "cpu", "shard": 2, "baseline": 1000, "micro_batch": 2, **changes}
    layout = Layout(parameters_live="use", gradients="sharded", optim=ADAM, **made)  # type: ignore[arg-type]
    plan = DistillPlan(teacher=str(folder), top_k=4, alpha=0.5, temperature=1.0)
    return memory_of_pass(
        layout,
        survey(STUDENT, FreezePlan(), 32),
        survey(TEACHER, FreezePlan(), 32),
        traced(WHOLE),
        distill=plan,
        num_samples=10,
        seq_len=32,
    )


def bytes_of(model: Survey) -> int:
    return sum(p.numel * p.itemsize for p in model.parameters)


def test_a_frozen_model_is_traced_forward_alone() -> None:
    forward, both = traced(WHOLE), traced(FreezePlan())
    assert {segment.phase for segment in forward.segments} == {"forward"}
    assert {segment.phase for segment in both.segments} == {"forward", "backward"}


def test_only_the_weights_are_certain(tmp_path: Path) -> None:
    teacher, student = (survey(model, FreezePlan(), 32) for model in (TEACHER, STUDENT))
    found = estimate(tmp_path)
    assert found.peak.exact == 1000 + bytes_of(teacher) + bytes_of(student) // 2
    assert found.breakdown.optimizer == found.breakdown.gradients == 0
    rows = 3 * 5 * (2 * 4 + 1) * 4 * 32  # half of the samples, three copies
    assert found.breakdown.buffers == rows
    assert found.breakdown.total > found.peak.exact + rows
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))  # mapped while it is read
    assert estimate(tmp_path).breakdown.buffers == 1 << 20
    assert estimate(tmp_path, device="cuda").breakdown.buffers == 32 << 20  # cuBLAS


@pytest.mark.parametrize(("capacity", "verdict"), [(0.99, "no"), (1.01, "tight"), (1e3, "yes")])
def test_a_plan_is_refused_where_the_weights_alone_do_not_fit(
    tmp_path: Path, capacity: float, verdict: str
) -> None:
    asked = estimate(tmp_path, baseline=1 << 30)
    student = survey(STUDENT, FreezePlan(), 32)
    context = planning_context(
        Stage(survey=student, traces=lambda checkpointing, size: None),
        ADAM,
        capacity=int(asked.peak.exact * capacity),
        before=lambda layout: asked,
    )
    layout = Layout(parameters_live="use", gradients="sharded", shard=2, optim=ADAM)
    option = context.option_of("zero3", layout, checkpointing="none")
    assert option.verdict == verdict
    assert option.memory == asked.breakdown


def test_what_is_written_at_once_is_bounded_and_half_precision_is_the_runs() -> None:
    plan = DistillPlan(teacher="there", top_k=64, alpha=0.5, temperature=1.0)
    row_bytes = 129 * 4 * 2048
    assert kept_bytes(plan, num_samples=3, seq_len=2048) == COPIES * 3 * row_bytes
    most = kept_bytes(plan, num_samples=10**6, seq_len=2048)
    assert most == COPIES * (PART_BYTES + row_bytes)
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        teacher = teacher_of(ModelPlan(target="mine:Model", objective=plan), precision)
        assert teacher is not None
        assert (teacher.hf, teacher.args) == ("there", {"dtype": dtype})
    assert teacher_of(ModelPlan(target="mine:Model", objective=DPO()), "fp32") is None
