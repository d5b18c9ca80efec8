"""Batch arithmetic: global batch = micro-batch × accumulation × world size, any one left out.

Where several ranks work on the same samples, each such group counts as one rank here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from colotrain.errors import ConfigError, Problem
from colotrain.spec.axes import MeshPlan
from colotrain.spec.plan import BatchPlan, DataPlan, RunPlan


def tokens_per_count(data: DataPlan) -> int:
    """Tokens that a model trains on for one that is counted; a preference pair has two answers.

    0: not known, because samples of the user's own dataset are counted.
    """
    if data.source == "target":
        return 0
    return data.num_trained_rows * data.seq_len if data.counts_samples else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The four sizes; None where the user left one out."""

    global_batch: int | None
    micro_batch: int | None
    accumulation_steps: int | None
    procs_per_node: int | None
    nodes: int = 1
    mesh: MeshPlan = field(default_factory=MeshPlan)
    """Ranks that work on the same samples. A node need not hold all stages of such a group."""
    default_procs: int
    """Ranks per node, as far as the other sizes allow it."""
    most_procs: int
    """Upper limit on ranks per node, unless `procs_per_node` asks for more."""

    def readers(self, procs_per_node: int) -> int:
        """Return the number of groups that work on the same samples."""
        return self.nodes * procs_per_node // self.mesh.together

    @property
    def unit(self) -> int:
        """What the number of ranks of a node must be a multiple of."""
        return self.mesh.unit(self.nodes)

    @property
    def ranks(self) -> str:
        """What messages call the number of readers."""
        together, axes = self.mesh.together, self.mesh.above_one
        which = self.mesh.named if len(axes) == 1 else together
        return "world size" if together == 1 else f"number of groups of {which} ranks"


