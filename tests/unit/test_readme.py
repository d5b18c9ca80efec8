"""README.md and docs/ say only what is true of the commands and keys that exist."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from omegaconf import OmegaConf

from colotrain.cli.main import app, guarded, verbs
from colotrain.config.schema import Config
from colotrain.records import field_types, from_plain, sections
from colotrain.spec.plugins import ROWS
from tests.following import TAKES_LONG
from tests.pages import PAGES, ROOT, blocks, code_in_text, commands, words

CONTRIBUTING = ROOT / "CONTRIBUTING.md"

CONFIGURED = ("run", "plan", "verify", "submit", "inspect-grads")
"""Verbs that take a whole configuration."""
SHOWN = {shlex.join(c): page for page in [*PAGES, CONTRIBUTING] for c in commands(page)}
"""Every command of every block, once, with the page (the last one) that shows it."""
PLACEHOLDERS = {"…", "...", "NAME"}


def shown(*languages: str) -> list[str]:
    """The fenced blocks of all pages in one of `languages`."""
    return [block.body for page in PAGES for block in blocks(page) if block.language in languages]


def in_text() -> list[str]:
    """Commands in backquotes, within sentences and tables."""
    found = {code for page in PAGES for code in code_in_text(page)}
    return sorted(code for code in found if re.match(r"colotrain [a-z]", code))


def overrides() -> set[str]:
    lists = [*map(shlex.split, SHOWN)] + [words(code) for code in in_text()]
    parts = [part for found in lists for word in found[1:] for part in word.split()]
    return {part for part in parts if "=" in part and not part.startswith("-")}


def is_key(path: str) -> bool:
    """Whether the schema has the dotted `path`; a free mapping takes anything below it."""
    kind: object = Config
    for part in path.lstrip("+~").split("."):
        if typing.get_origin(kind) is dict:
            return True
        if not dataclasses.is_dataclass(kind):
            return False
        kind = field_types(typing.cast(type, kind)).get(part)
    return kind is not None


def is_shipped(folder: str, names: str) -> bool:
    """Whether each of `names` (a sweep has several) is shipped, or shown as a file of one's own."""
    return all(
        (ROOT / folder / f"{name}.yaml").is_file()
        or any(f"{folder}/{name}.yaml" in page.read_text("utf-8") for page in PAGES)
        or name in PLACEHOLDERS
        for name in names.split(",")
    )


def rows(heading: str) -> list[str]:
    """The first column of the table under a heading of README.md."""
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `?(\w[\w-]*)`? \|", section, re.MULTILINE)[1:]


def test_the_table_has_every_verb_and_no_other() -> None:
    assert sorted(rows("Verbs")) == sorted(verbs())


def test_the_table_has_every_plugin_and_no_other() -> None:
    assert rows("Plugins") == list(ROWS)


@pytest.mark.parametrize("command", [*SHOWN, *(c.partition(" ")[2] for c in in_text())])
def test_a_command_that_is_shown_is_one(command: str) -> None:
    """Verb, options and arguments are parsed as on the command line; nothing is run."""
    given = [word for word in words(command) if word not in ("...", "…")]
    for parsed in parse(given):
        parsed.close()


def parse(given: list[str]) -> Iterator[click.Context]:
    """The contexts of a command line, the outer one first."""
    group = typer.main.get_command(app)
    context = group.make_context("colotrain", given)
    yield context
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, context._protected_args)
        rest = [*rest, *context.args]
        assert command is not None
        context = command.make_context(name, rest, parent=context)
        yield context


@pytest.mark.parametrize("override", sorted(overrides()))
def test_a_key_that_is_shown_exists(override: str) -> None:
    key, _, value = override.partition("=")
    assert is_key(key), f"{key} is not a key of the configuration"
    if key == "recipe":
        assert is_shipped("recipes", value)
    elif dataclasses.is_dataclass(field_types(Config).get(key)):
        assert is_shipped(f"conf/{key}", value)


@pytest.mark.parametrize("text", shown("yaml"))
def test_a_recipe_that_is_shown_is_valid(text: str) -> None:
    """A recipe, or the file of a group, which has the keys of one section."""
    keys = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(keys, dict)
    keys.pop("defaults", None)
    groups = [cls for cls in sections(Config).values() if set(keys) <= set(field_types(cls))]
    whole = set(keys) <= set(field_types(Config)) or not groups
    from_plain(Config if whole else groups[0], keys)


@pytest.mark.parametrize("text", shown("python"))
def test_python_that_is_shown_compiles(text: str) -> None:
    ast.parse(text)


