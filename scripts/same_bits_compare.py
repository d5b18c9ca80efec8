"""What a case of `scripts/same_bits.py` left in its folder, and how two of them differ first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

VERBS = ("run", "resume", "dashboard", "profile", "checkpoints", "audit")
MEASURED = ("*/summary.json", *(f"*/output * {verb}" for verb in VERBS))
"""Documents in which a run tells what it measured of itself."""
TIMES = ("*_s", "/time/*", "*/mfu", "*/goodput*", "*_smooth", "*/throughput*", "*/step_times*")
TIMES = (*TIMES, "*/times/*", "*/parts/*", "*/blocks/*/*", "*/wait", "*/wait_share", "*/seconds")
MEMORY = ("*/rss*", "*/peak*", "*/measured*", "*/memory/error", "*/memory_by_rank/*")
IGNORED: dict[str, tuple[str, ...]] = {
    "times of day": ("*/t", "*_at", "*/saving/*"),
    "the seal of a manifest, which is of its time, too": ("*/manifest.json/sha256",),
    "durations and speeds": (
        *("*/events/*_s", "*/events/*/seconds"),
        *(document + key for document in MEASURED for key in TIMES),
        *("*/output * plan/time/measured/*", "*/output * plan/time/error"),
    ),
    "memory of processes, which the allocator decides": (
        *(
            f"*/events/*/{key}"
            for key in ("rss", "peak", "memory/*/baseline", "tiers/*/need/*", "tiers/*/other/*")
        ),
        "*/events/*/memory/*/activations",
        *(document + key for document in MEASURED for key in MEMORY),
        *("*/output * plan/memory/measured/*", "*/output * plan/memory/error"),
    ),
    "process ids": ("*/pid",),
    "events that come by time, or tell of the machine": (
        *(f"*/events/*/{kind}/*" for kind in ("progress", "pressure", "peak_flops")),
        *("*/output * dashboard/ranks/*/pressure*", "*/output * dashboard/peak_flops*"),
    ),
    "lines of logs, which have their time": ("*/output * logs/lines*",),
}
"""Why a value may differ → globs on its place, such as `*/events/rank00000…/step/1/rss`."""
SKIPPED = {
    "cache/*": "made anew for each case, and keyed by the code",
    "disk/*": "gemini's disk tier, which is free space after the run",
    "*/logs/*": "output of processes, with their times",
    "*/control/*": "heartbeats, requests and secrets",
    "*/signature.json": "signs files that are compared themselves",
    "*/launcher.json": "identity of the process",
    "*/traces/*": "times",
    "*/teacher/*": "has random names; what it holds is in every loss",
    "*/audit/*": "what the audit read, with its times",
    "*.svg": "pictures, with their dates",
}
"""Glob on files in a case's folder → why they are not compared."""
BEFORE, AFTER = -1, 1 << 60
FIRST = (": exit code", "plan.json", "/step/", "/gradients", ": ")
"""Order of the facts of one step: earlier ones are nearer to the cause of a difference."""
OUTPUTS = "outputs.json"


@dataclass(frozen=True)
class Fact:
    step: int
    """Step that it belongs to; `BEFORE` and `AFTER` for what belongs to none."""
    place: str
    value: Any

    @property
    def order(self) -> tuple[int, int, str]:
        ranks = [rank for rank, part in enumerate(FIRST) if part in self.place]
        return self.step, min(ranks, default=len(FIRST)), self.place


def difference(old: Sequence[Fact], new: Sequence[Fact]) -> str | None:
    """Describe the first fact that differs; None if there is none."""
    news, olds = {fact.place: fact for fact in new}, {fact.place for fact in old}
    places = [*old, *(fact for fact in new if fact.place not in olds)]
    theirs = {fact.place: fact for fact in old}
    for fact in sorted(places, key=lambda fact: fact.order):
        ours, other = theirs.get(fact.place), news.get(fact.place)
        if is_ignored(fact.place):
            continue
        if ours is None or other is None:
            return f"{fact.place}: only {'NEW' if ours is None else 'OLD'} has it"
        if (found := differing(ours.value, other.value, fact.place)) is not None:
            return found
    return None


