"""Lookup of recipes and configuration groups: in the user's folders, then the shipped ones.

Files of run directories are none of them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from colotrain.config.schema import Config
from colotrain.current_folder import holder_of, run_around
from colotrain.errors import Problem, suggest
from colotrain.records import field_types, sections
from colotrain.rundir import RunDir, regular

PACKAGE = Path(__file__).resolve().parents[1]
PRIMARY = "colotrain"
"""File in the shipped `conf` with the defaults list."""
GROUPS = ("recipe", *sections(Config))
"""Groups whose files can be chosen by name: recipes first, then every section of the schema."""
NAMED = ("recipe", "plugin", "cluster", "hardware")
"""Groups with shipped files, in which an unknown name is most likely misspelt."""
ENDINGS = (".yaml", ".yml")


def shipped(kind: Literal["conf", "recipes"]) -> Path:
    """Return the folder in an installed wheel, or beside the package in a checkout."""
    installed = PACKAGE / "_shipped" / kind
    return installed if installed.is_dir() else PACKAGE.parent / kind


@dataclass(frozen=True, slots=True)
class Search:
    """Folders that are searched in order."""

    recipes: tuple[Path, ...]
    conf: tuple[Path, ...]

    left_out: str = ""
    """Why the current folder is not searched."""

    @staticmethod
    def at(cwd: Path) -> Search:
        recipes, conf = shipped("recipes"), shipped("conf")
        if holder := holder_of(cwd):
            return Search(recipes=(recipes,), conf=(conf,), left_out=holder)
        return Search(recipes=(cwd / "recipes", recipes), conf=(cwd / "conf", conf))

    def find(self, config_path: str) -> Path | None:
        """Return the file of `GROUP/NAME`, or of the primary configuration."""
        group, _, name = config_path.partition("/")
        if not name:
            file = shipped("conf") / f"{PRIMARY}.yaml"
            return file if group == PRIMARY else None
        endings = ("",) if name.endswith(ENDINGS) else ENDINGS
        candidates = (f / f"{name}{ending}" for f in self._folders(group) for ending in endings)
        return next((file for file in candidates if file.is_file()), None)

    def names(self, group: str) -> list[str]:
        """Return the names in `group`, including the first level of subfolders."""
        patterns = [f"{depth}*{ending}" for depth in ("", "*/") for ending in ENDINGS]
        found = {
            file.relative_to(folder).with_suffix("").as_posix()
            for folder in self._folders(group)
            for pattern in patterns
            for file in folder.glob(pattern)
        }
        return sorted(found)

    def with_recipes_of(self, folder: Path) -> Search:
        """Return a search with `folder` first: a recipe file may build on its neighbours."""
        return replace(self, recipes=(folder, *self.recipes))

    def unknown(self, group: str, name: str, *, where: str = "") -> Problem:
        """Return the problem of a name without a file; `where` is the file that has the name."""
        known = self.names(group)
        place = f" (in {where})" if where else ""
        expected, fix = f"a known {group}", suggest(name, known)
        others = [other for other in NAMED if name in self.names(other)]
        if group == "recipe" and name.endswith(ENDINGS):
            expected = "a recipe file that exists"
        elif not known or group not in NAMED:
            key = "name" if "name" in field_types(sections(Config)[group]) else "KEY"
            fix = f"write {group}.{key}={name}, or a file ./conf/{group}/{name}.yaml"
            expected = "the name of a file" + (f" ({', '.join(known)})" if known else "")
        if others:
            fix = "did you mean " + " or ".join(f"{other}={name}" for other in others) + "?"
        if self.left_out:
            fix = f"{fix} ({self.left_out}: no recipes and conf files are taken from there)"
        return Problem(key=group, value=name, expected=expected + place, fix=fix)

    def _folders(self, group: str) -> list[Path]:
        if group == "recipe":
            return list(self.recipes)
        return [folder / group for folder in self.conf]


def recipe_names(cwd: Path | None = None) -> list[str]:
    return Search.at(cwd or Path.cwd()).names("recipe")


def run_holding(file: Path) -> RunDir | None:
    """Return the run directory in which a file lies; None if it lies in none.

    The current folder and those above it are the user's own unless `run_around` says otherwise:
    files in them count only if they have the name of a run's configuration. A file of that name
    that is JSON, as `run` writes it, counts anywhere.
    """
    file, here = file.resolve(), Path.cwd()
    is_config = file.stem == RunDir(file.parent).config_file.stem
    if is_config and _begins_with(file, b"{"):
        return RunDir(file.parent)
    for folder in file.parents:
        if here.is_relative_to(folder) and not (is_config and folder == file.parent):
            return RunDir(run) if (run := run_around(file.parent)) else None
        rundir = RunDir(folder)
        files = (rundir.plan_file, rundir.signature_file, rundir.launcher_file)
        if any(path.exists() for path in (*files, rundir.launcher_events, rundir.heartbeats)):
            return rundir
    return None


def _begins_with(file: Path, begin: bytes) -> bool:
    """Whether a regular file can be read and begins with these bytes."""
    with suppress(OSError), open(regular(file, os.O_RDONLY), "rb") as opened:
        return opened.read(len(begin)) == begin
    return False
