"""Translation of another tool's configuration file to a recipe."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colotrain.errors import ConfigError, Problem, UsageError, suggest
from colotrain.migrate import accelerate, axolotl, deepspeed, lightning, llamafactory, torchtune
from colotrain.migrate.defaults import Defaults, silent
from colotrain.migrate.findings import DECAY, MEANING, Finding, Rules, read
from colotrain.migrate.lightning_callbacks import with_monitors
from colotrain.rundir import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Configuration files of one tool."""

    rules: Rules
    signs: frozenset[str]
    """Typical top-level keys."""
    defaults: Defaults
    """Settings that the tool uses where a file says nothing."""
    is_whole: bool = False
    """Whether files name model and data; otherwise those of `BASE` are used."""


FORMATS = {
    "deepspeed": Format(
        rules=deepspeed.RULES,
        signs=deepspeed.SIGNS,
        defaults=silent("optimizer.type", "optimizer.params"),
    ),
    "accelerate": Format(rules=accelerate.RULES, signs=accelerate.SIGNS, defaults=silent()),
    "lightning": Format(
        rules=lightning.RULES,
        signs=lightning.SIGNS,
        defaults=silent("optimizer.class_path", "optimizer.init_args", is_torch=True),
    ),
    **{
        name: Format(rules=tool.RULES, signs=tool.SIGNS, defaults=tool.defaults, is_whole=True)
        for name, tool in (
            ("axolotl", axolotl),
            ("llamafactory", llamafactory),
            ("torchtune", torchtune),
        )
    },
}
PLUGIN_ORDER = ("gemini", "fsdp-hybrid", "zero3", "zero2", "zero1", "auto")
"""Priority of plugins where keys ask for several."""
BASE = "llm-tiny"
"""Recipe whose model and data are used until users name their own."""
OWN = (
    f"those of {BASE} until you set model.target (and model.args: null or your own) or model.hf, "
    "and data.path or data.target"
)
"""Note about model and data of files that do not name them."""
TRAINING = (
    "train.max_steps",
    "train.global_batch",
    "train.micro_batch",
    "train.eval_every",
    "train.eval_steps",
    "optim.name",
    "optim.lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
)
"""Keys reported to come from BASE or colotrain's defaults where the recipe does not set them."""


def load(path: Path) -> dict[str, Any]:
    """Load the mapping in a JSON or YAML file; raises `UsageError` if there is none."""
    import yaml

    from colotrain.config.files import check_yaml

    try:
        text = read_text(path)
        if path.suffix != ".json":
            check_yaml(text)
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror})", "correct the path"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise UsageError(f"{path}: expected JSON or YAML ({what})", "correct the file") from error
    if not isinstance(found, dict) or not found:
        raise UsageError(f"{path}: expected a mapping with settings in it")
    return {str(key): value for key, value in found.items()}


def recognise(config: Mapping[str, Any], path: Path) -> str:
    """The tool that a configuration belongs to, judged by its top-level keys.

    `UsageError` if these fit several or none, or if most keys are not the tool's: another tool's
    file may have some of the same names.
    """
    scores = {kind: len(form.signs & set(config)) for kind, form in FORMATS.items()}
    best = max(scores.values())
    likely = [kind for kind, score in scores.items() if score == best]
    if not best or len(likely) > 1:
        names = ", ".join(FORMATS)
        problem = f"{path}: its keys do not tell whose configuration it is"
        raise UsageError(problem, f"say it with --kind (one of {names})")
    kind = likely[0]
    found = [f for f in read(FORMATS[kind].rules, config) if f.key not in FORMATS[kind].signs]
    foreign = [f.key for f in found if f.outcome == "unknown"]
    if 2 * len(foreign) > len(found):
        some = ", ".join(foreign[:3])
        problem = f"{path}: {len(foreign)} of its keys are none of {kind}'s, such as {some}"
        raise UsageError(problem, f"say --kind {kind} to take what is")
    return kind


def check_kind(kind: str) -> None:
    if kind not in FORMATS:
        expected = f"expected one of {', '.join(FORMATS)}"
        raise UsageError(f"--kind={kind}: {expected}", suggest(kind, FORMATS))


def check_trained(found: Sequence[Finding]) -> None:
    """Raise `ConfigError` where a key asks for what colotrain does not train."""
    problems = [
        Problem(key=f.key, value=f.value, expected="what colotrain trains", fix=f.note)
        for f in found
        if f.outcome == "refused"
    ]
    if problems:
        raise ConfigError(problems)


def findings(config: Mapping[str, Any], kind: str) -> list[Finding]:
    found = _one_folder(read(FORMATS[kind].rules, config))
    return with_monitors(found) if kind == "lightning" else found


def _one_folder(found: list[Finding]) -> list[Finding]:
    """Take the first of several folders for offloading, and ask about the others."""
    key = "plugin.disk_path"
    first = next((f for f in found if key in f.settings), None)

    def one(finding: Finding) -> Finding:
        if first is None or finding.settings.get(key, first.settings[key]) == first.settings[key]:
            return finding
        note = f"{key} is one folder: {first.settings[key]} is taken, set {key} for another"
        return replace(finding, outcome="asked", note=note, settings={})

    return [one(finding) for finding in found]


LISTS = ("observe.trackers", "data.path", "adapter.targets", "freeze.except", "model.tokens")
"""Settings to which several keys of a file may each add values."""


