"""Write the tables of docs/models.md: `scripts/verified_models.py [--axes] [ARCHITECTURE…]`.

Each family is a tiny directory with random weights that transformers makes. It is trained under
every plugin on two ranks, and with mesh axes on four, compared with plain transformers in one
process, exported, and loaded again. With architectures only their rows are written anew, and with
--axes only the columns of mesh axes.

`scripts/verified_models.py --types [TYPE…]` writes the table of types instead: what a plan finds of
`mesh.tp` and `mesh.cp` for each causal or masked type of transformers, in the sizes that it gives
the type.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from colotrain.errors import ConfigError  # noqa: E402
from colotrain.models.huggingface_task import MASKED  # noqa: E402
from colotrain.spec.plan import RunPlan  # noqa: E402
from tests.architectures import Architecture, architectures  # noqa: E402
from tests.dist import plain  # noqa: E402
from tests.families import FAMILIES, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- Below: made by scripts/verified_models.py; do not edit. -->\n"
HEADER = (
    "| model | architecture | task | plugins | largest gradient difference | export "
    "| tp 2 | cp 2 | tp 2, cp 2 |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
TYPES = "<!-- Types: made by scripts/verified_models.py --types; do not edit. -->\n"
END_OF_TYPES = "<!-- End of types. -->\n"
AXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("mesh.tp=2",): ("zero1", "zero3", "gemini"),
    ("mesh.cp=2",): ("zero3",),
    ("mesh.tp=2", "mesh.cp=2"): ("zero3",),
}
"""Plugins with which each product of axes is trained on four ranks."""
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"moe_layer_freq": 1, "n_routed_experts": 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "seed_oss": {"attention_dropout": 0.0},
}
"""Settings that a type's defaults lack, or that every published model of it has."""
TASKS = {
    "causal": "causal",
    "masked": "masked",
    "classes": "sequence classification",
    "token_classes": "token classification",
    "pairs": "sequence to sequence",
    "images": "image classification",
}


def row(family: Family) -> str:
    """The first columns of a row, from a verification."""
    with tempfile.TemporaryDirectory() as name:
        folder, cases = family.make(Path(name, "made")), Path(name, "cases")
        results = plain.compare(family, folder, cases)
        passed = [result.plugin for result in results if result.passed]
        for result in results:
            if not result.passed:
                print(f"{family.architecture}: {result.plugin}: {result.difference}")
        differences = list(plain.export_differences(family, folder, cases))
    largest = max(result.max_abs_gradient for result in results)
    what = TASKS[family.data] + (
        ", auxiliary loss" if "output_router_logits" in family.args else ""
    )
    exported = "same logits" if max(differences) <= 1e-5 else f"logits differ: {max(differences)}"
    plugins = "all five" if len(passed) == len(results) else ", ".join(passed) or "none"
    words = family.name, f"`{family.architecture}`", what, plugins, f"{largest:.0e}", exported
    return f"| {' | '.join(words)} |\n"


def with_axes(family: Family) -> list[str]:
    """For each combination of axes "same", or why it is refused."""
    cells: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, cases = family.make(Path(name, "made")), Path(name, "cases")
        plans: list[tuple[tuple[str, ...], RunPlan]] = []
        for axes, plugins in AXES.items():
            ranks = "cluster.procs_per_node=4"
            try:
                of_axes = [plain.plan_of(family, folder, p, ranks, *axes) for p in plugins]
                plans += [(axes, plan) for plan in of_axes]
            except ConfigError as error:
                cells[axes] = f"refused: {reason(error)}"
        results = plain.compare(family, folder, cases, [p for _, p in plans]) if plans else []
        for (axes, plan), result in zip(plans, results, strict=True):
            cells.setdefault(axes, "same")
            if not result.passed:
                print(f"{family.architecture}: {axes} {plan.plugin.name}: {result.difference}")
                cells[axes] = "differs"
    return [cells[axes] for axes in AXES]


