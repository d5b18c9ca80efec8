"""The chat template of an export, and a generation that ends where its turns end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colotrain.data.prepare.conversations import trained_template
from colotrain.data.prepare.templates import describe_marks, limits, unknown_marks
from colotrain.export.job import Job, write_json
from colotrain.rundir import read_json

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
ANSWER = "colotrain"
"""Answer of a conversation that is rendered to see what follows an answer."""


def write_template(job: Job) -> None:
    """Write the template of `data.chat_template` in place of the tokenizer's own."""
    data = job.plan.data
    template = trained_template(data) if data.chat_template is not None else None
    if template is None:
        return
    for name in ("tokenizer_config.json", "processor_config.json"):
        path = job.folder / name
        settings = _read(path)
        if settings.pop("chat_template", None) is not None:
            write_json(path, settings)
    (job.folder / "chat_template.json").unlink(missing_ok=True)
    (job.folder / TEMPLATE).write_text(template, "utf-8")


def complete_prompting(job: Job, config: dict[str, Any]) -> None:
    """Let generation end where the template's turns end; note what template and tokenizer lack.

    `config` is the model's configuration. The tokenizer must be in the folder.
    """
    tokenizer = _load(job)
    if tokenizer is None or not tokenizer.chat_template:
        return
    template = tokenizer.chat_template
    file = job.folder / "tokenizer.json"
    if isinstance(template, str) and file.is_file() and (marks := unknown_marks(template, file)):
        job.notes.append(describe_marks(marks))
    path = job.folder / GENERATION
    settings = _read(path) or {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if config.get(key) is not None
    }
    known = settings.get("eos_token_id", config.get("eos_token_id"))
    ends = known if isinstance(known, list) else [known] if known is not None else []
    follows = _after_answer(tokenizer)
    if follows is None:
        return
    end = _first_special(tokenizer, follows)
    if end is None:
        what = repr(follows.strip()) if follows.strip() else "nothing"
        job.notes.append(
            f"no token ends an answer: in the chat template {what} follows it; generation needs "
            "stop_strings, or a template whose turns end with a token"
        )
    elif end not in ends:
        settings.pop("_from_model_config", None)
        write_json(path, {**settings, "eos_token_id": [end, *ends]})
        name = tokenizer.convert_ids_to_tokens(end)
        job.notes.append(f"generation ends at {name}, with which the chat template ends an answer")


def _load(job: Job) -> Any:
    """The tokenizer as transformers loads it; None, with a note, where it does not."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    if not any((job.folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            job.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library raises about files of the user's
        job.notes.append(f"transformers does not load the tokenizer: {error}")
        return None


def _after_answer(tokenizer: Any) -> str | None:
    """The text after an answer that ends a conversation; None where that cannot be told."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        with limits():
            text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # whatever a template raises about a conversation that it does not like
        return None
    return text.rpartition(ANSWER)[2] if ANSWER in text else None


def _first_special(tokenizer: Any, text: str) -> int | None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return ids[0] if ids and ids[0] in special else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