def solve(sizes: Sizes) -> BatchPlan | Problem:
    """Compute the sizes that were left out, or the problem that makes them impossible.

    Accumulation is 1 where it was left out with another size. Where the number of ranks was left
    out with another size, it is the largest, up to the default, that divides the global batch.
    """
    g, m, a = sizes.global_batch, sizes.micro_batch, sizes.accumulation_steps
    if sizes.procs_per_node is not None:
        return _solve_at(sizes, sizes.readers(sizes.procs_per_node))
    if g is not None and m is not None and a is not None:
        return _solve_world(sizes, g, m, a)
    largest = max(1, sizes.default_procs // sizes.unit) * sizes.unit
    tried = [_solve_at(sizes, sizes.readers(n)) for n in range(largest, 0, -sizes.unit)]
    return next((found for found in tried if isinstance(found, BatchPlan)), tried[0])


def _solve_at(sizes: Sizes, w: int) -> BatchPlan | Problem:
    g, m, a = sizes.global_batch, sizes.micro_batch, sizes.accumulation_steps
    if g is not None and m is not None and a is not None:
        return _compare(g, m, a, w, sizes.ranks)
    if g is not None and m is not None:
        if g % (m * w):
            return _indivisible(g, {"micro_batch": m, sizes.ranks: w})
        return _batch(g, m, g // (m * w), w)
    a = a or 1
    if g is not None:
        if g % (a * w):
            return _indivisible(g, {"accumulation": a, sizes.ranks: w})
        return _batch(g, g // (a * w), a, w)
    if m is not None:
        return _batch(m * a * w, m, a, w)
    fix = "for example train.micro_batch=8"
    return Problem(key="train.micro_batch", expected="a size (or train.global_batch)", fix=fix)


def _solve_world(sizes: Sizes, g: int, m: int, a: int) -> BatchPlan | Problem:
    if g % (m * a):
        return _indivisible(g, {"micro_batch": m, "accumulation": a})
    world = g // (m * a)
    factors = f"global_batch {g} / (micro_batch {m} × accumulation {a})"
    procs, rest = divmod(world * sizes.mesh.together, sizes.nodes)
    if rest or procs % sizes.unit:
        expected = f"a {sizes.ranks} that {sizes.nodes} nodes share evenly, not {world} = {factors}"
        fix = "change one of these, or cluster.nodes"
        return Problem(key="train.global_batch", value=g, expected=expected, fix=fix)
    if procs > sizes.most_procs:
        most = sizes.readers(sizes.most_procs)
        expected = f"a {sizes.ranks} of at most {most} here, not {world} = {factors}"
        fix = "leave accumulate.steps out, or set cluster.procs_per_node"
        return Problem(key="train.global_batch", value=g, expected=expected, fix=fix)
    return _batch(g, m, a, world)


def _batch(g: int, m: int, a: int, w: int) -> BatchPlan:
    return BatchPlan(global_batch=g, micro_batch=m, accumulation_steps=a, data_parallel=w)


def _compare(g: int, m: int, a: int, w: int, ranks: str) -> BatchPlan | Problem:
    product = m * a * w
    if g == product:
        return _batch(g, m, a, w)
    expected = f"{product} = micro_batch {m} × accumulation {a} × {ranks} {w}"
    fix = f"set train.global_batch={product}, or leave one of the four out"
    return Problem(key="train.global_batch", value=g, expected=expected, fix=fix)


def _indivisible(g: int, factors: dict[str, int]) -> Problem:
    """Problem that names the nearest global batches that are multiples of `factors`."""
    unit, shown = 1, " × ".join(f"{name} {size}" for name, size in factors.items())
    for size in factors.values():
        unit *= size
    below, above = g // unit * unit, (g // unit + 1) * unit
    near = f"{below} or train.global_batch={above}" if below else str(above)
    expected = f"a multiple of {unit} = {shown}"
    fix = f"set train.global_batch={near}"
    return Problem(key="train.global_batch", value=g, expected=expected, fix=fix)


def too_few(samples: int, global_batch: int) -> Problem:
    """Problem of a dataset smaller than one global batch while incomplete batches are dropped."""
    expected = f"at most {samples}, the training samples, under train.last_batch=drop"
    fix = "lower it, or set train.last_batch=fill"
    return Problem(key="train.global_batch", value=global_batch, expected=expected, fix=fix)


def endless_evaluation() -> Problem:
    """The problem of evaluating all samples of a stream."""
    expected = "a number: the length of a stream is not known"
    return Problem(key="train.eval_steps", value="all", expected=expected, fix="for example 8")


def no_best(key: str, metric: str, data: DataPlan) -> Problem:
    """The problem of a run that never evaluates, while the setting `key` depends on a metric."""
    fraction = f"data.validation_fraction={data.validation_fraction:g}"
    expected = f"null: there are no validation samples ({fraction}, or validation files are empty)"
    section = key.removesuffix(".metric")
    fix = (
        "give more validation data (docs/data.md), raise data.validation_fraction where no file is "
        f"validation data, or remove {section}"
    )
    if data.validation_paths:
        names = ", ".join(data.validation_paths)
        expected = f"null: the files of data.validation_path have no sample ({names})"
        fix = f"give others, or remove {section}"
    if data.source == "target":
        expected = "null: the dataset of data.target has no validation samples"
        fix = (
            "return some where its parameter `split` is validation (without that parameter, a "
            "dataset that is no stream is split by data.validation_fraction), or remove "
            f"{section}"
        )
    return Problem(key=key, value=metric, expected=expected, fix=fix)


def refuse_rules_of_metrics(plan: RunPlan) -> None:
    """Raise `ConfigError` if a setting depends on evaluations, for which there are no samples."""
    rules = {"checkpoint.best.metric": plan.checkpoint.best_metric}
    if plan.train.stop_early is not None:
        rules["train.stop_early.metric"] = plan.train.stop_early.metric
    problems = [no_best(key, metric, plan.data) for key, metric in rules.items() if metric]
    if problems:
        raise ConfigError(problems)


def is_due(step: int, every: float) -> bool:
    """Whether `step` is the first to complete another `every` steps, which may be a fraction."""
    if every <= 0:
        return False
    before, after = ((s / every + 1e-9) // 1 for s in (step - 1, step))
    return after > before