def settings(found: Sequence[Finding]) -> dict[str, Any]:
    """The recipe's settings by dotted key, made consistent with one another."""
    merged: dict[str, Any] = {}
    for finding in sorted(found, key=_order):
        for key, value in finding.settings.items():
            if key == "plugin.name" and key in merged:
                value = min(value, merged[key], key=PLUGIN_ORDER.index)
            if key == "adapter.name" and merged.get(key) == "dora":
                value = "dora"  # a switch beside the key that asks for an adapter
            if key in LISTS:
                value = [*merged.get(key, []), *value]
            merged[key] = value
    if merged.get("plugin.name") != "fsdp-hybrid":
        merged.pop("plugin.shard_size", None)
        merged.pop("plugin.reshard", None)
    if merged.get("plugin.name") != "gemini":
        merged.pop("plugin.disk_path", None)
    length = {"train.max_steps": None} if "train.epochs" in merged else {}  # the base has steps
    return {**merged, **length, **_sizes(merged)}


def _order(finding: Finding) -> tuple[bool, bool]:
    """Sort key: classes before their arguments; schedules last, since their learning rate wins."""
    is_schedule = finding.key.startswith(("scheduler.", "lr_scheduler."))
    return is_schedule, not finding.key.endswith((".type", ".class_path"))


def complete_settings(kind: str, found: Sequence[Finding]) -> dict[str, Any]:
    """The recipe's settings, with the other tool's defaults for keys that its file lacks."""
    return {**_missing_defaults(kind, found), **settings(found)}


def questions(kind: str, found: Sequence[Finding]) -> list[str]:
    """Settings that the user must add, because the file does not contain them."""
    lines = {f.note: f"{f.key}: {f.note}" for f in found if f.outcome == "asked"}
    own = question_about_model(kind, found)
    return [*([f"model, data: {own}"] if own else []), *lines.values()]


def question_about_model(kind: str, found: Sequence[Finding]) -> str:
    """What the user must say about model and data; empty where the file names both."""
    if not FORMATS[kind].is_whole:
        return OWN
    said = complete_settings(kind, found)
    missing = [key for key in ("model.hf", "data.path") if key not in said]
    return f"set {' and '.join(missing)}" if missing else ""


def _missing_defaults(kind: str, found: Sequence[Finding]) -> dict[str, Any]:
    said, given = settings(found), {finding.key: finding.value for finding in found}
    return {key: value for key, value in FORMATS[kind].defaults(given).items() if key not in said}


def missing_settings(kind: str, found: Sequence[Finding]) -> list[str]:
    """Lines that name the training settings missing in the file, and where they come from."""
    theirs = [f"{key}={json.dumps(value)}" for key, value in _missing_defaults(kind, found).items()]
    ours = [key for key in TRAINING if key not in complete_settings(kind, found)]
    lines = [f"Not in the file, so as {kind} has them by default: {', '.join(theirs)}."]
    whose = "colotrain has" if FORMATS[kind].is_whole else f"{BASE} or colotrain has"
    lines += [f"Not in the file, so as {whose} them: {', '.join(ours)}."]
    return [line for line, keys in zip(lines, (theirs, ours), strict=True) if keys]


def _sizes(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that clear the base's batch sizes where they would contradict the file's."""
    whole, micro, steps = (
        merged.get(key) for key in ("train.global_batch", "train.micro_batch", "accumulate.steps")
    )
    if whole is None and micro is None and steps is None:
        ranks = "cluster.procs_per_node" in merged or "cluster.nodes" in merged
        return {"train.global_batch": None, "accumulate.steps": 1} if ranks else {}
    if whole is None:  # it follows from the other two
        return {"train.global_batch": None}
    if micro is None and steps is None:  # no accumulation
        return {"train.micro_batch": None, "accumulate.steps": 1}
    return {} if micro is not None else {"train.micro_batch": None}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested sections."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found


def render(source: Path, kind: str, found: Sequence[Finding]) -> str:
    """The recipe as text, with comments about keys that could not be translated."""
    import yaml

    left = [
        f
        for f in found
        if f.outcome in ("asked", "none", "unknown") or (f.outcome == "taken" and f.note)
    ]
    lines = [_comment(f"From {source.name} ({kind}), by `colotrain import-config`.")]
    if own := question_about_model(kind, found):
        lines += [f"# model, data: {MEANING['asked']} ({own})"]
    lines += [
        _comment(f"{f.key} = {_short(f.value)}: {MEANING[f.outcome]} ({f.note})") for f in left
    ]
    for line in missing_settings(kind, found):
        lines += textwrap.wrap(line, 96, initial_indent="# ", subsequent_indent="# ")
    settings = _without_references(nested(complete_settings(kind, found)))
    body = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    base = [] if FORMATS[kind].is_whole else [f"defaults: [{BASE}, _self_]"]
    return "\n".join([*lines, *base, "", body]).rstrip() + "\n"


def _without_references(value: Any) -> Any:
    """The settings with `${` as the text that it is in the other tool's file."""
    if value == DECAY:
        return value
    if isinstance(value, dict):
        return {_without_references(key): _without_references(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_references(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _comment(text: str) -> str:
    """A one-line YAML comment; unprintable characters of the text are escaped."""

    return "# " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _short(value: Any) -> str:
    text = " ".join(json.dumps(value, default=str).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