def reason(error: ConfigError) -> str:
    """The reason in parentheses of the first problem, or that it is no decoder."""
    _, _, rest = error.problems[0].expected.partition("(")
    return rest.removesuffix(")") or "not a decoder"


def write(family: Family, *, only_axes: bool) -> None:
    """Put a row in its place in the table, which keeps the others."""
    text, _, table = PAGE.read_text("utf-8").partition(MARK)
    known = {tuple(row.split(" | ")[:2]): f"{row}\n" for row in table.splitlines()}
    cells = known[key_of(family)] if only_axes else row(family)
    first = [cell.strip() for cell in cells.strip().strip("|").split("|")][:6]
    known[key_of(family)] = f"| {' | '.join((*first, *with_axes(family)))} |\n"
    rows = "".join(known.get(key_of(each), "") for each in FAMILIES)
    PAGE.write_text(f"{text}{MARK}\n{HEADER}{rows}", "utf-8")


def of_type(architecture: Architecture) -> str:
    """What a plan finds of both axes, for a model of the sizes that transformers gives the type."""
    import transformers
    from torch import device

    from colotrain.models.facts import facts_of
    from colotrain.models.huggingface import let_predict_next_
    from colotrain.models.huggingface_check import why_matrices_differ, why_sequences_differ
    from colotrain.planner.traced.survey import let_divide_

    predicts = architecture.task.predicts_next
    equip = let_predict_next_ if predicts else let_divide_
    try:
        config = transformers.AutoConfig.for_model(
            architecture.kind, **SETTINGS.get(architecture.kind, {})
        )
        with device("meta"):
            model: Any = getattr(transformers, architecture.name)._from_config(config)
        equip(model)
        tp = "transformers has no plan for it"
        if hasattr(model, "divisions"):
            how = model.divisions()
            sizes = ", ".join(f"{name}={size}" for name, size in how.sizes.items())
            alone = "" if how.possible()[1:] else f"no number of ranks divides {sizes}"
            tp = how.against or alone or why_matrices_differ(model, equip, predicts_next=predicts)
        cp = facts_of(model).whole_sequences
        cp = cp or why_sequences_differ(model, equip, predicts_next=predicts)
    except Exception as error:  # a configuration that needs more settings than its defaults
        tp = cp = f"its default sizes make no model ({type(error).__name__})"
    cells = (f"refused: {why}".replace("|", "/") if why else "same" for why in (tp, cp))
    task = "causal" if predicts else "masked"
    return f"| `{architecture.kind}` | {task} | {' | '.join(cells)} |\n"


def write_types(named: list[str]) -> None:
    """Write the rows of types anew, all of them or the named ones, each when it is found."""
    import transformers

    from colotrain.models.huggingface_internals import let_experts_compute_anywhere_

    let_experts_compute_anywhere_()
    version = f"transformers {transformers.__version__}:"
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    of_text = (a for a in architectures() if a.kind in causal or a.task is MASKED)
    types = {a.kind: a for a in of_text}
    for kind in named or types:
        row = of_type(types[kind])
        before, _, rest = PAGE.read_text("utf-8").partition(TYPES)
        table, _, after = rest.partition(END_OF_TYPES)
        is_of_version = version in table  # rows of another one are left out
        rows = {line.split("`")[1]: line for line in table.splitlines() if line[:3] == "| `"}
        rows = {**(rows if is_of_version else {}), kind: row.strip()}
        lines = [version, "", "| type | task | tp | cp |", "| --- | --- | --- | --- |"]
        text = "\n".join(lines + [rows[each] for each in types if each in rows])
        PAGE.write_text(f"{before}{TYPES}\n{text}\n\n{END_OF_TYPES}{after}", "utf-8")


def key_of(family: Family) -> tuple[str, str]:
    return f"| {family.name}", f"`{family.architecture}`"


def main() -> None:
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--types" in sys.argv:
        write_types(named)
        return
    for family in FAMILIES:
        if not named or family.architecture in named:
            write(family, only_axes="--axes" in sys.argv)


if __name__ == "__main__":
    main()
