"""Draws of random cases: settings, the model directories and the records that they need.

What a setting may be is read from the settings' own tables (plugins, axes, objectives, optimizers,
precisions, the schema's choices), so that a new one is drawn without a change here. What excludes
what is asked of `RULES`.
"""

from __future__ import annotations

import json
import math
import random
import string
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from colotrain.config.checks import SCHEDULES, values_of
from colotrain.config.schema import Config
from colotrain.spec.axes import Axis
from colotrain.spec.objectives import OBJECTIVES, objective_of
from colotrain.spec.optimizers import OPTIMIZERS
from colotrain.spec.plugins import ROWS
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.rules import RULES, Rule
from tests.embedders import write_modules
from tests.masked import LETTERS, NAMES, make_tokenizer

MOST_RANKS, STEPS, BLOCKS, RECORDS = 8, 2, 4, 200
ADAGRAD = "torch.optim:Adagrad"
RATES = {"sgd": 0.1, "lion": 1e-3, "muon": 2e-2, ADAGRAD: 0.1}
"""Learning rates of optimizers; others have 1e-2."""
ARGS = {ADAGRAD: {"initial_accumulator_value": 0.1}}
"""Arguments of optimizers. Adagrad's first update is else a sign, even of a gradient that decay has
cancelled to rounding, and hides a gradient of the wrong size."""
KEPT_REFUSED = 0.12
"""Share of the cases against a row of `RULES` that stay as they were drawn."""
Settings = dict[str, Any]
"""Dotted key → value."""

