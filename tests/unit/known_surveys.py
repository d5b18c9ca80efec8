"""Resolving, and contexts of plans, with known answers about the model and its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from colotrain.config.schema import Config
from colotrain.launch.server.forked_calls import ForkedCaller
from colotrain.planner import resolve as resolve_module
from colotrain.planner.context import PlanningContext
from colotrain.planner.machine import this_machine
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.scale import Scale
from colotrain.planner.stages import Stage
from colotrain.spec.axes import MeshPlan
from colotrain.spec.observing import ObservePlan
from colotrain.spec.plan import (
    BatchPlan,
    DataPlan,
    FreezePlan,
    ModelPlan,
    OptimPlan,
    RunPlan,
    TrainPlan,
)
from colotrain.spec.survey import AxisChecks, LossStudy, Survey

SurveyModel = Callable[[ModelPlan, FreezePlan, int], Survey]


class KnownSurveys(ModelSurveys):
    """Answers of given functions; no micro-batch is traced, so plans lack activations and times."""

    def __init__(self, survey: SurveyModel, samples: Any = None, validation: Any = None) -> None:
        super().__init__(ForkedCaller(), show_preparation=None)  # type: ignore[arg-type]
        for name, function in (
            ("survey", survey),
            ("count", samples),
            ("count_validation", validation or (lambda data, seed, *, prepare: None)),
            ("trace", lambda *_, **__: None),
            ("study_loss", lambda model, data, seed: LossStudy()),
            ("check_axes", lambda model: AxisChecks()),
            ("check_functions", lambda data, named, seed: None),
            ("wrong_names", lambda named: []),
        ):
            object.__setattr__(self, name, function)


def resolve(
    config: dict[str, Any],
    *,
    survey: SurveyModel,
    samples: Any = None,
    validation: Any = None,
    **about: Any,
) -> tuple[RunPlan, PlanningContext]:
    """`planner.resolve.resolve` with these answers."""
    surveys = KnownSurveys(survey, samples, validation)
    return resolve_module.resolve(config, surveys=surveys, **about)


def planning_context(
    stage: Stage, optim: OptimPlan, *, capacity: int, num_ranks: int = 1, **changes: Any
) -> PlanningContext:
    """The context of a model on `num_ranks` GPUs of one node, each with `capacity` bytes."""
    made = PlanningContext(
        settings=Config(),
        scale=Scale(
            nodes=1,
            procs_per_node=num_ranks,
            device="cuda",
            threads_per_rank=1,
            memory_bytes=capacity,
            mesh=MeshPlan(),
        ),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulation_steps=1, data_parallel=1),
        model=ModelPlan(target="colotrain.models.llm:LLM"),
        data=DataPlan(source="corpus", corpus="stdlib"),
        freeze=FreezePlan(),
        survey=stage.survey,
        stages=(stage,),
        stage=stage,
        train=TrainPlan(max_steps=1, activation_checkpointing="none", eval_every=0),
        optim=optim,
        observe=ObservePlan(log_every=0, grads_every=0),
        machine=this_machine(),
        hardware=None,
    )
    return replace(made, **changes)
