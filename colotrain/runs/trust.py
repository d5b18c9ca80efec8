"""Trust in run directories: a plan names code that is called, and plans may come from others.

What this user writes into a run directory is signed with a key in the user's home, which no run
directory contains. Without a valid signature no code that a plan names is called, unless the user
allows it. So a directory can be moved, renamed and shared, and one from elsewhere runs no code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain.config.checks import CODE
from colotrain.errors import UsageError
from colotrain.rundir import RunDir, write_atomically
from colotrain.spec.observing import KEEPS_VARIABLES
from colotrain.spec.plan import RunPlan

OWN_MODELS = frozenset({"colotrain.models.llm:LLM"})
"""Models of this package, which any plan may name."""
NAMES = ("optim.name", "optim.schedule.name")
"""Settings that are code only if they have a colon; otherwise they name what colotrain has."""
CODE_SETTINGS = (*CODE, *NAMES, *KEEPS_VARIABLES)
"""Settings whose value names code, a command or a webhook, as in `calls`."""
KEY_BYTES = 32


def calls(plan: RunPlan) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return setting → (dotted path that the plan names, arguments of the call)."""
    found = {
        "model.target": (plan.model.target, plan.model.args),
        "data.target": (plan.data.target or "", plan.data.args),
        "train.loss": (plan.model.loss or "", {}),
        "data.collate": (plan.data.collate or "", {}),
        "data.sampler": (plan.data.sampler or "", {}),
        "train.metrics": (plan.train.metrics or "", {}),
        "train.on_gradients": (plan.train.on_gradients or "", {}),
        "optim.name": (plan.optim.name if ":" in plan.optim.name else "", plan.optim.args),
        "optim.schedule.name": (plan.optim.schedule if ":" in plan.optim.schedule else "", {}),
    }
    if (notify := plan.observe.notify) is not None:
        found["observe.notify.command"] = (shlex.join(notify.command), {"shell": notify.shell})
        found["observe.notify.url"] = (notify.url or "", {})  # it gets environment variables
    return {key: call for key, call in found.items() if call[0] and call[0] not in OWN_MODELS}


def write_signed(plan: RunPlan, rundir: RunDir, config: dict[str, Any] | None) -> None:
    """Write the plan and its configuration into the run directory and sign both."""
    rundir.write_plan(plan)
    text = None if config is None else _config_text(config)
    if text is not None:
        write_atomically(rundir.config_file, text)
    sign(rundir, plan, config=text)


def texts_of(plan: RunPlan, rundir: RunDir, config: dict[str, Any]) -> dict[Path, str]:
    """Return file → text of the plan and its configuration, as `write_signed` writes them."""
    return {rundir.plan_file: plan.to_json(), rundir.config_file: _config_text(config)}


def _config_text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"  # JSON is valid YAML, so it works as a recipe


def read_files(rundir: RunDir) -> dict[Path, str]:
    """Return file → text of what `write_signed` wrote earlier."""
    files = (rundir.plan_file, rundir.config_file, rundir.signature_file)
    return {path: path.read_text("utf-8") for path in files if path.is_file()}


def restore_files(before: dict[Path, str]) -> None:
    """Undo a `write_signed` whose settings trained nothing, so that plan and results match."""
    for path, text in before.items():
        write_atomically(path, text)


def sign(rundir: RunDir, plan: RunPlan, *, config: str | None = None) -> None:
    """Sign the plan, and `config` if given, as written by this user.

    If the home is not writable nothing is signed, and `check` will require `--trust-code`.
    """
    with suppress(OSError):
        made = _read(rundir) | {"plan": _signature(_text(plan))}
        made |= {"config": _signature(config)} if config is not None else {}
        write_atomically(rundir.signature_file, json.dumps(made) + "\n")


def check(
    rundir: RunDir, plan: RunPlan, *, trusted: bool, only: Collection[str] | None = None
) -> None:
    """Raise `UsageError` if the plan names code (in the settings `only`) but is not signed."""
    named = {key: path for key, (path, _) in calls(plan).items() if only is None or key in only}
    if named and not trusted and not _is_signed(rundir, "plan", _text(plan)):
        raise _refusal(rundir, named)


def check_config(rundir: RunDir, *, trusted: bool, given: Collection[str] = ()) -> None:
    """Same as `check` for the run's configuration, except keys `given` on the command line."""
    text = rundir.config_file.read_text("utf-8")
    if trusted or _is_signed(rundir, "config", text):
        return
    if named := {key: path for key, path in _named_in(text).items() if key not in given}:
        raise _refusal(rundir, named)


def _named_in(text: str) -> dict[str, str]:
    """Return setting → dotted path; a file in another form than `run` writes counts as code."""
    try:
        config = json.loads(text)
        found = {key: _value_at(config, key) for key in CODE_SETTINGS}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"config.yaml": "not as it was written"}
    if "defaults" in config or "${" in text:
        return {"config.yaml": "built from other files"}
    named = {key: str(path) for key, path in found.items() if path and str(path) not in OWN_MODELS}
    return {key: path for key, path in named.items() if key not in NAMES or ":" in path}


def _value_at(config: dict[str, Any], key: str) -> Any:
    """The value of a setting; None where the file has no such key, as those of older runs."""
    section, *inner = key.split(".")
    found: Any = config[section]
    for name in inner:
        found = found.get(name) if found is not None else None
    return found


def _refusal(rundir: RunDir, named: dict[str, str]) -> UsageError:
    what = ", ".join(f"{key}={path}" for key, path in named.items())
    return UsageError(
        f"{rundir.path}: it names code to run ({what}), and was not written by you on this machine",
        "look at what that is, then add --trust-code",
    )


def _text(plan: RunPlan) -> str:
    return json.dumps(calls(plan), sort_keys=True)


def _is_signed(rundir: RunDir, part: str, text: str) -> bool:
    try:
        return hmac.compare_digest(str(_read(rundir).get(part)), _signature(text, make=False))
    except OSError:
        return False


def _read(rundir: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(rundir.signature_file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(text: str, *, make: bool = True) -> str:
    return hmac.new(_key(make=make), text.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return this user's key, created if missing; raise `OSError` if that is impossible."""
    path = key_file()
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):  # another process created one meanwhile
            os.link(temporary, path)
        temporary.unlink()
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path}: others can read or write it")
        key = file.read()
    if len(key) != KEY_BYTES:
        raise PermissionError(f"{path}: is no key")
    return key


def key_file() -> Path:
    """Return `$XDG_STATE_HOME/colotrain/key`, else `~/.local/state/colotrain/key`."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser().absolute() / "colotrain" / "key"
    except RuntimeError as error:  # the home is unknown
        raise FileNotFoundError(str(error)) from error
