"""Composition: where names are looked up, what wins over what, and what is said about mistakes."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from colotrain.config.compose import gather
from colotrain.config.schema import Config
from colotrain.config.shipped import GROUPS, Search, shipped
from colotrain.errors import ConfigError
from colotrain.records import as_argument, as_override, from_plain, sections
from colotrain.runs.resolving import compose as saved_or_composed
from colotrain.runs.resolving import plan_from
from colotrain.spec.plugins import ROWS

Write = Callable[[str, str], Path]


def compose(overrides: Sequence[str], *, cwd: Path | None = None) -> dict[str, Any]:
    config, problems = gather(overrides, cwd=cwd)
    if problems:
        raise ConfigError(problems)
    return config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write_file


@pytest.fixture
def base(write: Write) -> None:
    write(
        "recipes/base.yaml",
        "model: {target: 'a.b:c', args: {dim: 3}}\n"
        "plugin: {name: gemini, chunk_size: 4MiB}\n"
        "train: {micro_batch: 4, seed: 7}\n"
        "freeze: {unfreeze: {10: [head]}}\n",
    )


def lines(overrides: Sequence[str]) -> list[str]:
    """The problems of composing `overrides`."""
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    found = error.value.lines()
    assert all(line.startswith("error: ") and "\n" not in line for line in found)
    return [line.removeprefix("error: ") for line in found]


def one_line(*overrides: str) -> str:
    (line,) = lines(overrides)
    return line


# Where names are looked up


@pytest.mark.usefixtures("base")
def test_a_recipe_is_plain_yaml_whose_keys_are_the_top_level() -> None:
    config = compose(["recipe=base"])
    assert config["recipe"] == "base"
    assert config["model"]["args"] == {"dim": 3}
    assert config["train"]["micro_batch"] == 4
    assert config["train"]["max_steps"] == Config().train.max_steps
    from_plain(Config, config)


def test_own_recipes_come_before_those_shipped_with_their_name(write: Write) -> None:
    write("recipes/llm-tiny.yaml", "train: {seed: 123}\n")
    assert compose(["recipe=llm-tiny"])["train"]["seed"] == 123


def test_own_groups_come_before_those_shipped_with_their_name(write: Write) -> None:
    write("conf/plugin/zero1.yaml", "name: zero1\nreshard: true\n")
    assert compose(["plugin=zero1"])["plugin"]["reshard"] is True


def test_any_section_may_be_a_group(write: Write) -> None:
    write("conf/optim/slow.yaml", "lr: 1e-5\n")
    assert compose(["optim=slow"])["optim"]["lr"] == 1e-5


@pytest.mark.usefixtures("base")
def test_a_recipe_may_be_a_file_that_builds_on_its_neighbours(write: Write) -> None:
    write("elsewhere/near.yaml", "defaults: [base, _self_]\ntrain: {eval_steps: 9}\n")
    file = write("elsewhere/mine.yaml", "defaults: [near, _self_]\ntrain: {seed: 9}\n")
    for written in ("elsewhere/mine.yaml", str(file)):
        config = compose([f"recipe={written}"])
        assert config["recipe"] == written
        train = config["train"]
        assert (train["seed"], train["eval_steps"], train["micro_batch"]) == (9, 9, 4)


@pytest.mark.parametrize(
    "name",
    ["josé", "a,b", "(old)", "a b", "x=1", "{1: 2}", "[3]", "'", 'say "hi"', '\\"\\', "é:ü\\"],
)
def test_any_path_and_name_can_be_written_as_an_argument(write: Write, name: str) -> None:
    file = write(f"{name}/config.yaml", "train: {seed: 5}")
    found = compose([as_override("recipe", str(file)), as_override("name", name)])
    assert found["train"]["seed"] == 5
    assert found["name"] == name


def test_recipes_may_lie_in_a_subfolder_and_have_dots_and_digits(write: Write) -> None:
    write("recipes/exp/llm-0.5b.yaml", "train: {seed: 1}\n")
    write("recipes/007.yml", "train: {seed: 2}\n")
    assert compose(["recipe=exp/llm-0.5b"])["train"]["seed"] == 1
    config = compose(["recipe=007"])
    assert (config["recipe"], config["train"]["seed"]) == ("007", 2)
    assert {"007", "exp/llm-0.5b"} <= set(Search.at(Path.cwd()).names("recipe"))


def test_the_folder_may_be_another_than_the_current_one(tmp_path: Path, write: Write) -> None:
    write("there/recipes/far.yaml", "train: {seed: 5}\n")
    assert compose(["recipe=far"], cwd=tmp_path / "there")["train"]["seed"] == 5


def test_every_plugin_is_shipped_as_a_group_and_every_section_is_a_layer() -> None:
    assert set(Search.at(Path.cwd()).names("plugin")) == {*ROWS, "auto"}
    assert "local" in Search.at(Path.cwd()).names("cluster")
    for name in Search.at(Path.cwd()).names("plugin"):
        assert compose([f"plugin={name}"])["plugin"]["name"] == name
    primary = (shipped("conf") / "colotrain.yaml").read_text()
    assert set(GROUPS) == {"recipe", *sections(Config)}
    assert [group for group in GROUPS if f"- {group}: null" not in primary] == []


# What wins over what


@pytest.mark.usefixtures("base")
def test_a_recipe_builds_on_another() -> None:
    Path("recipes/mine.yaml").write_text("defaults: [base, _self_]\ntrain: {seed: 8}\n")
    config = compose(["recipe=mine"])
    assert (config["train"]["seed"], config["train"]["micro_batch"]) == (8, 4)


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    "recipe",
    [
        "defaults: [base, _self_]\nplugin: zero2\n",
        "defaults: [base, _self_]\nplugin: {name: zero2, chunk_size: auto}\n",
        "defaults: [base, /plugin: zero2, _self_]\n",
        "defaults: [base, plugin: zero2, _self_]\n",
        "defaults: [base, _self_, override /plugin: zero2]\n",
    ],
)
def test_a_group_in_a_recipe_may_be_written_in_all_these_ways(write: Write, recipe: str) -> None:
    write("recipes/mine.yaml", recipe)
    plugin = compose(["recipe=mine"])["plugin"]
    assert (plugin["name"], plugin["chunk_size"]) == ("zero2", "auto")
    assert compose(["recipe=mine"])["train"]["micro_batch"] == 4


@pytest.mark.usefixtures("base")
def test_a_group_on_the_command_line_wins_over_the_recipe_and_its_leftovers() -> None:
    plugin = compose(["recipe=base", "plugin=zero1"])["plugin"]
    assert (plugin["name"], plugin["chunk_size"]) == ("zero1", "auto")
    plugin = compose(["plugin=gemini", "recipe=base"])["plugin"]
    assert (plugin["name"], plugin["chunk_size"]) == ("gemini", "4MiB")


@pytest.mark.usefixtures("base")
def test_values_win_over_everything_wherever_they_stand() -> None:
    config = compose(["plugin.name=zero3", "train.seed=1", "recipe=base", "plugin=zero1"])
    assert (config["plugin"]["name"], config["train"]["seed"]) == ("zero3", 1)


def test_the_last_of_two_values_wins() -> None:
    assert compose(["train.seed=1", "train.seed=2"])["train"]["seed"] == 2


def test_a_group_file_may_build_on_another(write: Write) -> None:
    write("conf/plugin/small.yaml", "defaults: [gemini, _self_]\nchunk_size: 1MiB\n")
    plugin = compose(["plugin=small"])["plugin"]
    assert (plugin["name"], plugin["chunk_size"]) == ("gemini", "1MiB")


@pytest.mark.usefixtures("base")
def test_a_saved_configuration_is_a_recipe_that_stands_alone(write: Write) -> None:
    overrides = ["recipe=base", "plugin=zero1", "~model.args.dim", "freeze.unfreeze={5:[x]}"]
    saved = compose(overrides)
    file = write("runs/one/config.yaml", json.dumps(saved))
    write("recipes/base.yaml", "train: {seed: 99}\nmodel: {args: {new: 1}}\n")
    again, problems = saved_or_composed([f"recipe={file}"], notices=[], trusted=True)
    assert problems == []
    assert again["recipe"] == "base"
    assert from_plain(Config, again) == from_plain(Config, saved)


def test_an_empty_recipe_and_empty_sections_set_nothing(write: Write) -> None:
    write("recipes/empty.yaml", "")
    write("recipes/bare.yaml", "defaults:\ntrain:\n# max_steps: 3\nplugin:\n")
    for name in ("empty", "bare"):
        assert from_plain(Config, compose([f"recipe={name}"])) == Config(recipe=name)


# The grammar of overrides


def any_value(random: Random, depth: int = 0) -> Any:
    kind = random.choice(["text"] * 3 + ["number", "none", "list", "dict"][: 2 if depth > 2 else 4])
    if kind == "text":
        return "".join(random.choices("ab0 '\"\\,:=[]{}()$#~*?@/.-\té\n", k=random.randrange(8)))
    if kind == "list":
        return [any_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == "dict":
        return {f"k{n}": any_value(random, depth + 1) for n in range(random.randrange(3))}
    return random.choice([0, -3, 1.5, -1e-5, 1e22, True, False]) if kind == "number" else None


def test_what_a_message_advises_is_read_as_it_was() -> None:
    parser = OverridesParser.create()
    for seed in range(300):
        value = any_value(Random(seed))
        assert parser.parse_override(as_override("key", value)).value() == value
        assert shlex.split(as_argument("key", value)) == [as_override("key", value)]


@pytest.mark.parametrize("word", ["null", "True", "nan", "inf", "1", "1e3", "0x1", "-", "", "a\\"])
def test_a_text_that_looks_like_another_value_stays_one(word: str) -> None:
    assert OverridesParser.create().parse_override(as_override("key", word)).value() == word


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ('freeze.patterns=["embed*","blocks.0.*"]', "freeze", "patterns", ["embed*", "blocks.0.*"]),
        ("freeze.unfreeze={5:[embed*]}", "freeze", "unfreeze", {5: ["embed*"]}),
        ("freeze.unfreeze.5=[embed*]", "freeze", "unfreeze", {"5": ["embed*"]}),
        ("plugin.overrides={blocks.0-3:{reshard:false}}", *["plugin", "overrides"], None),
        ('plugin.overrides={"blocks.0-3": {"reshard": false}}', *["plugin", "overrides"], None),
        ("+train.seed=3", "train", "seed", 3),
        ("++train.seed=3", "train", "seed", 3),
        ("optim.lr=3e-4", "optim", "lr", 3e-4),
        ("train.grad_clip=null", "train", "grad_clip", None),
        ("train.compile=true", "train", "compile", True),
        ("data.path='a b/é.txt'", "data", "path", "a b/é.txt"),
        ("train.eval_every=${train.max_steps}", "train", "eval_every", Config().train.max_steps),
    ],
)
def test_a_value_is_read_as_hydra_reads_it(
    override: str, section: str, key: str, value: Any
) -> None:
    expected = {"blocks.0-3": {"reshard": False}} if key == "overrides" else value
    assert compose([override])[section][key] == expected


def test_a_tilde_takes_a_setting_back_to_its_default(write: Write) -> None:
    write("recipes/mine.yaml", "optim: {lr: 5}\nplugin: zero2\n")
    config = compose(["recipe=mine", "~optim.lr", "~plugin"])
    settings = from_plain(Config, config)
    assert (settings.optim.lr, settings.plugin) == (Config().optim.lr, Config().plugin)
    assert "did you mean" in one_line("~optim.lrr")
    assert one_line("~optim.lr=7").startswith("~optim.lr=7: expected the value it has, 0.001")


def test_unknown_keys_are_kept_so_that_reading_can_name_them_all() -> None:
    with pytest.raises(ConfigError) as error:
        from_plain(Config, compose(["trian.max_steps=3", "train.max_step=3", "max_steps=3"]))
    found = "\n".join(error.value.lines())
    assert "trian: expected a known key; did you mean train?" in found
    assert "train.max_step=3: expected a known key; did you mean train.max_steps" in found
    assert "max_steps=3: expected a known key; did you mean train.max_steps?" in found


# References


def test_references_are_resolved_against_everything_the_schema_has(write: Write) -> None:
    write(
        "recipes/mine.yaml", "name: ${recipe}-${train.seed}\ntrain: {eval_every: '${data.seq_len}'}"
    )
    config = compose(["recipe=mine", "train.seed=4"])
    assert config["name"] == "mine-4"
    assert config["train"]["eval_every"] == Config().data.seq_len


@pytest.mark.parametrize(
    "recipe",
    [
        "name: ${train.nope}\n",
        "name: ${no_such_resolver:1}\n",
        "name: ${oc.env:COLOTRAIN_NO_SUCH_VARIABLE}\n",
        "data: {path: ['${nope}', b]}\n",
        "model: {args: '${model}'}\n",
    ],
)
def test_a_reference_that_leads_nowhere_is_a_problem(write: Write, recipe: str) -> None:
    write("recipes/mine.yaml", recipe)
    assert "expected a reference that resolves" in one_line("recipe=mine")


def test_references_in_a_circle_are_each_a_problem(write: Write) -> None:
    write("recipes/mine.yaml", "train: {seed: '${optim.eps}'}\noptim: {eps: '${train.seed}'}\n")
    assert len(lines(["recipe=mine"])) == 2


# Mistakes


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("plugin=zero1,zero2", "plugin=zero1,zero2: expected one value; a list of choices needs"),
        ("train.seed=range(1,3)", "train.seed=range(1,3): expected one value"),
        ("optim.betas=0.9,0.95", "one value; write optim.betas=[0.9,0.95] for a list"),
        ("freeze.patterns=a,b", "one value; write freeze.patterns=[a,b] for a list"),
        ("plugin=[zero1,zero2]", "expected one value"),
        ("llm-tiny", "llm-tiny: expected KEY=VALUE; did you mean recipe=llm-tiny?"),
        ("zero2", "zero2: expected KEY=VALUE; did you mean plugin=zero2?"),
        ("train.max_steps", "train.max_steps: expected KEY=VALUE; write train.max_steps=VALUE"),
        ("", "'': expected KEY=VALUE"),
        ("=3", "''=3: expected a key like train.seed"),
        ("a..b=1", "a..b=1: expected a key like train.seed"),
        ("train/seed=1", "train/seed=1: expected a key like train.seed; did you mean train.seed"),
        ("plugin@x=zero1", "plugin@x=zero1: expected a key like train.seed"),
        ("train.max_steps=[1", "train.max_steps=[1: expected a value that Hydra's grammar can"),
        ("name=a=b", """quote it: 'name="a=b"'"""),
        ("recipe=lm-tiny", "recipe=lm-tiny: expected a known recipe; did you mean llm-tiny"),
        ("recipe=", "recipe=: expected a known recipe; known: "),
        ("recipe=nope.yaml", "recipe=nope.yaml: expected a recipe file that exists"),
        ("plugin=zero9", "plugin=zero9: expected a known plugin; did you mean "),
        ("cluster=loca", "cluster=loca: expected a known cluster; did you mean local?"),
        ("optim=sgd", "optim=sgd: expected the name of a file; write optim.name=sgd, or"),
        ("model=x", "model=x: expected the name of a file; write model.KEY=x, or a file ./conf/"),
    ],
)
def test_a_wrong_argument_is_one_line(override: str, line: str) -> None:
    assert line in one_line(override)


def test_all_problems_are_reported_at_once() -> None:
    wrong = ["recipe=nope", "plugin=zero9", "foo", "a..b=1", "train.seed=1,2", "name=[", "~nope"]
    assert len(lines([*wrong, "train.seed=3"])) == len(wrong)


def test_what_is_right_is_composed_beside_what_is_wrong() -> None:
    config, problems = gather(["train.seed=3", "plugin=zero9", "cluster=local"])
    assert len(problems) == 1
    assert (config["train"]["seed"], config["plugin"]["name"]) == (3, "auto")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1,\nc: 3\n", "recipes/mine.yaml:4: expected valid YAML"),
        ("name: a\nname: b\n", "recipes/mine.yaml:2: expected valid YAML (found duplicate key"),
        ("a: !!python/object/apply:os.getpid []\n", "recipes/mine.yaml:1: expected valid YAML"),
        ("- 1\n", "recipes/mine.yaml: expected KEY: VALUE lines, not a list"),
        ("name: ${a\n", "recipes/mine.yaml: expected a YAML file of settings"),
        ("plugin: zero9\n", "plugin=zero9: expected a known plugin (in recipes/mine.yaml)"),
        ("defaults: [nope]\n", "recipe=nope: expected a known recipe (in recipes/mine.yaml)"),
        ("defaults: llm-tiny\n", "defaults (in recipes/mine.yaml): expected a list of names"),
        ("defaults: [{a: b, c: d}]\n", "defaults (in recipes/mine.yaml): expected a list of"),
        ("defaults: [mine, _self_]\n", "defaults=recipe/mine → recipe/mine: expected files that"),
        ("defaults: [_self_, _self_]\n", "recipe=mine: expected files that can be composed"),
    ],
)
def test_a_wrong_file_is_one_line(write: Write, text: str, line: str) -> None:
    write("recipes/mine.yaml", text)
    assert line in one_line("recipe=mine")


def test_a_file_that_is_no_text_is_one_line(folder: Path) -> None:
    (folder / "recipes").mkdir()
    (folder / "recipes/mine.yaml").write_bytes(b"name: \xff\n")
    assert "recipes/mine.yaml: expected a YAML file of settings" in one_line("recipe=mine")


def test_files_that_build_on_one_another_in_a_circle_are_named(write: Write) -> None:
    write("recipes/a.yaml", "defaults: [b]\n")
    write("recipes/b.yaml", "defaults: [a]\n")
    assert "recipe/a → recipe/b → recipe/a" in one_line("recipe=a")


def test_every_missing_name_of_a_file_is_reported(write: Write) -> None:
    write("recipes/mine.yaml", "defaults: [nope, nada]\nplugin: zero9\ncluster: moon\n")
    assert len(lines(["recipe=mine"])) == 4


# Hydra's application half stays asleep


def test_hydra_leaves_no_trace(folder: Path) -> None:
    before = (os.getcwd(), logging.getLogger().handlers[:], logging.getLogger().level)
    compose(["recipe=llm-tiny", "plugin=zero2"])
    assert (os.getcwd(), logging.getLogger().handlers[:], logging.getLogger().level) == before
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", Search.at(Path("/nonexistent")).names("recipe"))
def test_every_shipped_recipe_can_be_read(name: str) -> None:
    assert from_plain(Config, compose([f"recipe={name}"])).model.target is not None


def test_a_source_that_an_argument_names_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    notices = list[str]()
    words = ["recipe=llm-tiny", "data.path=a.txt", "model.hf=there", "+model.args.dtype=bfloat16"]
    config, problems = gather(words, cwd=tmp_path, notices=notices)
    assert not problems
    assert (config["data"]["corpus"], config["data"]["path"]) == (None, "a.txt")
    model = config["model"]
    assert (model["target"], model["hf"], model["args"]) == (None, "there", {"dtype": "bfloat16"})
    assert "data.path takes the place of data.corpus=stdlib" in notices
    both, _ = gather(["recipe=llm-tiny", "data.path=a", "data.target=b:c"], cwd=tmp_path)
    assert both["data"]["corpus"] == "stdlib"  # two are named: the plan says what is wrong


def test_null_arguments_in_a_file_drop_those_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text(
        "defaults: [llm-tiny, _self_]\nmodel: {target: 'net:Net', args: null}\n"
    )
    for words, expected in ((), {}), (["+model.args.width=9"], {"width": 9}):
        config, problems = gather(["recipe=own", *words], cwd=tmp_path)
        assert not problems
        assert config["model"]["args"] == expected


@pytest.mark.parametrize(("name", "place"), [("sgd", 0), ("muon", 1)])
def test_momentum_is_one_of_the_betas(name: str, place: int) -> None:
    plan = plan_from(["recipe=llm-tiny", f"optim.name={name}", "optim.momentum=0.5"])
    assert plan.optim.betas[place] == 0.5
