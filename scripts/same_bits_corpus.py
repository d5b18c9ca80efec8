"""The cases of `scripts/same_bits.py`, as tables: what is run, and with which settings.

A case is a few commands in one folder. Most train two steps of a tiny model on one or two ranks,
with a checkpoint and a gradient record of every step. In a command `{made}/NAME` is a folder that
`same_bits.make` fills, and `{python}` the Python that runs colotrain.

Workers import this module, too, for `record_gradients`: torch and tests are imported in functions.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Words = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    name: str
    commands: tuple[Words, ...]


STEPS = (
    "train.max_steps=2",
    "train.eval_steps=0",
    "checkpoint.every=1",
    "checkpoint.keep=10",
    "observe.grads_every=1",
    "elastic.memory_copy=off",  # whether there is room for copies depends on the machine
    "elastic.max_restarts=0",
    "name=one",
)
"""Settings of every run, which later words replace."""
TEXT = ("data.corpus=null", "data.path={made}/text", "data.tokenizer=bytes", "data.seq_len=32")
LLM = (
    "recipe=llm-tiny",
    "model.args.d_model=32",
    "model.args.num_layers=4",
    "model.args.num_heads=4",
    "model.args.d_hidden=64",
    "train.global_batch=8",
    "train.micro_batch=null",
    "optim.schedule.warmup_steps=0",
    *TEXT,
    *STEPS,
)
LORA = ("adapter.name=lora", "adapter.targets=[*attention*,*mlp*]", "adapter.rank=4")
FOUR = "cluster.procs_per_node=4"
DISK = ("plugin.disk_path=disk", "plugin.budget.disk=1GiB")
DIMENSIONS: dict[str, dict[str, Words]] = {
    "mesh": {
        "dp2": (),
        "one": ("cluster.procs_per_node=1",),
        "tp2": ("mesh.tp=2",),
        "tokens2": ("mesh.tp=2", "mesh.sequence_parallel=true"),
        "cp2": ("mesh.cp=2",),
        "pp2": ("mesh.pp=2",),
        "interleaved": ("mesh.pp=2", "mesh.pp_schedule=interleaved"),
        "dp2tp2": (FOUR, "mesh.tp=2"),
        "tp2cp2": (FOUR, "mesh.tp=2", "mesh.cp=2"),
        "dp2pp2": (FOUR, "mesh.pp=2", "mesh.pp_split=[3,1]"),
    },
    "plugin": {
        "zero1": ("plugin=zero1",),
        "zero2": ("plugin=zero2",),
        "zero3": ("plugin=zero3",),
        "mixed": ("plugin=zero3", "plugin.overrides={blocks.0-1:{reshard:false}}"),
        "replicas": ("plugin=fsdp-hybrid", "plugin.shard_size=1"),
        "hybrid": ("plugin=fsdp-hybrid", "plugin.shard_size=2"),
        "gemini": ("plugin=gemini",),
        "disk": ("plugin=gemini", "plugin.budget.host=1MiB", *DISK),
        "pieces": ("plugin=gemini", "plugin.chunk_size=8KiB"),
    },
    "accumulation": {
        "all": ("accumulate.steps=1",),
        "by2": ("accumulate.steps=2",),
        "by4": ("accumulate.steps=4",),
    },
    "training": {
        "whole": (),
        "prefix": ("freeze.patterns=[embed*,blocks.0.*,blocks.1.*]",),
        "scattered": ("freeze.patterns=[*]", "freeze.except=[blocks.*.attention.*]"),
        "unfrozen": ("freeze.patterns=[embed*,blocks.0.*]", "freeze.unfreeze={1:[blocks.0.*]}"),
        "lora": (*LORA, "checkpoint.content=trained"),
        "dropout": (*LORA, "adapter.dropout=0.1"),
    },
    "optimizer": {
        "adamw": (),
        "sgd": ("optim.name=sgd", "optim.lr=0.1", "train.grad_clip=0.1"),
        "adafactor": ("optim.name=adafactor",),
        "lion": ("optim.name=lion", "train.grad_clip=null"),
        "muon": ("optim.name=muon",),
        "rules": ("optim.rules=[{match: 'embed*', lr_scale: 0.1, weight_decay: 0.0}]",),
    },
    "precision": {
        "fp32": (),
        "bf16": ("train.precision=bf16",),
        "fp16": ("train.precision=fp16",),
    },
    "recomputation": {
        "kept": (),
        "selective": ("train.activation_checkpointing=selective",),
        "full": ("train.activation_checkpointing=full",),
    },
    "beside": {
        "alone": (),
        "evaluated": ("train.eval_every=1", "train.eval_steps=1"),
        "best": (
            "train.eval_every=1",
            "train.eval_steps=2",
            "checkpoint.best.metric=validation_loss",
        ),
        "watched": ("train.on_gradients=same_bits_corpus:record_gradients",),
        "copied": ("elastic.memory_copy=16MiB",),
        "checked": ("elastic.check_every=1", "train.on_nonfinite=skip"),
    },
    "resumed": {
        "once": (),
        "longer": ("train.max_steps=3",),
        "zero3-on-2": ("train.max_steps=3", "cluster.procs_per_node=2", "plugin=zero3"),
        "zero1-on-1": ("train.max_steps=3", "cluster.procs_per_node=1", "plugin=zero1"),
    },
}
"""Each pair of values of two dimensions is in a case; names of cases leave out the first values."""
PLAIN_MESH = ("mesh.tp=1", "mesh.cp=1", "mesh.pp=1", "mesh.pp_schedule=1f1b", "mesh.pp_split=[]")
PLAIN_PLUGIN = (
    *("plugin.shard_size=null", "plugin.overrides={}", "plugin.chunk_size=auto"),
    *("plugin.budget.host=auto", "plugin.budget.disk=auto", "plugin.disk_path=auto"),
    "mesh.sequence_parallel=false",
)
"""What a resume resets where it changes plugin and ranks."""
OF_MATRICES = ("tp2", "tokens2", "dp2tp2", "tp2cp2")
EXCLUDED: tuple[tuple[Words, Words, str], ...] = (
    (("hybrid",), ("one", "tp2", "tokens2", "pp2", "interleaved"), "one rank has all of the model"),
    (("muon", "adafactor"), OF_MATRICES, "they need whole matrices"),
)
"""Values that exclude one another: these pairs would be refused."""


def pairwise() -> Iterator[dict[str, str]]:
    """Yield rows, dimension → value, until each pair of values that is allowed is in one."""
    excluded = {
        frozenset(pair) for ones, others, _ in EXCLUDED for pair in itertools.product(ones, others)
    }
    values = [(name, value) for name, options in DIMENSIONS.items() for value in options]
    wanted = {
        (one, two): None  # a set in order
        for one, two in itertools.combinations(values, 2)
        if one[0] != two[0] and frozenset((one[1], two[1])) not in excluded
    }
    uses = dict.fromkeys(values, 0)
    while wanted:
        row = dict(next(iter(wanted)))
        for name, options in DIMENSIONS.items():
            if name not in row:
                own = list(row.items())
                allowed = [
                    (name, value)
                    for value in options
                    if not any(frozenset((value, other)) in excluded for _, other in own)
                ]
                row[name] = max(
                    allowed,
                    key=lambda v: (sum(_pair(v, o) in wanted for o in own), -uses[v]),
                )[1]
        for item in row.items():
            uses[item] += 1
        for one, two in itertools.combinations(row.items(), 2):
            wanted.pop(_pair(one, two), None)
        yield row


_Value = tuple[str, str]


def _pair(one: _Value, two: _Value) -> tuple[_Value, _Value]:
    order = list(DIMENSIONS)
    return (one, two) if order.index(one[0]) < order.index(two[0]) else (two, one)


def llm_cases() -> Iterator[Case]:
    for row in pairwise():
        words = [
            w for name, value in row.items() if name != "resumed" for w in DIMENSIONS[name][value]
        ]
        two = () if FOUR in words or row["mesh"] == "one" else ("cluster.procs_per_node=2",)
        commands: list[Words] = [("run", *LLM, *two, *words, "--json")]
        if changes := DIMENSIONS["resumed"][row["resumed"]]:
            plain = (*PLAIN_MESH, *PLAIN_PLUGIN) if len(changes) > 1 else ()
            commands.append(("resume", "one", *plain, *changes, "--json"))
        usual = {next(iter(options)) for options in DIMENSIONS.values()} - {"zero1", "dp2"}
        named = [value for name in DIMENSIONS if (value := row[name]) not in usual]
        yield Case("-".join(["llm", *named]), tuple(commands))


PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")
DIFFICULT = (
    *("data.target=tests.dist.difficult:samples", "train.global_batch=12", "train.micro_batch=3"),
    *("train.seed=7", "cluster.procs_per_node=2", *STEPS),
)
OTHER_IDIOMS = ("DataTied", "FunctionalOwn")
"""Foreign models that are refused: by the plan, and where blocks stay gathered."""


def model_cases() -> Iterator[Case]:
    """Models that break elsewhere, each under one of the plugins in turn."""
    from tests.dist.foreign import SAMPLE
    from tests.dist.test_difficult_models import VARIANTS

    plugins = itertools.cycle(PLUGINS)
    for number, (model, words) in enumerate(VARIANTS):
        target = ("model.target=tests.dist.difficult:make", f"model.args.name={model}")
        plugin = next(plugins)
        command = ("run", *target, *DIFFICULT, *words, f"plugin={plugin}", "--json")
        yield Case(f"difficult-{number:02d}-{model}-{plugin}", (command,))
    for model in (*SAMPLE, *OTHER_IDIOMS):
        target = ("model.target=tests.dist.foreign:make", f"model.args.name={model}")
        plugin = next(plugins)
        command = ("run", *target, *DIFFICULT, "train.micro_batch=6", f"plugin={plugin}", "--json")
        yield Case(f"foreign-{model}-{plugin}", (command,))


HF = ("train.global_batch=8", "optim.lr=0.01", "cluster.procs_per_node=2", *STEPS)
HF_LORA = ("adapter.name=lora", "adapter.targets=[q_proj,v_proj,down_proj]")
FAMILY_CASES: dict[str, tuple[str, str, Words]] = {
    "llama-tp": ("llama", "causal", ("plugin=zero1", "mesh.tp=2")),
    "llama-cp": ("llama", "causal", ("plugin=zero2", "mesh.cp=2")),
    "llama-pp": ("llama", "causal", ("plugin=zero3", "mesh.pp=2", "accumulate.steps=4")),
    "llama-lora": ("llama", "causal", ("plugin=zero2", *HF_LORA)),
    "llama-lora-tp": ("llama", "causal", ("plugin=zero3", "mesh.tp=2", *HF_LORA)),
    "llama-lora-gemini": ("llama", "causal", ("plugin=gemini", *HF_LORA, "train.precision=bf16")),
    "qwen3-frozen": ("qwen3", "causal", ("plugin=gemini", "freeze.patterns=['*layers.0.*']")),
    "qwen3-axes": ("qwen3", "causal", ("plugin=zero3", FOUR, "mesh.tp=2", "mesh.cp=2")),
    "gemma3-tp": ("gemma3_text", "causal", ("plugin=zero2", "mesh.tp=2")),
    "mixtral": ("mixtral", "causal", ("plugin=zero2", "+model.args.output_router_logits=true")),
    "mixtral-tp": ("mixtral", "causal", ("plugin=zero1", "mesh.tp=2")),
    "gpt2-cp": ("gpt2", "causal", ("plugin=zero1", "mesh.cp=2")),
    "gpt2-selective": (
        "gpt2",
        "causal",
        ("train.activation_checkpointing=selective", "plugin=zero3"),
    ),
    "falcon-pp": ("falcon", "causal", ("plugin=zero1", "mesh.pp=2", "accumulate.steps=2")),
    "bert": ("bert", "masked", ("plugin=zero3", "accumulate.steps=2")),
    "t5": ("t5", "pairs", ("plugin=zero2",)),
    "vit": ("vit", "images", ("plugin=fsdp-hybrid", "train.precision=fp16")),
}
"""Name → type of model, function of tests.families that makes its samples, settings."""
CHAT = ("model.hf={made}/chat-model", "data.path={made}/chat", "data.chat_template=chatml")
CHAT = (*CHAT, "data.seq_len=48", *HF)
PREFERENCES = (
    *("data.path={made}/preferences", "data.chat_template=chatml", "data.seq_len=64"),
    *("train.objective=dpo", "train.micro_batch=2"),
)
OBJECTIVES: dict[str, Words] = {
    "chat": (*CHAT, "plugin=zero2"),
    "chat-isolated": (*CHAT, "plugin=zero3", "data.packing=whole", "data.isolate=true"),
    "dpo": (*LLM, *PREFERENCES, "plugin=zero2", "cluster.procs_per_node=2"),
    "dpo-lora": (*LLM, *PREFERENCES, *LORA, "plugin=zero3", "cluster.procs_per_node=2"),
    "masked": (
        *("model.hf={made}/letters-bert", "data.path={made}/letters", "data.seq_len=24"),
        *("train.objective=masked", "data.packing=none", *HF, "plugin=gemini"),
    ),
    "distill": (
        *(*LLM, "train.objective=distill", "train.distill.teacher={made}/bytes-llama"),
        *("train.distill.top_k=8", "plugin=zero1", "cluster.procs_per_node=2"),
    ),
    "epochs": (*LLM, "train.max_steps=null", "train.epochs=0.02", "plugin=zero2"),
    "stop-early": (
        *(*LLM, "train.max_steps=4", "train.eval_every=1", "train.eval_steps=1", "plugin=zero2"),
        *("train.stop_early.metric=validation_loss", "train.stop_early.patience=1"),
        *("train.stop_early.min_delta=100", "cluster.procs_per_node=2"),
    ),
    "samples": (
        *(*LLM, "train.eval_every=1", "train.eval_steps=1", "observe.samples.prompts=[def]"),
        *("observe.samples.max_tokens=4", "plugin=zero3", "cluster.procs_per_node=2"),
    ),
    "hybrid-2x2": (*LLM, "plugin=fsdp-hybrid", "plugin.shard_size=2", FOUR),
}


def library_cases() -> Iterator[Case]:
    for name, (kind, data, words) in FAMILY_CASES.items():
        own = (f"model.hf={{made}}/{kind}", f"data.target=tests.families:{data}")
        yield Case(f"hf-{name}", (("run", *own, *HF, *words, "--json"),))
    for name, words in OBJECTIVES.items():
        yield Case(f"objective-{name}", (("run", *words, "--json"),))


MACHINES = {
    "llm-tiny": ("hardware=rtx4090",),
    "llm-125m": ("hardware=l4", "cluster.procs_per_node=2"),
    "llm-1b": ("hardware=a100-40g", "cluster.procs_per_node=8"),
    "llm-7b": ("hardware=h100", "cluster.procs_per_node=8", "cluster.nodes=2"),
}
"""Recipe → a machine that it is planned for, whose speed and memory are published figures."""
AXES: dict[str, Words] = {
    "tp": ("mesh.tp=2",),
    "cp": ("mesh.cp=2",),
    "pp": ("mesh.pp=2",),
    "full": ("train.activation_checkpointing=full",),
    "lora": LORA,
    "bf16": ("train.precision=bf16", "freeze.patterns=[embed*,blocks.0.*]"),
}


def plan_cases() -> Iterator[Case]:
    for recipe, machine in MACHINES.items():
        own = ("plan", f"recipe={recipe}", *machine, "--json")
        commands = tuple((*own, f"plugin={plugin}") for plugin in (*PLUGINS, "auto"))
        yield Case(f"plan-{recipe}", commands)
    machine = MACHINES["llm-125m"]
    own = ("plan", "recipe=llm-125m", *machine, "--json", "plugin=zero2")
    for name, words in AXES.items():
        yield Case(f"plan-llm-125m-{name}", ((*own, *words),))
    yield Case("plan-advise", ((*own, "--advise"),))


SMALL_LLM = (*LLM, "cluster.procs_per_node=2")
RUN = ("run", *SMALL_LLM, "plugin=zero2")
TWO = (*RUN, "name=two", "plugin=zero3")
RUN_HF = ("run", "model.hf={made}/llama", "data.target=tests.families:causal", *HF, "plugin=zero3")
KUBERNETES = ("cluster.kubernetes.image=i:1", "cluster.kubernetes.volumes={runs: /shared}")
SUBMIT = ("submit", *SMALL_LLM, "plugin=zero2", "--dry-run")
VERIFY = ("verify", *SMALL_LLM, "--steps", "1", "--world-sizes", "2")
FIRST_STEP = ("inspect-grads", *SMALL_LLM, "plugin=zero3", "accumulate.steps=2", "--noise")
SWEEP = ("run", *SMALL_LLM, "plugin=zero1", "--sweep", "accumulate.steps=1,2")
VERBS: dict[str, tuple[Words, ...]] = {
    "inspect-grads": (RUN, ("inspect-grads", "one"), ("inspect-grads", "one", "--step", "1")),
    "inspect-first-step": (FIRST_STEP,),
    "compare-runs": (RUN, TWO, ("inspect-grads", "one", "--against", "two")),
    "checkpoints": (RUN, ("checkpoints", "one"), ("checkpoints", "one", "--verify")),
    "listing": (RUN, ("runs",), ("dashboard", "one"), ("logs", "one")),
    "finished": (RUN, ("resume", "one"), ("plan", "one")),
    "stop": (RUN, ("stop", "one")),
    "profile": ((*RUN, "train.profile.steps=[2,2]"), ("profile", "one", "--last")),
    "sweep": (SWEEP, ("runs", "--sweep", "one")),
    "smoke": ((*RUN, "--smoke"),),
    "export": (RUN, ("export", "one", "--to", "out", "--format", "safetensors")),
    "export-hf": (RUN_HF, ("export", "one", "--to", "out", "--check")),
    "export-adapter": ((*RUN_HF, *HF_LORA), ("export", "one", "--to", "out", "--adapter")),
    "verify": ((*VERIFY, "--accumulation", "1,2"),),
    "verify-axes": ((*VERIFY, "--plugins", "zero1,zero3", "--tp", "1,2", "--accumulation", "2"),),
    "verify-stages": ((*VERIFY, "--plugins", "zero2", "--pp", "2", "--accumulation", "2"),),
    "data": (("data", "inspect", *SMALL_LLM), ("data", "inspect", *CHAT)),
    "import-config": (("import-config", "{made}/deepspeed/config.json", "--kind", "deepspeed"),),
    "slurm": ((*SUBMIT, "cluster.slurm.partition=gpu"),),
    "kubernetes": ((*SUBMIT, *KUBERNETES),),
    "doctor": (("doctor", "--only", "torch,limits,environment"),),
    "audit": (("audit", "--steps", "2", "--json", "--", "{python}", "{made}/audited/audited.py"),),
}
"""Name → commands; each prints JSON."""


def verb_cases() -> Iterator[Case]:
    for name, commands in VERBS.items():
        ends = [() if "--json" in command else ("--json",) for command in commands]
        yield Case(f"verb-{name}", tuple((*c, *e) for c, e in zip(commands, ends, strict=True)))


def cases() -> list[Case]:
    """All cases; names differ, and come in the order in which they are run."""
    found = [*llm_cases(), *model_cases(), *library_cases(), *plan_cases(), *verb_cases()]
    assert len({case.name for case in found}) == len(found)
    return found


def record_gradients(model: Any, step: int) -> None:
    """Append a digest of each gradient that this rank holds to its file under `gradients`."""
    import hashlib

    import torch

    import colotrain

    folder = Path("gradients")
    folder.mkdir(exist_ok=True)
    with (folder / f"rank{os.environ['RANK']}.jsonl").open("a") as file:
        for view in colotrain.gradients(model):
            digest = None
            if view.local is not None:
                raw = view.local.detach().contiguous().reshape(-1).view(torch.uint8)
                digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
            row = {"step": step, "name": view.name, "status": str(view.status), "bytes": digest}
            file.write(f"{json.dumps(row)}\n")