def differing(old: Any, new: Any, place: str) -> str | None:
    """Describe the first difference of two values; numbers are the same if their texts are."""
    if is_ignored(place):
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            below = f"{place}/{key}"
            if (key in old) != (key in new) and not is_ignored(below):
                return f"{below}: only {'OLD' if key in old else 'NEW'} has it"
            if key in old and key in new and (found := differing(old[key], new[key], below)):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            if found := differing(one, other, f"{place}/{number}"):
                return found
        return f"{place}: {len(old)} → {len(new)} items" if len(old) != len(new) else None
    if isinstance(old, Stored) and isinstance(new, Stored):
        return old.differing(new, place)
    if isinstance(old, bytes) and isinstance(new, bytes) and old != new:
        pairs = zip(old, new, strict=False)
        at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        where = f"{len(old)} → {len(new)} bytes" if at is None else f"byte {at} differs"
        return f"{place}: {where}"
    return f"{place}: {short(old)} → {short(new)}" if repr(old) != repr(new) else None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def is_ignored(place: str) -> bool:
    return any(fnmatchcase(place, glob) for globs in IGNORED.values() for glob in globs)


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, whole."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    """Its elements, row by row."""

    def differing(self, other: Stored, place: str) -> str | None:
        mine, its = (f"{t.dtype} {list(t.shape)}" for t in (self, other))
        if mine != its:
            return f"{place}: {mine} → {its}"
        if self.data == other.data:
            return None
        import torch

        one, two = (torch.frombuffer(bytearray(t.data), dtype=torch.uint8) for t in (self, other))
        size = getattr(torch, self.dtype).itemsize
        rows = (one.view(-1, size) != two.view(-1, size)).any(1).nonzero()[:, 0]
        at = int(rows[0])
        values = (
            torch.frombuffer(bytearray(t.data), dtype=getattr(torch, self.dtype))[at].item()
            for t in (self, other)
        )
        index = [int(i) for i in torch.unravel_index(rows[0], self.shape)] if self.shape else []
        change = " → ".join(map(repr, values))
        return f"{place}: element {index}: {change} ({len(rows)} of {len(one) // size} differ)"


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a checkpoint by name, read without colotrain's own reader."""
    import torch

    index = json.loads((checkpoint / "index.json").read_text("utf-8"))
    for name, entry in index["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        whole = torch.zeros(entry["shape"], dtype=dtype)
        for chunk in entry["chunks"]:
            raw = (checkpoint / chunk["file"]).read_bytes()
            raw = raw[chunk["start"] : chunk["start"] + chunk["length"]]
            if raw:
                part = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(chunk["sizes"])
                pairs = zip(chunk["offsets"], chunk["sizes"], strict=True)
                whole[tuple(slice(first, first + size) for first, size in pairs)] = part
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        yield name, Stored(entry["dtype"], tuple(entry["shape"]), data)


def facts_of(folder: Path, checkout: Path) -> list[Fact]:
    """Read everything that a case left in its folder."""
    facts = list(output_facts(json.loads((folder / OUTPUTS).read_text("utf-8")), str(checkout)))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = cleaned(str(path.relative_to(folder)), str(checkout))
        if name == OUTPUTS or any(fnmatchcase(name, glob) for glob in SKIPPED):
            continue
        if path.suffix == ".jsonl":
            facts += event_facts(path, f"./{name.removesuffix('.jsonl')}", str(checkout))
            continue
        found = re.search(r"checkpoints/step-(\d+)/", name)
        step = int(found[1]) if found else BEFORE if path.name.startswith("plan") else AFTER
        if found and path.name == "index.json":
            place = f"./{name.removesuffix('/index.json')}"
            facts += [
                Fact(step, f"{place}: {key}", value) for key, value in tensors_of(path.parent)
            ]
        facts.append(Fact(step, f"./{name}", content_of(path, str(checkout))))
    return facts


def content_of(path: Path, checkout: str) -> Any:
    raw = path.read_bytes()
    if path.suffix not in (".json", ".yaml", ".txt", ".md"):
        return raw
    text = cleaned(raw.decode("utf-8"), checkout)
    return json.loads(text) if path.suffix == ".json" else text.splitlines()


def cleaned(text: str, checkout: str) -> str:
    """Replace the checkout's path, times of day, and names of folders of logs.

    The Python that runs both may lie in one of them: its path stays.
    """
    own = rf"{re.escape(checkout)}(?=/(?:colotrain|recipes|conf)\b|[\"':\s]|$)"
    text = re.sub(r"logs/\d{8}-\d{6}/[\w.-]+", "logs/TIME", re.sub(own, "CHECKOUT", text))
    return re.sub(r"\b\d{8}-\d{6}\b", "TIME", text)


def event_facts(path: Path, place: str, checkout: str) -> Iterator[Fact]:
    """Yield the lines of a file of events, numbered within their kind and step.

    Between kinds their order is not compared: some are written beside training.
    """
    counts: dict[tuple[str, int], int] = {}
    for line in cleaned(path.read_text("utf-8"), checkout).splitlines():
        event = json.loads(line)
        kind, step = str(event.get("kind", "row")), event.get("step", 0)
        step = step if isinstance(step, int) else 0
        number = counts[kind, step] = counts.get((kind, step), 0) + 1
        again = f"/{number}" if number > 1 else ""
        yield Fact(step, f"{place}/{kind}/{step}{again}", event)


def output_facts(outputs: list[dict[str, Any]], checkout: str) -> Iterator[Fact]:
    """Yield exit code, JSON and error of each command of a case."""
    for number, output in enumerate(outputs, 1):
        verb, code = output["words"][0], output["code"]
        out, err = (cleaned(output[key], checkout) for key in ("out", "err"))
        place = f"./output {number} {verb}"
        error = err[match.start() :] if (match := re.search("^error:", err, re.MULTILINE)) else ""
        yield Fact(BEFORE, f"{place}: exit code", f"{code}, {error}" if code else code)
        document: Any = out.splitlines()
        with suppress(ValueError):
            document = json.loads(out)
        yield Fact(AFTER, place, document)