def test_a_key_that_is_named_in_a_sentence_exists() -> None:
    """`train.max_steps`, `train.precision=bf16`: a section of the configuration, and then more."""
    keys = set(field_types(Config))
    named = {
        (page.name, found[1])
        for page in PAGES
        for code in code_in_text(page)
        if (found := re.match(r"([a-z]+\.[a-z][a-z_.]*[a-z_])(=|$)", code))
        and found[1].partition(".")[0] in keys
    }
    assert len(named) > 100
    files = {".bin", ".py", ".yaml", ".json", ".toml"}
    wrong = {(n, k) for n, k in named if not is_key(k) and Path(k).suffix not in files}
    assert wrong == set()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file of configuration that a page shows."""
    for page in PAGES:
        for block in blocks(page):
            if block.path.endswith(".yaml"):
                path = tmp_path / block.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    return tmp_path


def is_of_shipped_recipe(command: list[str]) -> bool:
    chosen = next((w.partition("=")[2] for w in command if w.startswith("recipe=")), "none")
    return (ROOT / "recipes" / f"{chosen}.yaml").is_file()


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in SHOWN
        if (given := shlex.split(command))[0] in CONFIGURED and is_of_shipped_recipe(given)
    ],
)
def test_what_a_command_sets_is_a_plan(
    workplace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its full size, as it stands; whether it fits depends on the machine (exit code 3)."""
    for block in blocks(SHOWN[command]):
        if block.path.endswith(".py"):
            (workplace / block.path).write_text(block.body)
    verb, *given = shlex.split(command)
    for word in given:
        if word.startswith("checkpoint.resume="):  # of a run that the page made before
            (workplace / "runs" / word.partition("=")[2]).mkdir(parents=True)
    if verb == "submit":
        assert guarded(["submit", *given, "--dry-run"]) == 0
        assert "-m colotrain" in re.sub(r"\n\s+- ", " ", capsys.readouterr().out)
        return
    if verb == "plan" and not set(given) & TAKES_LONG:
        assert guarded(["plan", *given]) in (0, 3)
    else:
        assert guarded(["plan", *(w for w in given if is_setting(w)), "--json"]) in (0, 3)
        assert json.loads(capsys.readouterr().out)["batch"]["owner"] == "colotrain"


def is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("-") and " " not in word


def test_a_target_of_make_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    lines = [line for page in [*PAGES, CONTRIBUTING] for b in blocks(page) for line in b.lines]
    lines += [code for page in [*PAGES, CONTRIBUTING] for code in code_in_text(page)]
    named = {line.split()[1] for line in lines if re.match(r"make [a-z]", line)}
    assert {"run", "test", "site"} <= named | {"site"}
    assert named <= targets


def test_what_is_to_be_installed_is_what_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [line for page in PAGES for block in blocks(page) for line in block.lines]
    lines += [code for page in PAGES for code in code_in_text(page)]
    installed = [words(line)[2:] for line in lines if line.startswith("pip install ")]
    assert installed
    for word in (word for line in installed for word in line):
        if word.startswith("torch=="):
            assert word in pins
        elif extra := re.fullmatch(r"colotrain\[(\w+)\]", word):
            assert extra[1] in project["optional-dependencies"]


def test_what_is_wrong_is_found() -> None:
    assert is_key("train.max_steps")
    assert is_key("model.args.width")
    assert is_key("freeze.except")
    assert not is_key("train.steps")
    assert not is_key("train.seed.more")


def test_commands_stand_in_blocks_of_bash_alone() -> None:
    """Where they are found, and run."""
    for page in [*PAGES, CONTRIBUTING]:
        for block in blocks(page):
            if block.language != "bash":
                hidden = re.findall(r"^(?:\$ )?(?:colotrain|make|pip) .*", block.body, re.MULTILINE)
                assert hidden == [], page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_file_that_is_shown_is_used_by_a_command(page: Path) -> None:
    found = blocks(page)
    lines = "\n".join(line for block in found for line in block.lines)
    recipes = "\n".join(block.body for block in found if block.language == "yaml")
    for path in (block.path for block in found if block.path):
        stem, folder = Path(path).stem, Path(path).parent.name
        uses = {
            "recipes": (f"recipe={stem} ", f"recipe={stem}\n", f"[{stem}, _self_]"),
            "": (f"python {path}", f"={stem}:", f'"{stem}:'),
        }.get(folder, (f"{folder}={stem} ", f"{folder}={stem}\n"))
        text = f"{lines}\n{recipes}"
        assert any(use in text for use in uses), f"{page.name} shows {path} and does not use it"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, CONTRIBUTING]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_reference_of_keys_is_up_to_date() -> None:
    page = ROOT / "docs" / "configuration.md"
    renew = runpy.run_path(str(ROOT / "scripts" / "write_reference.py"))["page"]
    assert renew(page.read_text("utf-8")) == page.read_text("utf-8"), "run `make docs`"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "journal.md":
            relative = page.relative_to(ROOT / "docs").with_suffix(".html")
            assert (tmp_path / relative).is_file(), f"{page.name} is not in the site"
