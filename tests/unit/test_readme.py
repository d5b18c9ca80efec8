"""README.md and docs/ say only what is true of the commands and keys that exist."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import runpy
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from omegaconf import OmegaConf

from colotrain.cli.main import app, verbs
from colotrain.config.schema import Config
from colotrain.plugins import ROWS
from colotrain.records import field_types, from_plain, sections

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list[str]:
    """The fenced blocks of all pages in one of `languages`."""
    texts = [page.read_text("utf-8") for page in PAGES]
    return [
        body for text in texts for language, body in FENCE.findall(text) if language in languages
    ]


def commands() -> list[list[str]]:
    """The arguments of every `colotrain` shown, also of those that `make run ARGS=…` stands for."""
    found = []
    text = "".join(blocks("bash", "sh", "console", "")).replace("\\\n", " ")
    for line in text.splitlines():
        if not line.lstrip().startswith(("colotrain ", "make run")):  # others quote otherwise
            continue
        words = shlex.split(line, comments=True)
        if words[:1] == ["colotrain"]:
            found.append(words[1:])
        elif words[:2] == ["make", "run"]:
            found += [
                ["run", *w.removeprefix("ARGS=").split()] for w in words if w.startswith("ARGS=")
            ]
    return found


def overrides() -> set[str]:
    words = [part for command in commands() for word in command[1:] for part in word.split()]
    shown = {word for word in words if "=" in word}
    return {word for word in shown if not word.startswith("-")}


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


def test_a_verb_that_is_shown_exists() -> None:
    shown = {command[0] for command in commands()}
    assert shown
    assert shown <= set(verbs())


@pytest.mark.parametrize("command", [shlex.join(words) for words in commands()])
def test_a_command_that_is_shown_is_one(command: str) -> None:
    """Verb, options and arguments are parsed as on the command line; nothing is run."""
    words = [word for word in shlex.split(command) if word not in ("...", "…")]
    for parsed in parse(words):
        parsed.close()


def parse(words: list[str]) -> Iterator[click.Context]:
    """The contexts of a command line, the outer one first."""
    group = typer.main.get_command(app)
    context = group.make_context("colotrain", words)
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


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_recipe_that_is_shown_is_valid(text: str) -> None:
    """A recipe, or the file of a group, which has the keys of one section."""
    keys = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(keys, dict)
    keys.pop("defaults", None)
    groups = [cls for cls in sections(Config).values() if set(keys) <= set(field_types(cls))]
    whole = set(keys) <= set(field_types(Config)) or not groups
    from_plain(Config if whole else groups[0], keys)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_that_is_shown_compiles(text: str) -> None:
    ast.parse(text)


def test_what_is_wrong_is_found() -> None:
    assert is_key("train.max_steps")
    assert is_key("model.args.width")
    assert is_key("freeze.except")
    assert not is_key("train.steps")
    assert not is_key("train.seed.more")


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
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
