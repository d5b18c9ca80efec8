"""The teacher of a distillation, and checks of it beside the model that learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from colotrain.config.schema import Config
from colotrain.data.prepare import vocabulary
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.planner.gpu_margin import gpu_margin_bytes, workspace_bytes
from colotrain.planner.layout import Layout
from colotrain.planner.memory import Estimate, around
from colotrain.planner.model_states import model_state_bytes
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.scale import Scale
from colotrain.records import same_fields
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.objectives import Distill, DistillPlan
from colotrain.spec.plan import BatchPlan, DataPlan, FreezePlan, ModelPlan, TrainPlan
from colotrain.spec.survey import Survey, Trace
from colotrain.spec.teacher import kept_bytes, teacher_of

TEACHER = "train.distill.teacher"


def distill_plan(distill: Distill, problems: list[Problem]) -> DistillPlan | None:
    """The resolved `train.distill`; None without a teacher."""
    if distill.teacher is None:
        fix = "name a Hugging Face directory"
        expected = "a teacher under train.objective=distill"
        problems.append(Problem(key=TEACHER, expected=expected, fix=fix))
        return None
    teacher = str(Path(distill.teacher).expanduser().absolute())
    return DistillPlan(**same_fields(distill, Distill) | {"teacher": teacher})


def check_distillation(
    settings: Config,
    model: ModelPlan,
    student: Survey,
    surveys: ModelSurveys,
) -> Iterator[Problem]:
    """Problems of a teacher that cannot teach the model."""
    plan, data = model.objective, settings.data
    if not isinstance(plan, DistillPlan):
        return
    causal = "a causal model whose loss is computed chunk by chunk (docs/models.md)"
    if not student.chunks_loss:
        fix = "set train.objective=null"
        yield Problem(key=model.key, value=model.value, expected=causal, fix=fix)
    if student.vocab_size is not None and plan.top_k > student.vocab_size:
        expected = f"at most {student.vocab_size}, the size of the vocabulary"
        yield Problem(key="train.distill.top_k", value=plan.top_k, expected=expected)
    try:
        teacher = surveys.survey(ModelPlan(target="", hf=plan.teacher), FreezePlan(), data.seq_len)
    except ConfigError as error:
        for found in error.problems:
            yield Problem(key=TEACHER, value=plan.teacher, expected=found.expected, fix=found.fix)
        return
    except ColotrainError as error:
        yield Problem(key=TEACHER, value=plan.teacher, expected=error.problem, fix=error.fix)
        return
    for wrong, expected in (
        (not teacher.chunks_loss, causal),
        (bool(teacher.missing), f"all of its weights (they lack {', '.join(teacher.missing[:3])})"),
        (
            teacher.vocab_size != student.vocab_size,
            f"a vocabulary of {student.vocab_size} tokens, that of the model "
            f"(it has {teacher.vocab_size})",
        ),
        (
            not _same_tokens(plan.teacher, data.tokenizer),
            f"the tokens of data.tokenizer={data.tokenizer} (its tokenizer.json has others)",
        ),
        (data.isolate and not teacher.isolates, "a model that takes document_ids (data.isolate)"),
        (
            teacher.num_positions is not None and data.seq_len > teacher.num_positions,
            f"a model of at least data.seq_len={data.seq_len} positions",
        ),
    ):
        if wrong:
            yield Problem(key=TEACHER, value=plan.teacher, expected=expected)


def pass_before(
    model: ModelPlan,
    student: Survey,
    data: DataPlan,
    train: TrainPlan,
    scale: Scale,
    batch: BatchPlan,
    surveys: ModelSurveys,
) -> Callable[[Layout], Estimate] | None:
    """Function of a rank's memory in the pass before the first step; None: no model is added."""
    distill, teacher = model.objective, teacher_of(model, train.precision)
    if not isinstance(distill, DistillPlan) or teacher is None:
        return None
    surveyed = surveys.survey(teacher, FreezePlan(), data.seq_len)
    traces = surveys.traces(teacher, FreezePlan(patterns=("*",)), data, train, scale)

    def before(layout: Layout) -> Estimate:
        return memory_of_pass(
            layout,
            student,
            surveyed,
            traces("none", layout.micro_batch),
            distill=distill,
            num_samples=train.max_steps * batch.global_batch,
            seq_len=data.seq_len,
        )

    return before


def memory_of_pass(
    layout: Layout,
    student: Survey,
    teacher: Survey,
    trace: Trace | None,
    *,
    distill: DistillPlan,
    num_samples: int,
    seq_len: int,
) -> Estimate:
    """A rank's memory while it holds the teacher whole, beside its part of the student.

    `trace` is that of a micro-batch through the frozen teacher, `num_samples` those of the run. The
    optimizer has no state yet; rows are kept on the host. Only the weights are certain.
    """
    weights = sum(p.numel * p.itemsize for p in teacher.parameters)
    weights += model_state_bytes(layout, student).parameters
    ranks, on_gpu = layout.shard * layout.replicas, layout.device == "cuda"
    rows = kept_bytes(distill, num_samples=-(-num_samples // ranks), seq_len=seq_len)
    asked = {"activations": 0 if trace is None else _most_alive(trace), "buffers": rows}
    if on_gpu:
        asked["buffers"] = workspace_bytes(layout, handles=1)  # forward alone
    elif (files := _stored_bytes(distill)) > sum(asked.values()):  # while the weights are read
        asked = {"activations": 0, "buffers": files}
    breakdown = MemoryBreakdown(parameters=weights, baseline=layout.baseline, **asked)
    beside = gpu_margin_bytes(layout) if on_gpu else 0
    exact = weights + layout.baseline
    return Estimate(breakdown=breakdown, peak=around(breakdown.total, exact=exact, beside=beside))


def _stored_bytes(distill: DistillPlan) -> int:
    """Bytes of the teacher's files, which are mapped to memory while they are read."""
    return sum(path.stat().st_size for path in Path(distill.teacher).glob("*.safetensors"))


def _most_alive(trace: Trace) -> int:
    """Most bytes of a trace's storages that are alive at once."""
    now = most = trace.input_bytes
    for event in (event for segment in trace.segments for event in segment.events):
        now += trace.storages[event] if event >= 0 else -trace.storages[-1 - event]
        most = max(most, now)
    return most


def _same_tokens(teacher: str, tokenizer: str) -> bool:
    """Whether both have the same tokens, as far as it is known."""
    own, other = vocabulary.tokenizer_file(tokenizer), vocabulary.tokenizer_file(teacher)
    if own is None or other is None or not (own.is_file() and other.is_file()):
        return True
    return vocabulary.load(own).get_vocab() == vocabulary.load(other).get_vocab()
