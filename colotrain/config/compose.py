"""Composition with Hydra: recipe, groups and KEY=VALUE arguments become one plain dictionary.

This is the only module that imports hydra. It uses the grammar of overrides, defaults lists and
packages; Hydra's application part (logging, output folders, working directories) is never started.
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from colotrain.config.files import ConfigFile, display_path, first_line, read_file
from colotrain.config.schema import Config
from colotrain.config.shipped import GROUPS, NAMED, PRIMARY, Search, run_holding
from colotrain.config.values import (
    bounded_references,
    clear_args_,
    delete_,
    give_way_,
    keep_texts,
    resolve_references,
    restore_texts,
    set_,
)
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.records import MISSING, as_argument, leaves, to_plain

_QUOTED_KEY = re.compile(r"""(["'])([\w.*?/+-]+)\1\s*:""")


@bounded_references()
def gather(
    overrides: Sequence[str],
    *,
    cwd: Path | None = None,
    notices: list[str] | None = None,
    saved: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the user's settings merged over the schema's defaults, and all problems.

    `recipe=NAME` and `SECTION=NAME` are looked up in `cwd`'s ./recipes and ./conf, then among the
    shipped ones. Unknown keys are kept, so that `records.read` can name them all. Notes about
    replaced sources are appended to `notices`. `saved` is the configuration of a
    run directory: values only, whose texts are never expanded and name no further files.
    """
    notices = [] if notices is None else notices
    version.setbase("1.3")
    cwd = cwd or Path.cwd()
    search, problems = Search.at(cwd), list[Problem]()
    parsed = list(_parse(overrides, search, problems))
    choices = {o.key_or_group: _written_name(o) for o in parsed if _is_choice(o)}
    recipe = choices.get("recipe")
    search = _drop_unknown(choices, search, cwd, problems)
    config = _merge(_Layers(search, choices, problems), saved or {})
    touched = {override.key_or_group for override in parsed}
    given = {o.key_or_group for o in parsed if not o.is_delete() and o.value() is not None}
    give_way_(config, touched=touched, given=given, notices=notices)
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if override.is_delete():
            delete_(config, key, value, problems)
        elif not _is_choice(override):
            set_(config, key, value, problems)
    if recipe is not None and config.get("recipe") is None:  # a saved one has its own
        config["recipe"] = recipe
    return restore_texts(resolve_references(config, problems)), problems


def recipe_of(overrides: Sequence[str]) -> str | None:
    """Return the recipe that the arguments name: a name or a file."""
    version.setbase("1.3")
    parsed = _parse(overrides, Search.at(Path.cwd()), [])
    names = [_written_name(o) for o in parsed if o.key_or_group == "recipe" and _is_choice(o)]
    return names[-1] if names else None


def settings_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what the arguments set, from dotted key to value; raise `ConfigError` for others."""
    version.setbase("1.3")
    problems = list[Problem]()
    parsed = list(_parse(overrides, Search.at(Path.cwd()), problems))
    if problems:
        raise ConfigError(problems)
    return {override.key_or_group: override.value() for override in parsed}


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return all combinations of comma-separated values: `a=1,2 b=3` is `a=1 b=3` and `a=2 b=3`.

    The last argument changes fastest. Raises `ConfigError` if an argument cannot be parsed.
    """
    version.setbase("1.3")
    parser, problems = OverridesParser.create(), list[Problem]()
    lists: list[list[str]] = []
    for text in overrides:
        try:
            override = _parse_lenient(parser, text)
            split = [[text]]
            if override.is_sweep_override():
                split = BasicSweeper.split_arguments([override], None)[0]
            lists.append([choice for (choice,) in split])
        except (HydraException, ValueError) as error:
            problems.append(_explain(parser, text, error))
    if problems:
        raise ConfigError(problems)
    return [list(choice) for choice in itertools.product(*lists)]


def _parse(overrides: Sequence[str], search: Search, problems: list[Problem]) -> Iterator[Override]:
    """Yield the arguments that Hydra can parse and that have one value; report the others."""
    parser = OverridesParser.create()
    for text in overrides:
        found = _parse_one(parser, text, search)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            yield found


def _parse_one(parser: OverridesParser, text: str, search: Search) -> Override | Problem:
    if "=" not in text and not text.startswith("~"):
        return not_an_override(text, search)
    try:
        override = _parse_lenient(parser, text)
    except (HydraException, ValueError) as error:  # also numbers of thousands of digits
        return _explain(parser, text, error)
    key = override.key_or_group
    if not key or override.package is not None or "/" in key:
        return wrong_key(text)
    if override.is_sweep_override() or (key in GROUPS and isinstance(override.value(), list)):
        return several_values(text)
    return override


def _parse_lenient(parser: OverridesParser, text: str) -> Override:
    """Parse an override; JSON's quoted keys are allowed: `{"blocks.0": 1}` as `{blocks.0: 1}`."""
    try:
        return parser.parse_override(text)
    except HydraException:
        unquoted = _QUOTED_KEY.sub(r"\2:", text)
        if unquoted == text:
            raise
        return parser.parse_override(unquoted)


def _explain(parser: OverridesParser, text: str, error: Exception) -> Problem:
    try:
        parser.parse_override(text.partition("=")[0] + "=0")
    except HydraException:
        return wrong_key(text)
    return wrong_value(text, first_line(error))


def _is_choice(override: Override) -> bool:
    chooses = override.key_or_group in GROUPS and not override.is_delete()
    return chooses and isinstance(override.value(), str | int | float)


def _written_name(override: Override) -> str:
    """Return the name as written: `recipe=007` stays `007`."""
    value = override.value()
    if isinstance(value, str):
        return value
    return (override.input_line or "").partition("=")[2].strip()


def _drop_unknown(
    choices: dict[str, str], search: Search, cwd: Path, problems: list[Problem]
) -> Search:
    """Remove choices without a file. A recipe given as a file may build on its neighbours."""
    for group, name in list(choices.items()):
        file = cwd / Path(name).expanduser()
        if group == "recipe" and file.suffix in (".yaml", ".yml") and file.is_file():
            choices[group] = file.name
            search = search.with_recipes_of(file.parent)
        elif search.find(f"{group}/{name}") is None:
            problems.append(search.unknown(group, name))
            del choices[group]
    return search


def _merge(layers: _Layers, saved: dict[str, Any]) -> DictConfig:
    """Merge every file, in the order of the defaults lists, over `saved` and the defaults."""
    config: DictConfig = OmegaConf.create(to_plain(Config()))
    if layers.has_circle():
        return config
    try:
        config.merge_with(OmegaConf.create(keep_texts(saved)))
        defaults = create_defaults_list(
            repo=layers,
            config_name=PRIMARY,
            overrides_list=[],
            prepend_hydra=False,
            skip_missing=False,
        )
        for layer in defaults.defaults:
            found = layers.load_config(layer.config_path or "")
            if found is not None:
                embedded = OmegaConf.create(_embed(found.config, layer.package))
                config.merge_with(embedded)
                clear_args_(config)
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
        names = " ".join(f"{group}={name}" for group, name in layers.choices.items())
        expected = f"files that can be composed ({first_line(error)})"
        layers.problems.append(Problem(key=names, expected=expected, fix="correct their defaults"))
    return config


def _embed(config: Any, package: str | None) -> Any:
    """Return `config` under its package: `plugin` for conf/plugin/zero2.yaml."""
    if not package:
        return config
    whole = OmegaConf.create({})
    OmegaConf.update(whole, package, config, merge=False)
    return whole


class _Layers(ConfigRepository):
    """Gives Hydra the files of a run, and `choices` as the names in the primary file.

    A recipe's keys are at the top level without a package header, and `plugin: zero2` in a recipe
    means conf/plugin/zero2.yaml. Every name in a defaults list is checked when its file is read, so
    that all missing files are reported together.
    """

    def __init__(
        self,
        search: Search,
        choices: dict[str, str],
        problems: list[Problem],
    ) -> None:
        self.sources = []
        self.search = search
        self.choices = choices
        self.problems = problems
        self.files: dict[Path, ConfigFile] = {}
        self.loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.loaded:
            self.loaded[config_path] = self._load(config_path)
        return self.loaded[config_path]

    def config_exists(self, config_path: str) -> bool:
        return self.search.find(config_path) is not None

    def has_circle(self) -> bool:
        """Whether some file builds on itself; this is then reported."""
        starts = [f"{group}/{name}" for group, name in self.choices.items()]
        return any(self._circles(start, ()) for start in starts)

    def _circles(self, config_path: str, above: tuple[str, ...]) -> bool:
        if config_path in above:
            circle = " → ".join((*above[above.index(config_path) :], config_path))
            expected = "files that build on one another without a circle"
            fix = "take a name out of a defaults list, or rename a file that has another's name"
            problem = Problem(key="defaults", value=circle, expected=expected, fix=fix)
            self.problems.append(problem)
            return True
        found = self.load_config(config_path)
        below = [d.path or "" for d in _names((found and found.defaults_list) or [])]
        return any(self._circles(path.lstrip("/"), (*above, config_path)) for path in below)

    def _load(self, config_path: str) -> ConfigResult | None:
        """Load a file; one that cannot be read is reported and treated as empty."""
        file = self.search.find(config_path)
        if file is None:
            return None
        found = self._read(file)
        is_recipe = config_path.startswith("recipe/")
        defaults = self._defaults(config_path, found.settings, file)
        if config_path == PRIMARY:
            self._fill_in(defaults)
        else:
            defaults = self._absolute(defaults, config_path.partition("/")[0], file)
        if is_recipe:
            _insert_before_self(defaults, self._take_out_names(found.settings, file))
        return ConfigResult(
            provider=PRIMARY,
            path=str(file),
            config=found.settings,
            header={"package": found.package or ("_global_" if is_recipe else None)},
            defaults_list=defaults,
        )

    def _read(self, file: Path) -> ConfigFile:
        if file not in self.files:
            if run_holding(file) is None:
                self.files[file] = read_file(file, self.problems)
            else:
                expected = "a recipe of your own, no file of a run directory"
                fix = "look at it, and copy it to recipes/NAME.yaml in your folder"
                key = display_path(file)
                self.problems.append(Problem(key=key, expected=expected, fix=fix))
                self.files[file] = ConfigFile(settings=OmegaConf.create({}), package=None)
        return self.files[file]

    def _defaults(self, config_path: str, settings: DictConfig, file: Path) -> list[InputDefault]:
        try:
            if "defaults" in settings and settings["defaults"] is None:
                del settings["defaults"]
            raw = self._extract_defaults_list(config_path, settings)
            return self._create_defaults_list(config_path, raw)
        except (OmegaConfBaseException, ValueError, AssertionError) as error:
            key = f"defaults (in {display_path(file)})"
            expected = f"a list of names ({first_line(error)})"
            fix = "write it as in [llm-base, _self_]"
            self.problems.append(Problem(key=key, expected=expected, fix=fix))
            return []

    def _fill_in(self, defaults: list[InputDefault]) -> None:
        for default in defaults:
            if isinstance(default, GroupDefault):
                default.value = self.choices.get(default.group or "")

    def _absolute(self, defaults: list[InputDefault], group: str, file: Path) -> list[InputDefault]:
        """Resolve entries to their files: `base` in a recipe, `plugin: x`, `/plugin: x`."""
        entries: list[InputDefault] = []
        for default in defaults:
            if isinstance(default, ConfigDefault) and default.is_self():
                entries.append(default)
            elif isinstance(default, ConfigDefault):
                inner, _, name = (default.path or "").lstrip("/").partition("/")
                if inner not in GROUPS or not name:
                    inner, name = group, default.path or ""
                entries += self._checked(inner, name, file, default)
            elif isinstance(default, GroupDefault):
                inner = (default.group or "").lstrip("/")
                inner = inner if inner.partition("/")[0] in GROUPS else f"{group}/{inner}"
                names = default.value if isinstance(default.value, list) else [default.value]
                for name in filter(None, names):
                    entries += self._checked(inner, name, file, default)
        return entries

    def _take_out_names(self, settings: DictConfig, file: Path) -> list[ConfigDefault]:
        """Move `plugin: zero2` into the defaults list; an empty section sets nothing."""
        found: list[ConfigDefault] = []
        written = OmegaConf.to_container(settings, resolve=False)
        assert isinstance(written, dict)
        for group in (group for group in GROUPS[1:] if group in written):
            value = written[group]
            if value is None:
                del settings[group]
            elif isinstance(value, str) and value != MISSING and "${" not in value:
                del settings[group]
                found += self._checked(group, value, file)
        return found

    def _checked(
        self, group: str, name: str, file: Path, written: InputDefault | None = None
    ) -> list[ConfigDefault]:
        """Return the entry for GROUP/NAME; without such a file, report it and return no entry."""
        target = self.search.find(f"{group}/{name}")
        if target is None:
            if written is None or not written.is_optional():
                self.problems.append(self.search.unknown(group, name, where=display_path(file)))
            return []
        package = written.package if written is not None else None
        if package is None and group != "recipe" and self._read(target).package is None:
            package = "_global_." + group.replace("/", ".")
        return [ConfigDefault(path=f"/{group}/{name}", package=package)]


def _names(defaults: list[InputDefault]) -> Iterator[ConfigDefault]:
    for default in defaults:
        if isinstance(default, ConfigDefault) and not default.is_self():
            yield default


def _insert_before_self(defaults: list[InputDefault], named: list[ConfigDefault]) -> None:
    """Merge the groups that a recipe names after the recipes it builds on, before its own keys."""
    own = [index for index, default in enumerate(defaults) if default.is_self()]
    at = own[0] if own else len(defaults)
    defaults[at:at] = named


def not_an_override(text: str, search: Search) -> Problem:
    """Return the problem of a bare word: `llm-tiny` may mean `recipe=llm-tiny`."""
    groups = [group for group in NAMED if text in search.names(group)]
    hint = suggest(text, (*leaves(Config), "recipe", "plugin"))
    if groups:
        hint = "did you mean " + " or ".join(f"{group}={text}" for group in groups) + "?"
    elif text and text not in leaves(Config) and Path(text).exists():
        ways = [as_argument(key, text) for key in ("data.path", "model.hf", "recipe")]
        hint = f"write {', '.join(ways[:2])} or {ways[2]}, as what it is"
    elif text in leaves(Config) or not hint.startswith("did you mean"):
        hint = f"write {text}=VALUE" if text in leaves(Config) else "as in train.max_steps=10"
    return Problem(key=text or "''", expected="KEY=VALUE", fix=hint)


def wrong_key(text: str) -> Problem:
    key, _, value = text.partition("=")
    hint = suggest(key.lstrip("+~").replace("/", "."), leaves(Config))
    fix = hint if hint.startswith("did you mean") else "keys are names joined by dots"
    return Problem(key=key or "''", value=value, expected="a key like train.seed", fix=fix)


def wrong_value(text: str, reason: str) -> Problem:
    """Return the problem of a value that Hydra's grammar rejects; most need quotes."""
    key, _, value = text.partition("=")
    fix = f"quote it: {as_argument(key, value)}"
    if value.startswith(("[", "{", '"', "'")):
        fix = "close every bracket and quote, and put the whole argument in single quotes"
    expected = f"a value that Hydra's grammar can read ({reason})"
    return Problem(key=key, value=value, expected=expected, fix=fix)


def several_values(text: str) -> Problem:
    key, _, value = text.partition("=")
    fix = "a list of choices needs `run --sweep` or `submit --sweep`"
    if _takes_list(key):
        fix = f"write {key}=[{value}] for a list"
    return Problem(key=key, value=value, expected="one value", fix=fix)


def _takes_list(key: str) -> bool:
    wanted = leaves(Config).get(key.lstrip("+"))
    kinds = {typing.get_origin(w) for w in (wanted, *typing.get_args(wanted))}
    return bool(kinds & {list, tuple})
