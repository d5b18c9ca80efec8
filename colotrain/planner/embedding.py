"""The pooling of a model of embeddings: that of its directory, or the setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from colotrain.errors import Problem
from colotrain.records import same_fields
from colotrain.rundir import read_json
from colotrain.spec.objectives import Embed, EmbedPlan, Pooling

POOLING = "train.embed.pooling"
MODES: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
}
"""What sentence-transformers' files say → the setting."""
UNDERSTOOD = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that are part of the objective."""


class OtherModules(ValueError):
    """Modules or a pooling of sentence-transformers that are not understood."""


def embed_plan(embed: Embed, folder: str | None, problems: list[Problem]) -> EmbedPlan | None:
    """The resolved `train.embed`; None where a problem is reported, or no directory is named."""
    if folder is None:
        return None
    try:
        own = pooling_of(Path(folder).expanduser())
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        expected = f"modules of sentence-transformers that are understood ({error})"
        fix = (
            "remove modules.json, and name train.embed.pooling, where the other modules do no harm"
        )
        problems.append(Problem(key="model.hf", value=folder, expected=expected, fix=fix))
        return None
    asked = None if embed.pooling == "auto" else embed.pooling
    if own is None and asked is None:
        expected = f"one of {', '.join(get_args(Pooling))}: {folder} does not say it"
        problems.append(Problem(key=POOLING, value=embed.pooling, expected=expected))
        return None
    if None not in (own, asked) and own != asked:
        expected = f"{own}, as the files of {folder} say, which are exported too"
        fix = "set it to auto, or change 1_Pooling/config.json there"
        problems.append(Problem(key=POOLING, value=asked, expected=expected, fix=fix))
        return None
    return EmbedPlan(**same_fields(embed, Embed) | {"pooling": own or asked})


def pooling_of(folder: Path) -> Pooling | None:
    """What the directory's sentence-transformers files say; None where it has none."""
    if not (folder / "modules.json").is_file():
        return None
    found: Pooling | None = None
    for module in read_json(folder / "modules.json"):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in UNDERSTOOD:
            raise OtherModules(f"it has a {kind}")
        if kind == "Pooling":
            place = folder / Path(str(module["path"])).name
            found = _mode_in(read_json(place / "config.json"))
    return found


def _mode_in(settings: Mapping[str, Any]) -> Pooling:
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    older = (name for name, value in settings.items() if name.startswith("pooling_mode_") and value)
    modes = modes or list(older)
    if len(modes) != 1 or modes[0] not in MODES:
        raise OtherModules(f"its pooling is {', '.join(map(str, modes)) or 'not known'}")
    return MODES[modes[0]]
