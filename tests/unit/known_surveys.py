"""Resolving with known answers of a model's survey and of counted samples, without a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colotrain.launch.server.forked_calls import ForkedCaller
from colotrain.planner import resolve as resolve_module
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.plugin import PlanningContext
from colotrain.spec.plan import FreezePlan, ModelPlan, RunPlan
from colotrain.spec.survey import LossStudy, Survey

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
