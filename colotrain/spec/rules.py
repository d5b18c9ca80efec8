"""What excludes what: settings that another setting limits to some values.

Checked once, for all settings together, and printed in docs/configuration.md. A limit that needs
the model, the machine or arithmetic is checked where these are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from colotrain.errors import Problem
from colotrain.spec.objectives import PAIRS as PAIR_OBJECTIVES


@dataclass(frozen=True, slots=True)
class Rule:
    """Under the setting `when`, `key` must have one of the values `allowed`."""

    when: str
    """Conditions joined by `and`: `KEY=VALUE`, `KEY=ONE,OTHER`, `KEY>1`, or `KEY` for what is not
    null or empty."""
    key: str
    allowed: tuple[Any, ...]
    why: str = ""
    """The reason, as a clause."""
    fix: str = ""
    """What to do; by default, to set the key to an allowed value."""

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether all conditions are met by `values`, from dotted key to value."""
        return all(_is_met(condition, values) for condition in self.when.split(" and "))

    def problem(self, values: Mapping[str, Any]) -> Problem:
        """Return the problem of settings against this rule."""
        several = r"([\w.]+)(?:>1|=[^ ,]+,[^ ]+)"
        condition = re.sub(several, lambda at: f"{at[1]}={values[at[1]]}", self.when)
        return Problem(
            key=self.key,
            value=values[self.key],
            expected=f"{self.choices} with {condition}" + (f": {self.why}" if self.why else ""),
            fix=self.fix or f"set {self.key}={self.choices}",
        )

    @property
    def choices(self) -> str:
        """The allowed values, as in `stop or skip`."""
        several = len(self.allowed) > 2
        return "one of " * several + (", " if several else " or ").join(map(text, self.allowed))


def _is_met(condition: str, values: Mapping[str, Any]) -> bool:
    if condition.endswith(">1"):
        value = values.get(condition.removesuffix(">1"))
        return isinstance(value, int) and value > 1
    key, equals, wanted = condition.partition("=")
    return text(values.get(key)) in wanted.split(",") if equals else bool(values.get(key))


def rules(when: str, allowed: Mapping[str, Any], why: str = "", fix: str = "") -> tuple[Rule, ...]:
    """Return one rule for each key of `allowed`, which has the key's only value."""
    return tuple(Rule(when, key, (value,), why, fix) for key, value in allowed.items())


DPO, MASKED, DISTILL = (f"train.objective={name}" for name in ("dpo", "masked", "distill"))
KTO, EMBED = (f"train.objective={name}" for name in ("kto", "embed"))
CLASSIFY = "train.objective=classify,classify_tokens"
PAIRS = f"train.objective={','.join(PAIR_OBJECTIVES)}"
OWN = {"train.loss": None, "train.metrics": None}
"""Functions of the user's, which get a model's outputs as they are."""
OF_FILES: dict[str, Any] = {
    "data.format": "auto",
    "data.columns": {},
    "data.chat_template": None,
    "data.loss_on": "answers",
    "data.packing": "auto",
    "data.on_bad": "stop",
    "data.workers": "auto",
}
"""Settings that say how samples are made of files."""
PROMPTS = "observe.samples.prompts"
INTERLEAVED = "set mesh.pp_schedule=interleaved"

