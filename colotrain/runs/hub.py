"""Names of the Hugging Face Hub in settings: folders of its cache, downloaded where they are not.

Code and pickles are never downloaded. The path of such a folder ends with the commit, and a run's
files have the path: a run that goes on reads the same weights, without the network.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain.errors import Problem, message_of
from colotrain.show.console import tell
from colotrain.spec.hub import is_hub_name
from colotrain.spec.quantities import format_size

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.json", "merges.txt")
MODEL = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
TEACHER = "train.distill.teacher"
KEYS = {"model.hf": MODEL, TEACHER: MODEL, "data.tokenizer": TOKENIZER}
"""Setting that names a directory → the files of the Hub that it needs."""
LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "metal/*", "consolidated*")
"""Copies of weights for other programs."""


def keys_with_names(config: dict[str, Any]) -> list[str]:
    """Return the settings of a composed configuration that have names of the Hub."""
    found = [key for key in KEYS if is_hub_name(_value(config, key))]
    is_taught = _value(config, "train.objective") == "distill"
    return [key for key in found if is_taught or key != TEACHER]


def with_folders_(config: dict[str, Any], notices: list[str]) -> Iterator[Problem]:
    """Replace names of the Hub in a composed configuration by folders; yield what is wrong.

    `model.revision` is of all of them; afterwards it is null, as the folder is of one commit.
    """
    model = config.get("model")
    revision = model.get("revision") if isinstance(model, dict) else None
    found = keys_with_names(config)
    if revision is not None and not found:
        expected, fix = "none beside a directory", "name a model of the Hub, or set it to null"
        yield Problem(key="model.revision", value=revision, expected=expected, fix=fix)
    for key in found:
        section, _, last = key.rpartition(".")
        name = _value(config, key)
        folder = yield from _folder(key, name, revision, KEYS[key])
        if folder is not None:
            _value(config, section)[last] = folder
            notices.append(f"{key}={name}: commit {Path(folder).name}")
    if found and isinstance(model, dict):
        model["revision"] = None


def _value(config: dict[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _folder(
    key: str, name: str, revision: str | None, patterns: tuple[str, ...]
) -> Generator[Problem, None, str | None]:
    """Return the folder of a repository's files, of one commit; yield why there is none."""
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        fix = "pip install 'colotrain[hf]', or give a directory"
        yield Problem(key=key, value=name, expected="huggingface_hub, for a name", fix=fix)
        return None
    page = f"{constants.ENDPOINT}/{name}"
    expected, fix = "a repository of the Hub", f"look at {page}, or give a directory"
    try:
        return _download(name, revision=revision, allow_patterns=list(patterns))
    except errors.GatedRepoError:
        fix = f"ask for access at {page}, and log in by `hf auth login`"
        expected = "a model that you may read"
    except errors.RepositoryNotFoundError:
        fix = f"look for it at {page} (a private one: `hf auth login`), or give a directory"
    except errors.RevisionNotFoundError:
        key, name = "model.revision", str(revision)
        expected, fix = f"a branch, tag or commit of {page}", "correct it"
    except errors.LocalEntryNotFoundError:
        where = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{page} does not answer"
        expected = f"a directory, or a name whose files are in {constants.HF_HUB_CACHE} ({where})"
        fix = "give a directory, or `hf download` it where there is a network"
    except Exception as error:  # whatever a proxy, a server, a disk or the library does
        expected = f"a repository of the Hub that can be read ({message_of(error)})"
    yield Problem(key=key, value=name, expected=expected, fix=fix)
    return None


def _download(name: str, **wanted: Any) -> str:
    """Return the folder of a repository, after downloading what the cache lacks of it.

    Raises the errors of huggingface_hub, and OSError where the disk has too little space.
    """
    from huggingface_hub import constants, errors, snapshot_download, utils

    wanted["ignore_patterns"] = list(LEFT_OUT)
    utils.disable_progress_bars()
    with suppress(errors.DryRunError):  # without a network: what the cache has
        missing = [f for f in snapshot_download(name, dry_run=True, **wanted) if f.will_download]
        size, folder = sum(f.file_size for f in missing), Path(constants.HF_HUB_CACHE)
        if missing:
            there = next(place for place in (folder, *folder.parents) if place.exists())
            if size > (free := shutil.disk_usage(there).free):
                raise OSError(f"{format_size(size)} to download, {format_size(free)} in {folder}")
            tell(f"downloading {name} ({format_size(size)}) to {folder}")
    if sys.stderr.isatty():
        utils.enable_progress_bars()
    return str(snapshot_download(name, **wanted))
