"""Examining a user's model, data and schedule for a plan, without loading torch in this process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from colotrain.data.prepare.prepared import Split
from colotrain.data.prepare.tokens import Progress, is_prepared, prepare_all
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.launch.server.compiler import postpone_compiler
from colotrain.launch.server.forked_calls import ForkedCaller, NotForked, stdout_to_stderr
from colotrain.launch.server.forkserver import SURVEY, import_quickly, is_warm
from colotrain.planner.cache import cached
from colotrain.planner.dependencies import Dependencies, record_dependencies, record_trial
from colotrain.planner.scale import Scale
from colotrain.planner.stages import Traces
from colotrain.spec.axes import MeshPlan
from colotrain.spec.objectives import EmbedPlan
from colotrain.spec.plan import DataPlan, FreezePlan, ModelPlan, OptimPlan, Recompute, TrainPlan
from colotrain.spec.sequence import BlockSequence
from colotrain.spec.survey import AxisChecks, LossStudy, Survey, Trace, Ungrouped

T = TypeVar("T")
WITHOUT_VALUES = frozenset({"survey", "trace_micro_batch", "ungrouped", "sequence"})
"""Functions that build a model without values, or run it without them."""
ShowPreparation = Callable[[], AbstractContextManager[Progress]]


@dataclass(frozen=True, slots=True)
class ModelSurveys:
    """Examines what a configuration names: its model, a micro-batch, its data, its schedule.

    All of this needs torch or the user's code, so it runs in a process forked from the fork server;
    in this process where there is no server. Results are cached by content.
    """

    caller: ForkedCaller
    show_preparation: ShowPreparation
    """Shows the progress of tokenizing data that has to be counted."""
    counted: dict[str, int] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)
    """Why a micro-batch could not be traced."""

    def survey(self, model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
        """Return the model's parameters, groups and abilities; raise `ColotrainError` if broken."""
        about = freeze, seq_len
        return self._cached(Survey, about, "survey", model, freeze, seq_len, data=None)

    def trace(
        self,
        model: ModelPlan,
        freeze: FreezePlan,
        data: DataPlan,
        *,
        precision: str,
        checkpointing: Recompute,
        device: str,
        micro_batch: int,
        mesh: MeshPlan,
    ) -> Trace | None:
        """Trace one micro-batch of `micro_batch` samples; None if the model cannot be traced."""
        how = precision, checkpointing, device, micro_batch, mesh

        def compute() -> tuple[TraceResult, Dependencies | None]:
            result, dependencies = self._call("trace_micro_batch", model, freeze, data, *how)
            if isinstance(result, str):
                return TraceResult(trace=None, obstacle=result), dependencies
            return TraceResult(trace=result, obstacle=""), dependencies

        about = freeze, data.of_samples(), data.packing
        of_users = _runs_users_code(model, data)
        result = cached(TraceResult, model, (*about, *how), compute, runs_users_code=of_users)
        self.obstacles.extend([result.obstacle] if result.obstacle else [])
        if result.trace is None or model.is_shipped:  # all of whose blocks are groups
            return result.trace
        left = self._cached(Ungrouped, about, "ungrouped", model, freeze, data, data=data)
        return replace(result.trace, ungrouped=left.blocks)

    def traces(
        self, model: ModelPlan, freeze: FreezePlan, data: DataPlan, train: TrainPlan, scale: Scale
    ) -> Traces:
        """Return a function that traces the model after all scheduled unfreezing, and caches."""
        exceptions = (*freeze.except_, *freeze.scheduled)
        at_most = replace(freeze, except_=exceptions, unfreeze={})

        @cache
        def traces(checkpointing: Recompute, micro_batch: int) -> Trace | None:
            return self.trace(
                model,
                at_most,
                data,
                precision=train.precision,
                checkpointing=checkpointing,
                device=scale.device,
                micro_batch=micro_batch,
                mesh=scale.mesh,
            )

        return traces

    def sequence(self, model: ModelPlan, data: DataPlan) -> BlockSequence:
        """Return the blocks of a model that stages may divide, or why there are none."""
        about = "sequence", data.of_samples(), data.packing
        return self._cached(BlockSequence, about, "sequence", model, data, data=data)

    def check_axes(self, model: ModelPlan) -> AxisChecks:
        """Compare what ranks that divide a model of transformers compute with one process.

        The answer is that of every directory with the same configuration.
        """
        changes_class = model.head is not None or isinstance(model.objective, EmbedPlan)
        objective = model.objective if changes_class else None
        bare = replace(model, adapter=None, quantize=None, loss=None, objective=objective)
        config = Path(str(model.hf), "config.json").read_bytes()
        of_type = replace(bare, hf=hashlib.sha256(config).hexdigest())
        compute = partial(self._call, "check_axes", bare)
        return cached(AxisChecks, of_type, (), compute, runs_users_code=False)

    def study_loss(self, model: ModelPlan, data: DataPlan, seed: int) -> LossStudy:
        """Return what forwards in one process find of the loss; nothing where they fail.

        The process is one of its own: a table with values that the user's code keeps there is of no
        use to forwards without values.
        """
        alone = replace(self, caller=ForkedCaller(script=self.caller.script))
        about = data.of_samples(), data.packing, seed
        try:
            return alone._cached(LossStudy, about, "study_loss", model, data, seed, data=data)
        except ConfigError:
            raise
        except ColotrainError:  # the process ended without an answer
            return LossStudy()

    def count(self, data: DataPlan, seed: int, split: Split = "train") -> int:
        """Return the number of a split's samples; untokenized data is tokenized, with progress."""
        key = repr((data, seed, split))
        if key not in self.counted:
            if data.source != "target":
                with self.show_preparation() as progress:
                    prepare_all(data, progress=progress)
            self.counted[key], _ = self._call("count_samples", data, seed, split)
        return self.counted[key]

    def count_validation(self, data: DataPlan, seed: int, *, prepare: bool) -> int | None:
        """Return the number of validation samples; None if data has to be prepared and may not."""
        if data.source != "target" and not prepare and not is_prepared(data):
            return None
        return self.count(data, seed, "validation")

    def check_schedule(self, dotted: str, total: int) -> str | None:
        """Return what is wrong with a learning-rate schedule of the user's, or None."""
        found: str | None = self._call("check_schedule", dotted, total)[0]
        return found

    def check_optimizer(self, optim: OptimPlan, *, with_none: bool) -> str | None:
        """Return why an optimizer of the user's is not the same on pipeline stages, or None."""
        found: str | None = self._call("check_optimizer", optim, with_none)[0]
        return found

    def check_functions(self, data: DataPlan, named: dict[str, str], seed: int) -> None:
        """Raise `ConfigError` where one of the user's functions cannot be used."""
        self._call("check_functions", data, named, seed)

    def wrong_names(self, named: dict[str, str]) -> list[Problem]:
        """Return what cannot be imported of the user's code, which is `named` by setting."""
        found: list[Problem] = self._call("wrong_names", named)[0]
        return found

    def _cached(
        self,
        answer: type[T],
        about: tuple[Any, ...],
        function: str,
        model: ModelPlan,
        *args: Any,
        data: DataPlan | None,
    ) -> T:
        """Return the answer of a function of `model`, or an earlier one to the same `about`."""
        of_users = _runs_users_code(model, data)
        compute = partial(self._call, function, model, *args)
        return cached(answer, model, about, compute, runs_users_code=of_users)

    def _call(self, function: str, *args: Any) -> Any:
        record = record_trial if function in WITHOUT_VALUES else record_dependencies
        if is_warm() and SURVEY not in sys.modules:
            with suppress(NotForked):
                caller = f"{record.__module__}:{record.__name__}"
                return self.caller(caller, f"{SURVEY}:{function}", *args)
        with stdout_to_stderr():
            if "torch" not in sys.modules:
                import_quickly(SURVEY)
                postpone_compiler()
            return record(f"{SURVEY}:{function}", *args)


def _runs_users_code(model: ModelPlan, data: DataPlan | None) -> bool:
    """Whether a trial of `model`, with a sample of `data`, runs code or reads files of the user's.

    Samples that colotrain makes of files have shapes that its settings alone say.
    """
    return not model.is_shipped or (data is not None and data.source == "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """Result of tracing a micro-batch, in a record that can be cached; None if it failed."""

    trace: Trace | None
    obstacle: str
    """Why there is no trace."""