RULES: tuple[Rule, ...] = (
    Rule("model.hf", "model.target", (None,), "the directory is a model already"),
    Rule("model.hf", "model.deferred_init", (False,), "weights are read after sharding"),
    Rule(
        "model.quantize",
        "adapter.name",
        ("lora", "dora"),
        "packed weights do not train",
    ),
    Rule(
        "model.quantize",
        "model.target",
        (None, "colotrain.models.llm:LLM"),
        "weights are packed as they are read",
        "give the model's directory as model.hf",
    ),
    *rules("model.quantize", {"train.compile": False}),
    *rules(PAIRS, OWN, "the objective has its own"),
    Rule(PAIRS, "train.on_nonfinite", ("stop", "skip")),
    Rule(PAIRS, "data.target", (None,), "pairs come from files (data.path)"),
    Rule(PAIRS, "data.corpus", (None,), "a corpus has no preference pairs"),
    Rule(PAIRS, "data.packing", ("auto", "none"), "each pair is a sample"),
    Rule(PAIRS, "data.isolate", (False,), "each pair is a sample"),
    Rule(PAIRS, "data.loss_on", ("answers", "last"), "prompts have no part in the loss"),
    Rule(
        DPO,
        "checkpoint.resume",
        ("auto", "none"),
        "the reference is the model as the run begins",
        "export that checkpoint (`colotrain export`), and name the directory in model.hf",
    ),
    *rules(CLASSIFY, OWN, "the objective has its own"),
    Rule(CLASSIFY, "data.target", (None,), "labelled texts come from files (data.path)"),
    Rule(CLASSIFY, "data.corpus", (None,), "a corpus has no labels"),
    Rule(CLASSIFY, "data.packing", ("auto", "none"), "each text is a sample"),
    Rule(CLASSIFY, "data.isolate", (False,), "each text is a sample"),
    Rule(MASKED, "data.target", (None,), "tokens of files are hidden (data.path)"),
    Rule(MASKED, "data.isolate", (False,)),
    Rule(DISTILL, "train.loss", (None,), "the objective is the loss"),
    Rule(DISTILL, "data.target", (None,), "the teacher reads files (data.path)"),
    *rules(KTO, OWN, "the objective has its own"),
    Rule(KTO, "train.on_nonfinite", ("stop", "skip")),
    Rule(KTO, "train.compile", (False,), "a pass without gradients comes before each step"),
    Rule(KTO, "data.target", (None,), "answers with labels come from files (data.path)"),
    Rule(KTO, "data.corpus", (None,), "a corpus has no answers with labels"),
    Rule(KTO, "data.packing", ("auto", "none"), "each answer is a sample"),
    Rule(KTO, "data.isolate", (False,), "each answer is a sample"),
    Rule(KTO, "data.loss_on", ("answers", "last"), "prompts have no part in the loss"),
    Rule(
        KTO,
        "checkpoint.resume",
        ("auto", "none"),
        "the reference is the model as the run begins",
        "export that checkpoint (`colotrain export`), and name the directory in model.hf",
    ),
    Rule(
        "mesh.tp>1 and train.objective=reward,classify,classify_tokens,embed",
        "mesh.sequence_parallel",
        (False,),
        "tokens are divided where the vocabulary of the output is",
    ),
    *rules(EMBED, OWN, "the objective has its own"),
    Rule(EMBED, "model.target", (None,), "", "name a directory of an encoder or decoder: model.hf"),
    Rule(EMBED, "train.compile", (False,), "dropout must drop the same with and without gradients"),
    Rule(EMBED, "data.target", (None,), "texts come from files (data.path)"),
    Rule(EMBED, "data.corpus", (None,), "a corpus has no texts that belong together"),
    Rule(EMBED, "data.packing", ("auto", "none"), "each text is a row"),
    Rule(EMBED, "data.isolate", (False,), "each text is a row"),
    Rule(EMBED, PROMPTS, ([],), "a model of embeddings continues no text"),
    Rule(
        f"{EMBED} and mesh.pp>1",
        "mesh.pp_schedule",
        ("1f1b",),
        "chunks run in another order in the pass before a step, where dropout must drop the same",
    ),
    Rule("data.images", "model.target", (None,), "", "name an image-text directory: model.hf"),
    Rule("data.images", "data.target", (None,), "images are those of files (data.path)"),
    Rule("data.images", "data.corpus", (None,), "a corpus has no images"),
    Rule("data.images", "data.mixture", ([],), "", "give one set of files (data.path)"),
    Rule("data.images", "data.packing", ("auto", "none"), "each conversation is a sample"),
    Rule("data.images", "data.isolate", (False,), "each conversation is a sample"),
    Rule("data.images", "train.objective", (None,), "", "train on answers alone"),
    Rule("data.images", "train.compile", (False,), "images differ in their shapes"),
    Rule("data.images", "model.tokens", ([],), "the processor has the directory's own tokens"),
    Rule("data.images", PROMPTS, ([],), "prompts have no images"),
    *rules("data.images", OWN, "the loss is that of answers"),
    Rule(
        "data.images and mesh.pp>1",
        "mesh.pp_schedule",
        ("1f1b",),
        "stages of several chunks were not the same as one process",
    ),
    Rule("adapter.name=dora", "adapter.parameters", ([],), "PEFT's DoRA is of linear layers"),
    Rule(
        "adapter.parameters",
        "adapter.dropout",
        (None, 0),
        "no input of theirs can be dropped",
        "set adapter.dropout=0",
    ),
    Rule("adapter.init", "adapter.name", ("lora",), "magnitudes are those of whole weights"),
    Rule("adapter.init", "adapter.parameters", ([],), "a part is taken out of linear layers alone"),
    Rule("adapter.init", "model.quantize", (None,), "blocks hold whole weights"),
    Rule("adapter.merge", "model.quantize", (None,), "blocks hold the weights of the directory"),
    Rule("adapter.parameters", "train.compile", (False,), "sums take the parameters' places"),
    Rule(
        "mesh.pp>1 and mesh.tp>1 and mesh.sequence_parallel=true",
        "mesh.pp_schedule",
        ("1f1b",),
        "the first layer divides the tokens, and is not called where another chunk runs",
    ),
    Rule("mesh.pp=1", "mesh.pp_split", ([],), fix="set mesh.pp"),
    Rule("mesh.pp_schedule=1f1b", "mesh.pp_chunks", (None, 1), "", INTERLEAVED),
    Rule(
        "optim.name=schedule_free_adamw",
        "optim.schedule.name",
        ("constant",),
        "the mean over all steps does what a falling rate does (a warm-up is of use)",
    ),
    Rule("optim.name=adamw8bit", "mesh.tp", (1,), "a scale is that of a block within a whole row"),
    Rule(
        "optim.rounding=stochastic,kahan",
        "optim.name",
        ("adamw",),
        "the others round to the nearest number",
    ),
    Rule("mesh.tp>1", "optim.rounding", ("nearest",), "random bits follow the rows of a parameter"),
    Rule(
        "mesh.ep>1 and optim.name=adamw8bit",
        "adapter.parameters",
        ([],),
        "a scale is that of a block within a whole row, of which ranks have columns",
    ),
    Rule(
        "mesh.ep>1 and optim.rounding=stochastic,kahan",
        "adapter.parameters",
        ([],),
        "random bits follow the rows of a parameter, of which ranks have columns",
    ),
    Rule("data.target", PROMPTS, ([],), "its tokenizer is not known"),
    *rules("data.target", OF_FILES, "a dataset of your own makes its samples itself", "remove it"),
    Rule("train.eval_every=0", "train.stop_early.metric", (None,), fix="raise train.eval_every"),
    Rule("train.eval_every=null", "train.stop_early.metric", (None,), fix="set train.eval_every"),
    Rule("checkpoint.every=0", "checkpoint.best.metric", (None,), fix="raise checkpoint.every"),
    *rules(
        "train.eval_steps=0",
        {"checkpoint.best.metric": None, "train.stop_early.metric": None},
        fix="raise train.eval_steps",
    ),
)


def text(value: Any) -> str:
    """Return a value as it is written in an argument: `null`, `false`, `[]`, `auto`."""
    return value if isinstance(value, str) else json.dumps(value)


def check_rules(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of settings, from dotted key to value, against all `RULES`."""
    for rule in RULES:
        if rule.applies(values) and values[rule.key] not in rule.allowed:
            yield rule.problem(values)
