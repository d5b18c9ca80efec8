"""`colotrain import-config`: nothing of another tool's configuration is dropped in silence."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from colotrain.cli.main import guarded
from colotrain.engine.optim.parameter_settings import settings_of
from colotrain.errors import UsageError
from colotrain.migrate import recipes
from colotrain.migrate.findings import MEANING, Finding, flatten
from colotrain.runs.resolving import plan_from
from tests.unit.config.test_compose import compose

FOREIGN = Path(__file__).parent / "foreign"
KINDS = ("deepspeed", "accelerate", "lightning")
CASES = [
    pytest.param(kind, case, id=f"{kind}: {case['name']}")
    for kind in KINDS
    for case in yaml.safe_load((FOREIGN / f"{kind}.yaml").read_text("utf-8"))
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    return tmp_path


def line(finding: Finding) -> str:
    """`taken optim.lr=0.1, optim.name="sgd"`, or only what became of it."""
    settings = ", ".join(f"{k}={json.dumps(v)}" for k, v in finding.settings.items())
    return f"{finding.outcome} {settings}".strip()


def write(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    path = folder / ("theirs.json" if kind == "deepspeed" else "theirs.yaml")
    text = json.dumps(config) if kind == "deepspeed" else yaml.safe_dump(config)
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_ten_of_each(kind: str) -> None:
    assert sum(param.values[0] == kind for param in CASES) == 10


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_configuration_has_its_table(kind: str, case: dict[str, Any]) -> None:
    assert recipes.recognise(case["config"], Path("theirs")) == kind
    found = recipes.findings(case["config"], kind)
    assert {finding.key: line(finding) for finding in found} == case["table"]
    assert [finding.key for finding in found] == [key for key, _ in flatten(case["config"])]
    assert all(finding.note for finding in found if finding.outcome != "taken")


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        case if index % 10 < 3 else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for index, case in enumerate(CASES)
    ],
)
def test_the_recipe_is_a_plan(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, case: dict[str, Any]
) -> None:
    path = write(folder, kind, case["config"])
    assert guarded(["import-config", str(path), "--to", "recipes/mine.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == []
    assert document["kind"] == kind
    assert len(document["keys"]) == len(case["table"])

    assert guarded(["plan", "recipe=mine", "cluster.memory=80GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    settings = document["settings"]
    if settings.get("train.micro_batch"):
        assert plan["batch"]["micro"] == settings["train.micro_batch"]
    if settings.get("train.global_batch"):
        assert plan["batch"]["global"] == settings["train.global_batch"]
    if settings.get("accumulate.steps"):
        assert plan["batch"]["accumulation_steps"] == settings["accumulate.steps"]
    if "plugin.name" in settings and settings["plugin.name"] != "auto":
        assert plan["plugin"]["name"] == settings["plugin.name"]


def test_what_was_not_taken_stands_in_the_recipe(folder: Path) -> None:
    config = {"train_batch_size": 8, "sparse_gradients": True, "train_bach": 3}
    path = write(folder, "deepspeed", config)
    assert guarded(["import-config", str(path), "--kind", "deepspeed"]) == 0
    text = (folder / "recipes" / "theirs.yaml").read_text()
    assert "# sparse_gradients = true: no equivalent (gradients are dense)" in text
    assert "# train_bach = 3: unknown key" in text
    assert "global_batch: 8" in text


def test_a_reference_is_text_of_the_other_tools_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "value")
    place = "/disk/${oc.env:SECRET}"
    offload = {"device": "nvme", "nvme_path": place}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    path = write(folder, "deepspeed", {"train_batch_size": 8, "zero_optimization": zero})
    assert guarded(["import-config", str(path), "--kind", "deepspeed"]) == 0
    assert compose(["recipe=theirs"])["plugin"]["disk_path"] == place


def test_people_see_every_key_and_the_counts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert guarded(["import-config", str(write(folder, "deepspeed", config))]) == 0
    out = capsys.readouterr().out
    for key, _ in flatten(config):
        assert key in out
    assert "plugin.name=zero2" in out
    assert f"3 keys: 2 {MEANING['taken']}, 1 {MEANING['decided']}" in out
    assert re.search(f"model, data +{MEANING['asked']} +those of llm-tiny until you set", out)
    assert "colotrain plan recipe=theirs" in out


@pytest.mark.parametrize(
    ("name", "text", "words", "told"),
    [
        ("a.json", "{", [], "expected JSON or YAML"),
        ("a.yaml", "a: [", [], "expected JSON or YAML"),
        ("a.yaml", "- 1", [], "expected a mapping"),
        ("a.yaml", "x: 1", [], "say it with --kind"),
        ("a.yaml", "x: 1", ["--kind", "deepsped"], "did you mean deepspeed?"),
        ("a.yaml", "trainer: {}", ["--to", "a.txt"], "expected a .yaml file"),
        ("a.yaml", "trainer: {}", ["--to", "a.yaml"], "exists"),
        ("none.yaml", None, [], "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    words: list[str],
    told: str,
) -> None:
    if text is not None:
        (folder / name).write_text(text)
    assert guarded(["import-config", name, *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("value", ["many", [3], {"a": 1}, True, 1.5])
def test_a_value_of_a_wrong_kind_is_said_and_not_taken(value: Any) -> None:
    found = recipes.findings({"train_batch_size": value}, "deepspeed")
    assert found[0].outcome in ("none", "unknown")
    assert recipes.settings(found) == {}


@pytest.mark.parametrize("name", ["Lion", "Muon", "Adafactor", "FusedLion", "torch.optim.SGD"])
def test_every_optimizer_that_is_here_is_taken_by_its_name(name: str) -> None:
    (finding,) = recipes.findings({"optimizer": {"type": name}}, "deepspeed")
    plain = name.rpartition(".")[2].lower().removeprefix("fused")
    assert finding.settings == {"optim.name": plain}


def test_of_two_plugins_the_one_that_holds_more_is_taken() -> None:
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    assert recipes.settings(recipes.findings(config, "deepspeed"))["plugin.name"] == "gemini"


LINEAR = {"warmup_type": "linear"}
SILENT = {
    "train.grad_clip": None,
    "optim.schedule.name": "constant",
    "optim.schedule.warmup_steps": 0,
}
ADAMW = {"optim.name": "adamw", "optim.lr": 0.5, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8}


def deepspeed_of(optimizer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "optimizer": optimizer, **more}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("deepspeed", {"train_batch_size": 8}, SILENT),
        ("accelerate", {"num_machines": 1, "distributed_type": "NO"}, SILENT),
        ("lightning", {"trainer": {"max_steps": 5, "gradient_clip_val": None}}, SILENT),
        (
            "deepspeed",
            deepspeed_of({"type": "AdamW", "params": {"lr": 0.5}}),
            SILENT | ADAMW | {"optim.weight_decay": 0.0},
        ),
        (
            "lightning",
            {
                "trainer": {},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5}},
            },
            SILENT | ADAMW | {"optim.weight_decay": 0.01},
        ),
        (
            "lightning",
            {"trainer": {}, "optimizer": {"class_path": "torch.optim.SGD"}},
            SILENT | {"optim.lr": 1e-3, "optim.momentum": 0.0, "optim.weight_decay": 0.0},
        ),
        (
            "deepspeed",
            deepspeed_of(
                {"type": "Adam", "params": {"lr": 0.5}},
                scheduler={"type": "WarmupLR"},
                gradient_clipping="auto",
            ),
            {"optim.schedule.warmup_steps": 1000, "optim.lr": 0.5, "train.grad_clip": 1.0},
        ),
        (
            "deepspeed",
            deepspeed_of(
                {"params": {"lr": 0.5}, "type": "Adam"}, scheduler={"type": "WarmupDecayLR"}
            ),
            {"optim.schedule.name": "linear", "optim.lr": 1e-3, "optim.weight_decay": 0.0},
        ),
        (
            "deepspeed",
            deepspeed_of({"type": "Adam"}, scheduler={"type": "OneCycle"}),
            SILENT,
        ),
    ],
)
def test_what_a_file_does_not_say_is_as_its_own_tool_has_it(
    folder: Path, kind: str, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = write(folder, kind, config)
    assert guarded(["import-config", str(path), "--kind", kind, "--to", "recipes/mine.yaml"]) == 0
    composed = dict(flatten(compose(["recipe=mine"])))
    assert {key: composed[key] for key in expected} == expected


TORCH = {"class_path": "torch.optim.AdamW"}


@pytest.mark.parametrize(
    ("kind", "config", "decay"),
    [
        ("deepspeed", deepspeed_of({"type": "AdamW", "params": {"weight_decay": 0.3}}), 0.3),
        ("deepspeed", deepspeed_of({"type": "AdamW", "params": {"torch_adam": True}}), 0.01),
        ("deepspeed", deepspeed_of({"type": "AdamW"}), 0.0),
        ("lightning", {"optimizer": TORCH | {"init_args": {"weight_decay": 0.3}}}, 0.3),
        ("lightning", {"optimizer": TORCH}, 0.01),
        ("lightning", {"optimizer": TORCH | {"init_args": {"weight_decay": 0}}}, 0.0),
    ],
)
def test_norms_and_biases_decay_as_they_do_there(
    folder: Path, kind: str, config: dict[str, Any], decay: float
) -> None:
    path = write(folder, kind, {**config, "seed": 1})
    assert guarded(["import-config", str(path), "--kind", kind, "--to", "recipes/mine.yaml"]) == 0
    for words, expected in (([], decay), (["optim.weight_decay=0.5"], 0.5 if decay else 0.0)):
        plan = plan_from(["recipe=mine", *words], here=False)
        assert settings_of("norm.weight", 1, plan.optim).weight_decay == expected
    assert settings_of("layer.weight", 2, plan.optim).weight_decay == 0.5


def test_a_warm_up_that_is_not_linear_is_said() -> None:
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        for params, told in (({}, True), ({"warmup_type": "log"}, True), (LINEAR, False)):
            scheduler = {"type": name, "params": params}
            found = recipes.findings({"scheduler": scheduler}, "deepspeed")
            assert all(("logarithmic" in finding.note) == told for finding in found if params)
            assert ("logarithmic" in found[0].note) == told


@pytest.mark.parametrize(
    ("kept", "settings", "note"),
    [
        (3, {"checkpoint.keep": 3}, "the newest are kept, not the best"),
        (-1, {}, "keeping all is not available"),
        (0, {}, "none are saved"),
    ],
)
def test_how_many_checkpoints_are_kept_is_taken(
    kept: int, settings: dict[str, Any], note: str
) -> None:
    callback = {"init_args": {"save_top_k": kept, "monitor": "loss"}, "class_path": "Model"}
    for callbacks in ([callback], callback):
        found = recipes.findings({"trainer": {"callbacks": callbacks}}, "lightning")
        assert found[0].settings == settings
        assert note in found[0].note


@pytest.mark.parametrize(
    ("arguments", "trainer", "settings", "told"),
    [
        ({"monitor": "val_loss"}, {}, {"metric": "validation_loss"}, "the loss of evaluations"),
        (
            {"monitor": "val/loss", "mode": "max"},
            {},
            {"metric": "validation_loss", "mode": "max"},
            "",
        ),
        (
            {"monitor": "val_acc", "mode": "max"},
            {},
            {"mode": "max"},
            "set checkpoint.best.metric to",
        ),
        (
            {"monitor": "val_loss"},
            {"limit_val_batches": 0},
            {},
            "train.eval_steps=0 leaves nothing",
        ),
        ({"monitor": None}, {}, {}, "no metric is monitored"),
    ],
)
def test_the_best_checkpoint_is_kept_by_a_metric_of_that_name(
    folder: Path,
    arguments: dict[str, Any],
    trainer: dict[str, Any],
    settings: dict[str, Any],
    told: str,
) -> None:
    kept = {"class_path": "ModelCheckpoint", "init_args": arguments | {"save_top_k": 1}}
    config = {"trainer": {"callbacks": [kept], "max_steps": 3, **trainer}}
    found = recipes.findings(config, "lightning")
    best = {k: v for k, v in recipes.settings(found).items() if k.startswith("checkpoint.best")}
    assert best == {f"checkpoint.best.{key}": value for key, value in settings.items()}
    by_key = {finding.key: finding for finding in found}
    assert told in by_key["trainer.callbacks[0].init_args.monitor"].note
    path = write(folder, "lightning", config)
    assert guarded(["import-config", str(path), "--to", "recipes/mine.yaml"]) == 0
    assert plan_from(["recipe=mine"], here=False).checkpoint.best_metric == settings.get("metric")


def test_what_contradicts_itself_in_a_deepspeed_file_is_told() -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    rates = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    }
    found = recipes.findings(both | rates, "deepspeed")
    outcomes = {f.key: f.outcome for f in found}
    assert outcomes["fp16.enabled"] == outcomes["bf16.enabled"] == "asked"
    assert outcomes["optimizer.params.lr"] == "decided"
    assert recipes.settings(found)["optim.lr"] == 1e-3
    assert "train.precision" not in recipes.settings(found)


def test_a_file_of_another_tool_is_not_taken_for_one_that_shares_a_few_keys() -> None:
    trl = {
        "model_name_or_path": "meta-llama/Llama-3.2-1B",
        "dataset_name": "tatsu-lab/alpaca",
        "max_length": 2048,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-5,
        "use_peft": True,
    }
    with pytest.raises(UsageError, match=r"are none of deepspeed's, such as model_name_or_path, "):
        recipes.recognise(trl, Path("trl.yaml"))


@pytest.mark.parametrize(
    ("mode", "decay", "outcome"),
    [(False, 0.1, "none"), (False, 0, "decided"), (True, 0.1, "decided")],
)
def test_decay_in_the_gradients_is_said_not_to_be_there(
    mode: bool, decay: float, outcome: str
) -> None:
    params = {"lr": 1e-3, "weight_decay": decay, "adam_w_mode": mode}
    found = recipes.findings({"optimizer": {"type": "Adam", "params": params}}, "deepspeed")
    assert {f.key: f.outcome for f in found}["optimizer.params.adam_w_mode"] == outcome


def test_early_stopping_is_train_stop_early(folder: Path) -> None:
    arguments = {"monitor": "val_loss", "patience": 5, "min_delta": 0.01, "mode": "min"}
    callback = {"class_path": "EarlyStopping", "init_args": arguments | {"strict": True}}
    config = {"trainer": {"callbacks": [callback], "max_steps": 30, "val_check_interval": 5}}
    found = recipes.findings(config, "lightning")
    outcomes = {f.key.rpartition(".")[2]: f.outcome for f in found if "init_args" in f.key}
    assert outcomes == dict.fromkeys(arguments, "taken") | {"strict": "none"}
    path = write(folder, "lightning", config)
    assert guarded(["import-config", str(path), "--to", "recipes/mine.yaml"]) == 0
    stop_early = plan_from(["recipe=mine"], here=False).train.stop_early
    assert stop_early is not None
    assert (stop_early.metric, stop_early.patience, stop_early.min_delta) == (
        "validation_loss",
        5,
        0.01,
    )


def test_a_second_metric_for_the_best_checkpoint_is_asked_about() -> None:
    callbacks = [
        {"class_path": "ModelCheckpoint", "init_args": {"monitor": monitor}}
        for monitor in ("val_loss", "val_acc")
    ]
    found = recipes.findings({"trainer": {"callbacks": callbacks}}, "lightning")
    outcomes = {f.key: f.outcome for f in found if f.key.endswith("monitor")}
    assert list(outcomes.values()) == ["taken", "asked"]
    assert recipes.settings(found) == {"checkpoint.best.metric": "validation_loss"}


def test_what_comes_from_neither_is_listed_in_the_recipe() -> None:
    config = deepspeed_of({"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}})
    found = recipes.findings(config, "deepspeed")
    text = recipes.render(Path("theirs"), "deepspeed", found)
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    theirs, ours = comments.split("as deepspeed has them by default: ")[1].split(
        ". Not in the file"
    )
    assert set(re.findall(r"([\w.]+)=", theirs)) == {*SILENT, "optim.betas", "optim.weight_decay"}
    assert "train.max_steps, train.eval_every, train.eval_steps, optim.lr." in ours


def lightning_of(schedule: str, steps: int | None, **arguments: Any) -> list[Finding]:
    scheduler = {"init_args": arguments, "class_path": f"torch.optim.lr_scheduler.{schedule}"}
    return recipes.findings(
        {"lr_scheduler": scheduler, "trainer": {"max_steps": steps}}, "lightning"
    )


@pytest.mark.parametrize(
    ("schedule", "argument"), [("CosineAnnealingLR", "T_max"), ("LinearLR", "total_iters")]
)
def test_the_trainer_says_how_long_a_run_is(schedule: str, argument: str) -> None:
    found = lightning_of(schedule, 100_000, **{argument: 10})
    assert recipes.settings(found)["train.max_steps"] == 100_000
    assert (found[0].outcome, found[0].settings) == ("none", {})
    assert "trainer.max_steps" in found[0].note
    same = recipes.settings(lightning_of(schedule, 10, **{argument: 10}))
    assert same["train.max_steps"] == 10
    for steps in (-1, None):  # neither epochs are said nor steps
        found = lightning_of(schedule, steps, **{argument: 10})
        assert "train.max_steps" not in recipes.settings(found)
        assert found[0].outcome == "asked"
        assert any(
            "set train.max_steps" in question for question in recipes.questions("lightning", found)
        )


def test_epochs_stay_epochs() -> None:
    trainer = {"max_epochs": 10, "check_val_every_n_epoch": 2}
    scheduler = {
        "class_path": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "init_args": {"T_max": 10},
    }
    found = recipes.findings({"trainer": trainer, "lr_scheduler": scheduler}, "lightning")
    taken = recipes.settings(found)
    assert (taken["train.epochs"], taken["train.max_steps"]) == (10, None)
    assert taken["train.eval_every"] == "2ep"
    assert not any(finding.outcome == "asked" for finding in found)
    half = recipes.findings({"trainer": {"val_check_interval": 0.5}}, "lightning")
    assert recipes.settings(half)["train.eval_every"] == "0.5ep"
    whole = recipes.findings({"trainer": {"limit_val_batches": 1.0}}, "lightning")
    assert recipes.settings(whole)["train.eval_steps"] == "all"
    for none in (0, 0.0):
        off = recipes.findings({"trainer": {"limit_val_batches": none}}, "lightning")
        assert recipes.settings(off)["train.eval_steps"] == 0
    longer = {"trainer": trainer, "lr_scheduler": {**scheduler, "init_args": {"T_max": 20}}}
    asked = [f.key for f in recipes.findings(longer, "lightning") if f.outcome == "asked"]
    assert asked == ["lr_scheduler.init_args.T_max"]


def test_a_folder_is_taken_only_where_something_goes_to_it() -> None:
    def zero(device: str) -> dict[str, Any]:
        offload = {"device": device, "nvme_path": "/fast"}
        return {"zero_optimization": {"stage": 3, "offload_param": offload}}

    for device, folder in (("nvme", "/fast"), ("cpu", None), ("none", None)):
        found = recipes.settings(recipes.findings(zero(device), "deepspeed"))
        assert found.get("plugin.disk_path") == folder
    args = {"stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme"}
    strategy = {"class_path": "DeepSpeedStrategy", "init_args": args | {"nvme_path": "/fast"}}
    found = recipes.settings(recipes.findings({"trainer": {"strategy": strategy}}, "lightning"))
    assert (found["plugin.name"], found["plugin.disk_path"]) == ("gemini", "/fast")


def test_of_two_folders_for_offloading_one_is_taken_and_the_other_asked_about() -> None:
    def zero(*folders: str) -> list[recipes.Finding]:
        offload = [{"device": "nvme", "nvme_path": folder} for folder in folders]
        names = ("offload_param", "offload_optimizer")
        zero: dict[str, Any] = {"stage": 3} | dict(zip(names, offload, strict=True))
        return recipes.findings({"zero_optimization": zero}, "deepspeed")

    found = zero("/fast", "/slow")
    assert recipes.settings(found)["plugin.disk_path"] == "/fast"
    (asked,) = [
        line for line in recipes.questions("deepspeed", found) if "plugin.disk_path" in line
    ]
    assert "/fast is taken, set plugin.disk_path for another" in asked
    assert not [
        q for q in recipes.questions("deepspeed", zero("/fast", "/fast")) if "disk_path" in q
    ]


def test_a_constant_rate_does_not_say_how_long_a_run_is() -> None:
    assert "train.max_steps" not in recipes.settings(
        lightning_of("ConstantLR", None, total_iters=5)
    )


def test_what_a_schedule_is_told_goes_before_what_it_has_by_default() -> None:
    found = recipes.settings(lightning_of("LinearLR", 10, end_factor=0.25))
    assert found["optim.schedule.min_lr_ratio"] == 0.25
    assert recipes.settings(lightning_of("LinearLR", 10))["optim.schedule.min_lr_ratio"] == 1.0
    told = {"scheduler": {"params": {"cos_min_ratio": 0.2}, "type": "WarmupCosineLR"}}
    found = recipes.settings(recipes.findings(told, "deepspeed"))
    assert found["optim.schedule.min_lr_ratio"] == 0.2


KEYS = {
    kind: [key.replace("*", "x") for key in form.rules] for kind, form in recipes.FORMATS.items()
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "", "none", "1e9", "nan", "FULL_SHARD", "3"]),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
)


def test_control_characters_of_a_foreign_file_do_not_break_the_recipe() -> None:
    found = recipes.findings({"scheduler": {"type": "\x1f\n\ud800", "\u2028": 1}}, "deepspeed")
    text = recipes.render(Path("theirs"), "deepspeed", found)
    assert yaml.safe_load(text)["defaults"]
    assert "(\\x1f\\n\\ud800 is not there" in text
    text.encode("utf-8")


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x0b"])
def test_a_file_s_name_adds_no_line_to_the_recipe(
    folder: Path, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / f"ds{end}train: {{seed: 99}}{end}#.json"
    source.write_text('{"train_batch_size": 8}')
    assert guarded(["import-config", str(source), "--to", "a folder/mine.yaml"]) == 0
    assert "seed" not in yaml.safe_load((folder / "a folder" / "mine.yaml").read_text())["train"]
    (command,) = re.findall(r"is written: colotrain (.*)", capsys.readouterr().out)
    assert guarded(shlex.split(command)) == 0  # what is advised is a plan


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_value_of_any_key_is_dropped_or_breaks_anything(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KEYS)))
    keys = data.draw(st.lists(st.sampled_from(KEYS[kind]), unique=True, max_size=6))
    flat = {key: data.draw(VALUES) for key in keys if "[" not in key}
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        place = nested
        *above, name = key.split(".")
        for section in above:
            place = place.setdefault(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[name] = value
    found = recipes.findings(nested, kind)
    assert [finding.key for finding in found] == [key for key, _ in flatten(nested)]
    assert all(finding.outcome in MEANING for finding in found)
    text = recipes.render(Path("theirs"), kind, found)
    assert isinstance(yaml.safe_load(text), dict)


def test_what_a_trainer_fills_in_is_as_it_is_there_by_default() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = deepspeed_of({"type": "AdamW", "params": params}, gradient_clipping="auto")
    found = recipes.findings(config, "deepspeed")
    settings = recipes.complete_settings("deepspeed", found)
    assert settings["optim.betas"] == [0.9, 0.999]
    assert (settings["optim.weight_decay"], settings["train.grad_clip"]) == (0.0, 1.0)
    assert any("set optim.lr" in question for question in recipes.questions("deepspeed", found))
    lion = recipes.findings(deepspeed_of({"type": "FusedLion"}), "deepspeed")
    assert recipes.complete_settings("deepspeed", lion)["optim.betas"] == [0.9, 0.999]


def accelerate_of(**more: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", **more}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("deepspeed", {"compile": {"disable": False}}, {"train.compile": True}),
        ("deepspeed", {"compile": {"disable": True}}, {"train.compile": False}),
        ("deepspeed", {"compile": {"deepcompile": True}}, {"train.compile": True}),
        (
            "accelerate",
            accelerate_of(distributed_type="NO", num_processes=4),
            {"cluster.procs_per_node": 1, "plugin.name": "zero1"},
        ),
        ("accelerate", accelerate_of(distributed_type="FSDP"), {"plugin.name": "zero3"}),
        ("accelerate", accelerate_of(distributed_type="DEEPSPEED"), {"plugin.name": "zero2"}),
        (
            "accelerate",
            accelerate_of(distributed_type="FSDP", fsdp_config={"fsdp_sharding_strategy": 2}),
            {"plugin.name": "zero2"},
        ),
        (
            "accelerate",
            accelerate_of(
                parallelism_config={
                    "parallelism_config_tp_size": 2,
                    "parallelism_config_cp_size": 4,
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 8,
                }
            ),
            {
                "mesh.tp": 2,
                "mesh.cp": 4,
                "plugin.name": "fsdp-hybrid",
                "plugin.shard_size": 8,
            },
        ),
        ("lightning", {"trainer": {"enable_checkpointing": False}}, {"checkpoint.every": 0}),
        ("lightning", {"trainer": {"enable_checkpointing": True}}, {"checkpoint.every": None}),
    ],
)
def test_switches_and_defaults_mean_what_they_mean_there(
    kind: str, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = recipes.settings(recipes.findings(config, kind))
    assert {key: settings.get(key) for key in expected} == expected
