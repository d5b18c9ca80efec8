"""What becomes of every key of somebody else's configuration: never one of them in silence."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Outcome = Literal["taken", "decided", "asked", "none", "unknown"]
MEANING: dict[str, str] = {
    "taken": "taken",
    "decided": "decided by colotrain",
    "asked": "for you to say",
    "none": "no equivalent",
    "unknown": "unknown key",
}
Flat = Mapping[str, Any]
"""Dotted key → value; an element of a list is `key[0]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is said of one key."""

    outcome: Outcome
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key of colotrain → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A key that was found, and what is said of it."""

    key: str
    value: Any
    outcome: Outcome
    note: str
    settings: dict[str, Any]


DECAY_OF_ALL: dict[str, Any] = {
    "optim.rules": [{"match": "*", "weight_decay": "${optim.weight_decay}"}]
}
"""Without it matrices decay, and vectors do not."""
Rule = Callable[[Any, Flat], Answer]
Rules = Mapping[str, Rule]
"""Glob on dotted keys → rule. The first glob that fits decides."""


def read(rules: Rules, config: Mapping[str, Any]) -> list[Finding]:
    """A finding for every key of `config`, in its order."""
    flat = dict(flatten(config))
    found = []
    for key, value in flat.items():
        rule = next((rule for glob, rule in rules.items() if fits(key, glob)), unknown)
        answer = _ask(rule, key, value, flat)
        found.append(
            Finding(
                key=key,
                value=value,
                outcome=answer.outcome,
                note=answer.note,
                settings=answer.settings,
            )
        )
    return found


def _ask(rule: Rule, key: str, value: Any, flat: Flat) -> Answer:
    """The rule's answer; a value that it cannot read is said to have none."""
    try:
        return rule(value, flat)
    except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError):
        return Answer(outcome="none", note=f"{value!r} is nothing that can be read as {key}")


def fits(key: str, glob: str) -> bool:
    """Whether `key` is what `glob` names; `[0]` and its like are taken as they are."""
    return fnmatch.fnmatchcase(key, glob.replace("[", "[[]"))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flatten(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}[{index}]")
    elif prefix:
        yield prefix, value


def unknown(_: Any, __: Flat) -> Answer:
    return Answer(outcome="unknown", note="not a key that is known; nothing was made of it")


def decided(note: str) -> Rule:
    """What colotrain always decides itself."""
    return lambda value, flat: Answer(outcome="decided", note=note)


def asked(note: str) -> Rule:
    """What the other tool has and its file does not tell in full: nothing is guessed."""
    return lambda value, flat: Answer(outcome="asked", note=note)


def none(note: str) -> Rule:
    return lambda value, flat: Answer(outcome="none", note=note)


def taken(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """The value goes into `key`. `auto` and null leave colotrain's own; a wrong type is said."""

    def rule(value: Any, _: Flat) -> Answer:
        if value is None or value == "auto":
            return Answer(outcome="decided", note=f"{_shown(value)}: {key} keeps its default")
        try:
            return Answer(outcome="taken", note=note, settings={key: convert(value)})
        except (TypeError, ValueError, KeyError):
            return Answer(outcome="none", note=f"{value!r} is nothing that {key} can be")

    return rule


def decay(value: Any, flat: Flat) -> Answer:
    """Weight decay as torch and DeepSpeed apply it: to all parameters, not to matrices alone."""
    answer = taken("optim.weight_decay", number)(value, flat)
    if not answer.settings.get("optim.weight_decay"):
        return answer
    note = "norms and biases decay as well, as they do there"
    return replace(answer, note=note, settings=answer.settings | DECAY_OF_ALL)


def whole(value: Any) -> int:
    """A whole number, also where it is written 5e8 or as text."""
    number = float(value)
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError(value)
    return int(number)


def is_on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "1")


def number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def clip(value: Any) -> float | None:
    """Zero turns clipping off."""
    return number(value) or None


def numbers(value: Any) -> list[float]:
    return [number(item) for item in value]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def offload(value: Any, _: Flat) -> Answer:
    """A switch that sends parameters or optimizer state to a lower tier."""
    if not is_on(value):
        return Answer(outcome="decided", note="nothing is offloaded unless the plugin is gemini")
    note = "gemini decides per group, from plugin.budget, what rests where"
    return Answer(outcome="taken", note=note, settings={"plugin.name": "gemini"})


def disk(devices: str) -> Rule:
    """A folder for offloading, where one of the keys that fit the glob `devices` says nvme."""

    def rule(value: Any, flat: Flat) -> Answer:
        if not any(fits(key, devices) and device == "nvme" for key, device in flat.items()):
            return Answer(outcome="decided", note="nothing is offloaded to a disk")
        note = "gemini offloads to disk what memory has no room for"
        return taken("plugin.disk_path", str, note)(value, flat)

    return rule
