"""Copies of the git working tree, so that later edits do not affect a job that waits."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from colotrain.errors import UsageError
from colotrain.spec.schedulers import DEFAULT

TIMEOUT_S = 120.0


def take(cwd: Path, target: Path, *, key: str = f"cluster.{DEFAULT}.snapshot") -> Path:
    """Copy the files that git tracks around `cwd` to `target`; return the path of `cwd` in it.

    `key` is the setting that asks for it, for messages.

    Uncommitted changes are included, untracked files are not. The repository itself is unchanged.
    """
    top = Path(_git(cwd, "rev-parse", "--show-toplevel", key=key).decode().strip())
    changed = _git(cwd, "stash", "create", key=key).decode().strip()
    archive = _git(top, "archive", "--format=tar", changed or "HEAD", key=key)
    target.mkdir(mode=0o700, parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")
    return target / cwd.resolve().relative_to(top.resolve())


def _git(cwd: Path, *words: str, key: str) -> bytes:
    fix = f"submit from a git repository with a commit, or set {key}=false"
    try:
        return subprocess.run(
            ["git", "-C", str(cwd), *words], capture_output=True, check=True, timeout=TIMEOUT_S
        ).stdout
    except FileNotFoundError as error:
        raise UsageError(f"{key}=true: git is not installed", fix) from error
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()
        problem = f"{key}=true: no copy of {cwd} ({said or error})"
        raise UsageError(problem, fix) from error