SIZES = {
    **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": BLOCKS},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.15},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3},
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class ModelKind:
    """A tiny directory of transformers: its type, its sizes and the class that makes it."""

    model_type: str
    sizes: Mapping[str, Any]
    made_by: str = "AutoModelForCausalLM"


GPT2 = {
    **{"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": BLOCKS, "n_head": 4},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.15},
    **{"bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 0},
}
MIXTURE = "mixture"
"""The model that has experts."""
DECODERS = {
    "llama": ModelKind("llama", {**GROUPED, "num_key_value_heads": 4}),
    "tied": ModelKind("llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ModelKind("qwen3", {**GROUPED, "num_key_value_heads": 4}),
    MIXTURE: ModelKind("qwen3_moe", {**GROUPED, **EXPERTS, "num_key_value_heads": 4}),
    "gpt2": ModelKind("gpt2", GPT2),
}
ENCODERS = {"bert": ModelKind("bert", {**SIZES, **NO_DROPOUT}, "AutoModelForMaskedLM")}
HUGGING_FACE = DECODERS | ENCODERS
IMPORTED = (
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *(
        f"transformers.models.{kind.model_type}.modeling_{kind.model_type}"
        for kind in HUGGING_FACE.values()
    ),
)
"""What models and workers would each import anew."""
LLM = "llm"
"""colotrain's own model, which has no directory."""
OWN_CODE = '''
"""A loss and a metric of the user's own."""

import torch.nn.functional as F


def loss(batch, outputs):
    if not hasattr(outputs, "logits"):
        return outputs
    labels = batch["labels"]
    each = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return each, (labels != -100).sum()


def metrics(batch, outputs):
    if not hasattr(outputs, "logits"):
        return {}
    right = outputs.logits.argmax(-1) == batch["labels"]
    return {"right": (right.sum(), (batch["labels"] != -100).sum())}
'''
OWN = "own_code_of_cases"


def choices(key: str) -> list[Any]:
    """What the schema lists for a key: a Literal's values, or true and false."""
    kind: Any = Config
    for name in key.split("."):
        kind = typing.get_type_hints(kind)[name]
    every = [kind, *typing.get_args(kind)]
    listed = [
        v for k in every if typing.get_origin(k) is typing.Literal for v in typing.get_args(k)
    ]
    found = [v for v in listed if v != "auto"] or [False, True]
    assert listed or bool in every, key
    return [*found, None] if type(None) in every else found


def axes() -> list[str]:
    """Axes of the mesh that have a setting."""
    known = {field.name for field in fields(typing.get_type_hints(Config)["mesh"])}
    return [axis for axis in Axis if axis in known]


def write_folder(folder: Path) -> dict[str, list[str]]:
    """Make all model directories, records and code of cases; return names of parameters."""
    import torch
    import transformers
    from tokenizers import Tokenizer, processors

    transformers.utils.logging.disable_progress_bar()
    names = {}
    for name, kind in HUGGING_FACE.items():
        made = folder / name
        vocabulary = make_tokenizer(made)
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(kind.model_type, **kind.sizes)
        model = getattr(transformers, kind.made_by).from_config(config)
        model.save_pretrained(made)
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        around = "[CLS] $A [SEP]" if name in ENCODERS else "$A [SEP]"
        special = [(text, vocabulary[text]) for text in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=special
        )
        roles = {f"{role}_token": text for role, text in NAMES["bert"].items()}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
        fast.save_pretrained(made)
        write_modules(made, "mean_tokens" if name in ENCODERS else "lasttoken")
        names[name] = [parameter for parameter, _ in model.named_parameters()]
    names[LLM] = _names_of_llm()
    for objective in (None, *OBJECTIVES):
        _write_records(folder / f"{objective}.jsonl", objective)
    (folder / f"{OWN}.py").write_text(OWN_CODE, "utf-8")
    return names


LLM_ARGS = {
    **{"vocab_size": 256, "d_model": 32, "num_layers": BLOCKS, "num_heads": 4},
    "d_hidden": 32,
}


def _names_of_llm() -> list[str]:
    import torch

    from colotrain.models.llm import LLM as Model

    with torch.device("meta"):
        return [name for name, _ in Model(**LLM_ARGS).named_parameters()]


def fields_of(objective: str | None) -> tuple[str, ...]:
    """Fields of the records of an objective."""
    known = objective_of(objective)
    if known.has_pairs:
        return ("prompt", "chosen", "rejected")
    if known.has_rated_answers:
        return ("prompt", "completion", "label")
    if known.relates_texts:
        return ("query", "positive")
    if known.labels_words:
        return ("tokens", "labels")
    if known.has_classes:
        return ("text", "label")
    return ("text",) if objective is None or known.hides_tokens else ("prompt", "completion")


def _write_records(path: Path, objective: str | None) -> None:
    draw = random.Random(f"records of {objective}")

    def text(field: str) -> str:
        longest = 40 if field == "text" else 14
        return "".join(draw.choices(LETTERS.strip(), k=draw.randint(2, longest)))

    def value(field: str, words: int) -> Any:
        if field == "label":
            return draw.random() < 0.5
        if field == "labels":
            return draw.choices("OBI", k=words)
        if field == "tokens":
            return ["".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(words)]
        return text(field)

    wanted = fields_of(objective)
    records = [
        {f: value(f, words) for f in wanted} for words in draw.choices(range(1, 6), k=RECORDS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


class Drawing:
    """The random choices of one case."""

    def __init__(self, seed: int | str, number: int, names: Mapping[str, list[str]]) -> None:
        self.random = random.Random(f"{seed} {number}")
        self.names = names
        self.settings: Settings = {}

    def case(self) -> Settings:
        """Draw settings; most of those that a row of `RULES` refuses are brought to obey it."""
        self._draw_settings()
        if self.random.random() >= KEPT_REFUSED:
            self._obey()
        self._give_experts()
        self._draw_names()
        return self.settings

    def _put(self, key: str, values: list[Any], share: float) -> Any:
        """Choose a value for a share of the cases."""
        chosen = self.random.choice(values) if self.random.random() < share else None
        if chosen is not None and chosen != DEFAULTS.get(key):
            self.settings[key] = chosen
        return chosen

    def _draw_settings(self) -> None:
        put = self._put
        put("train.objective", list(OBJECTIVES), 0.65)
        self.settings["model"] = self.random.choice(self._models())
        self.settings["plugin.name"] = self.random.choice(list(ROWS))
        self._draw_axes()
        self._give_experts()
        for key, share in (
            ("train.activation_checkpointing", 0.5),
            ("train.compile", 0.03),
            ("data.isolate", 0.3),
            ("data.packing", 0.3),
            ("data.loss_on", 0.2),
            ("adapter.name", 0.35),
            ("adapter.init", 0.1),
            ("model.quantize", 0.12),
            ("optim.rounding", 0.1),
            ("checkpoint.content", 0.2),
        ):
            put(key, choices(key), share)
        put("accumulate.steps", [2, 3, 4], 0.6)
        put("train.micro_batch", [2], 0.5)
        put("train.precision", [*PRECISIONS], 0.2)
        if self.settings["model"] != LLM:
            put("model.args.dtype", ["float64", "float64", "bfloat16"], 0.4)
        put("train.grad_clip", [0.1, 0.5], 0.5)
        put("optim.name", [*OPTIMIZERS, ADAGRAD], 0.7)
        put("optim.schedule.name", [*SCHEDULES], 0.3)
        put("optim.schedule.warmup_steps", [1], 0.3)
        put("train.loss", [f"{OWN}:loss"], 0.08)
        put("train.metrics", [f"{OWN}:metrics"], 0.08)
        put("plugin.reshard", [True, False], 0.15)
        if ROWS[self.settings["plugin.name"]].packed:
            put("plugin.chunk_size", ["16KiB"], 0.5)
        put("resume", [True], 0.25)
        self.settings["frozen"] = self.random.choice([0, 0, 1, 2, 3])

    def _give_experts(self) -> None:
        """Take the model with experts where ranks divide them, if the objective is for it."""
        if f"mesh.{Axis.EP}" in self.settings and MIXTURE in self._models():
            self.settings["model"] = MIXTURE

    def _draw_axes(self) -> None:
        """Draw sizes of axes, of a product that is mostly 2 or 4, and replicas beside them."""
        room = self.random.choice([1, 2, 2, 2, 4, 4, 4, MOST_RANKS])
        for axis in self.random.sample(axes(), len(axes())):
            size = self._put(f"mesh.{axis}", [n for n in (2, 4) if n <= room] or [1], 0.6)
            room //= size or 1
        if "mesh.tp" in self.settings:
            self._put("mesh.sequence_parallel", choices("mesh.sequence_parallel"), 0.6)
        if "mesh.pp" in self.settings:
            self._put("mesh.pp_schedule", choices("mesh.pp_schedule"), 0.8)
        self.settings["replicas"] = self.random.choice([n for n in (1, 1, 2, 3, 4) if n <= room])

    def _obey(self) -> None:
        """Take back one of the settings that a row names, until no row refuses the case."""
        while broken := list(broken_rows(self.settings)):
            rule = broken[0]
            drawn = [key for key in keys_of(rule) if key in self.settings]
            key = self.random.choice(drawn) if drawn else rule.key
            self.settings.pop(key, None)
            if not drawn:
                self.settings[key] = rule.allowed[0]
            if self.settings["model"] not in (models := self._models()):
                self.settings["model"] = self.random.choice(models)

    def _models(self) -> list[str]:
        """The models that the objective is for."""
        known = objective_of(self.settings.get("train.objective"))
        if known.hides_tokens:
            return [*ENCODERS]
        if known.has_classes or known.relates_texts:
            return [*HUGGING_FACE]
        return [*DECODERS] if known.has_head else [*DECODERS, LLM]

    def _draw_names(self) -> None:
        """Draw what names parameters of the model: what is frozen, and what has adapters."""
        names = self.names[self.settings["model"]]
        patterns = [self._glob(names) for _ in range(self.settings.pop("frozen"))]
        if patterns:
            self.settings["freeze.patterns"] = patterns
            if self.random.random() < 0.3:
                self.settings["freeze.unfreeze"] = {1: patterns[:1]}
            if self.random.random() < 0.2:
                self.settings["freeze.except"] = [self._glob(names)]
        if "adapter.name" in self.settings:
            layers = sorted({name.split(".")[-2] for name in names if "proj" in name})
            some = self.random.sample(layers, min(2, len(layers)))
            self.settings["adapter.targets"] = self.random.choice(
                ["all-linear", some or "all-linear"]
            )
            self.settings["adapter.rank"] = self.random.choice([2, 4])
            experts = [n for n in names if n.rpartition(".")[0].endswith("experts")]
            if experts and self.random.random() < 0.5:
                self.settings["adapter.parameters"] = [f"*{self.random.choice(experts)[-20:]}"]

    def _glob(self, names: list[str]) -> str:
        parts = self.random.choice(names).split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
        if numbers and self.random.random() < 0.5:
            return f"*{'.'.join(parts[numbers[0] - 1 : numbers[0] + 1])}.*"
        return "*" + ".".join(parts[-2:])


DEFAULTS: Settings = values_of(Config())


def keys_of(rule: Rule) -> list[str]:
    """The settings that a row is about."""
    conditions = rule.when.split(" and ")
    names = [condition.partition("=")[0].removesuffix(">1") for condition in conditions]
    return [*names, rule.key]


def broken_rows(settings: Settings) -> Iterator[Rule]:
    """Rows of `RULES` that refuse drawn settings."""
    values = DEFAULTS | settings | model_and_data(settings)
    for rule in RULES:
        if rule.key in values and rule.applies(values) and values[rule.key] not in rule.allowed:
            yield rule


def model_and_data(settings: Settings) -> Settings:
    """The settings of a case's model and data."""
    objective = settings.get("train.objective")
    found: Settings = {"data.path": f"{objective}.jsonl", "data.seq_len": 32}
    if settings["model"] == LLM:
        return {
            **found,
            "model.target": "colotrain.models.llm:LLM",
            "data.tokenizer": "bytes",
        }
    found["model.hf"] = settings["model"]
    if objective_of(objective) is OBJECTIVES["distill"]:
        found["train.distill.teacher"] = "qwen3"
        found["train.distill.top_k"] = 8
    return found


def arguments_of(settings: Settings, name: str) -> list[str]:
    """The arguments of a command that has these settings."""
    sizes = {axis: settings.get(f"mesh.{axis}", 1) for axis in axes()}
    together = math.prod(sizes.values())
    replicas = max(1, min(settings["replicas"], MOST_RANKS // together))
    readers = replicas * sizes[Axis.EP]
    accumulation, micro = settings.get("accumulate.steps", 1), settings.get("train.micro_batch", 1)
    ranks = together * replicas
    optimizer = settings.get("optim.name", "adamw")
    whole: Settings = {
        **model_and_data(settings),
        "train.max_steps": STEPS,
        "train.micro_batch": micro,
        "train.global_batch": readers * accumulation * micro,
        "train.eval_steps": 1,
        "cluster.procs_per_node": ranks,
        "optim.lr": RATES.get(optimizer, 1e-2),
        "optim.name": optimizer,
        **({"optim.args": ARGS[optimizer]} if optimizer in ARGS else {}),
        "checkpoint.every": STEPS if settings.get("resume") else 0,
        "elastic.max_restarts": 0,
        "elastic.hang_timeout_s": 60,
        "name": name,
    }
    if settings["model"] == LLM:
        whole |= {f"model.args.{key}": value for key, value in LLM_ARGS.items()}
    skipped = ("model", "replicas", "resume", "frozen")
    whole |= {key: value for key, value in settings.items() if key not in skipped}
    return [f"{_plus(key)}{key}={_written(value)}" for key, value in whole.items()]


def _plus(key: str) -> str:
    return "+" if key.startswith("model.args.") else ""


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return f'"{value}"' if set(value) & set("*[]{}:,") else value
    return json.dumps(value)
