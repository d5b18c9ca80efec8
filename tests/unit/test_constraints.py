"""constraints.txt has versions that fit one another, for every extra and every Python."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
UNREACHABLE = ("error sending request", "Failed to fetch", "timed out", "dns error")


def solve(python: str, constraints: Path) -> str:
    """Return why a solver finds no versions for all extras under constraints, or nothing."""
    args = ["pip", "compile", "--quiet", "--all-extras", "--python-version", python]
    command = [
        UV,
        *args,
        "--output-file",
        "-",
        "--constraint",
        constraints,
        ROOT / "pyproject.toml",
    ]
    solved = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if any(words in solved.stderr for words in UNREACHABLE):
        pytest.skip(f"no package index: {solved.stderr.strip().splitlines()[-1]}")
    return "" if solved.returncode == 0 else solved.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", ["3.11.5", "3.12", "3.13"])
def test_every_extra_installs_under_the_constraints(python: str) -> None:
    assert not solve(python, ROOT / "constraints.txt")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_versions_that_do_not_fit_are_found(tmp_path: Path) -> None:
    """s3fs asks for a python-dateutil below 3: a pin of 4 is told."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    wrong = [line for line in pins if not line.startswith("python-dateutil==")]
    (tmp_path / "constraints.txt").write_text("\n".join([*wrong, "python-dateutil==4.0.0"]))
    assert "python-dateutil" in solve("3.12", tmp_path / "constraints.txt")


def test_each_package_of_pyproject_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").open()}
    for requirement in wanted:
        assert requirement.partition(">=")[0].lower() in names, requirement
