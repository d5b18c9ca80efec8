"""Rules that translate each key of another tool's configuration; no key is dropped silently."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Outcome = Literal["taken", "decided", "asked", "none", "refused", "unknown"]
MEANING: dict[str, str] = {
    "taken": "taken",
    "decided": "decided by colotrain",
    "asked": "for you to say",
    "none": "no equivalent",
    "refused": "not trained here",
    "unknown": "unknown key",
}
Flat = Mapping[str, Any]
"""Dotted key → value; an element of a list is `key[0]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of the rule for one key."""

    outcome: Outcome
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key of colotrain → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A key of the file, with its value and the result of its rule."""

    key: str
    value: Any
    outcome: Outcome
    note: str
    settings: dict[str, Any]


DECAY = "${optim.weight_decay}"
DECAY_OF_ALL: dict[str, Any] = {"optim.rules": [{"match": "*", "weight_decay": DECAY}]}
"""Setting that applies weight decay to all parameters; without it only matrices decay."""
Rule = Callable[[Any, Flat], Answer]
Rules = Mapping[str, Rule]
"""Glob on dotted keys → rule. The first matching glob counts."""
OFF: tuple[Any, ...] = (None, False, "", [], {})
OFF_WORDS = ("false", "no", "none", "null", "0", "0.0")
"""Values of a switch that is off."""


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
    """The rule's answer; "none" for a value that the rule cannot read."""
    try:
        return rule(value, flat)
    except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError):
        return Answer(outcome="none", note=f"{value!r} is nothing that can be read as {key}")


def fits(key: str, glob: str) -> bool:
    """Whether `key` matches `glob`, in which brackets (`[0]`) are literal."""
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
    """Rule for a key that colotrain always decides itself."""
    return lambda value, flat: Answer(outcome="decided", note=note)


def asked(note: str) -> Rule:
    """Rule for a feature that the file does not describe in full, so the user is asked."""
    return lambda value, flat: Answer(outcome="asked", note=note)


def none(note: str) -> Rule:
    return lambda value, flat: Answer(outcome="none", note=note)


def refused(note: str) -> Rule:
    """Rule for a switch without which the file trains something else than it asks for."""

    def rule(value: Any, _: Flat) -> Answer:
        if value in OFF or str(value).lower() in OFF_WORDS:
            return Answer(outcome="decided", note="off")
        return Answer(outcome="refused", note=note)

    return rule


def where(condition: Callable[[Flat], bool], note: str, rule: Rule) -> Rule:
    """The rule where the condition holds; elsewhere the key has no effect in its tool either."""

    def conditional(value: Any, flat: Flat) -> Answer:
        return rule(value, flat) if condition(flat) else Answer(outcome="decided", note=note)

    return conditional


def unless_null(rules: Rules) -> Rules:
    """The same rules for tools to which a key with null is one that is not there."""
    absent = Answer(outcome="decided", note="null, as if the key were not there")

    def with_null(rule: Rule) -> Rule:
        return lambda value, flat: absent if value is None else rule(value, flat)

    return {glob: with_null(rule) for glob, rule in rules.items()}


def taken(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """Rule that sets `key` to the value; `auto` and null keep colotrain's default."""

    def rule(value: Any, _: Flat) -> Answer:
        if value is None or value == "auto":
            return Answer(outcome="decided", note=f"{_shown(value)}: {key} keeps its default")
        try:
            return Answer(outcome="taken", note=note, settings={key: convert(value)})
        except (TypeError, ValueError, KeyError):
            return Answer(outcome="none", note=f"{value!r} is nothing that {key} can be")

    return rule


def decay(value: Any, flat: Flat) -> Answer:
    """Set weight decay as torch and DeepSpeed apply it: to all parameters, not only matrices."""
    answer = taken("optim.weight_decay", number)(value, flat)
    if not answer.settings.get("optim.weight_decay"):
        return answer
    note = "norms and biases decay as well, as they do there"
    return replace(answer, note=note, settings=answer.settings | DECAY_OF_ALL)


def whole(value: Any) -> int:
    """Convert to an integer, also from 5e8 or a string; `ValueError` for a fraction."""
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


def is_positive(value: Any) -> bool:
    """Whether the value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def clip(value: Any) -> float | None:
    """The limit for clipping gradients; None (no clipping) for zero."""
    return number(value) or None


def numbers(value: Any) -> list[float]:
    return [number(item) for item in value]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def offload(value: Any, _: Flat) -> Answer:
    """Rule for a switch that offloads parameters or optimizer state."""
    if not is_on(value):
        return Answer(outcome="decided", note="nothing is offloaded unless the plugin is gemini")
    note = "gemini places each group on a tier, from plugin.budget"
    return Answer(outcome="taken", note=note, settings={"plugin.name": "gemini"})


def disk(devices: str) -> Rule:
    """Rule for the folder of offloading to NVMe, which a key matching `devices` must select."""

    def rule(value: Any, flat: Flat) -> Answer:
        if not any(fits(key, devices) and device == "nvme" for key, device in flat.items()):
            return Answer(outcome="decided", note="nothing is offloaded to a disk")
        note = "gemini offloads to disk what memory has no room for"
        return taken("plugin.disk_path", str, note)(value, flat)

    return rule
