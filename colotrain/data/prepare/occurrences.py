"""What a chat template leaves out: messages' texts that do not occur in the rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from colotrain.data.prepare.messages import REASONING, Conversation, called, texts_in
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.templates import ChatTemplate


def lost_fields(
    template: ChatTemplate, message: dict[str, Any], text: str, *, is_past: bool = False
) -> list[str]:
    """Names of the message's fields whose text is not in `text`.

    The words of a call may stand in the text for another reason, so that a template has to mention
    calls, too. `is_past`: templates rightly leave the reasoning out of answers before the one in
    question.
    """
    lost = []
    content = "".join(texts_in(message.get("content")))
    pieces = re.split("</?think>", content)
    if not all(_occurs(piece, text) for piece in (pieces[-1:] if is_past else pieces)):
        lost.append("content")
    thoughts = [name for name in REASONING if not is_past and isinstance(message.get(name), str)]
    lost += [name for name in thoughts if not _occurs(message[name], text)]
    for call in map(called, message.get("tool_calls", ())):
        arguments = call.get("arguments")
        as_python = isinstance(arguments, dict) and arguments and str(arguments) in text
        if isinstance(arguments, str):
            arguments = _object_of(arguments)
        said = [str(call.get("name", "")), *texts_in(arguments)]
        is_rendered = template.mentions("tool_calls") and all(_occurs(one, text) for one in said)
        if as_python or not is_rendered:
            lost.append("tool_calls")
            break
    return lost


def _object_of(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _occurs(piece: str, text: str) -> bool:
    """Whether a text occurs in another, as it is or as part of JSON."""
    piece = piece.strip()
    return piece in text or any(
        json.dumps(piece, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)
    )


def unrendered(
    template: ChatTemplate, chat: Conversation, text: str, asked: list[int]
) -> Iterator[str]:
    """Yield a note for each kind of content that the template leaves out of `text`.

    Raises `BadRecord` for an answer of which it renders nothing.
    """
    for index, message in enumerate(chat.messages):
        is_past = message["role"] == "assistant" and index not in asked
        lost = lost_fields(template, message, text, is_past=is_past)
        given = [name for name in ("content", "tool_calls", *REASONING) if message.get(name)]
        lost_of_past = lost_fields(template, message, text, is_past=True)
        wholly = {*lost_of_past, *(set(lost) & set(REASONING))}
        if index in asked and given and wholly.issuperset(given):
            fields = " and ".join(given)
            raise BadRecord(
                f"message {index + 1}: the chat template renders nothing of this answer "
                f"({fields}); use a template that does, such as data.chat_template=chatml"
            )
        for field in lost:
            yield (
                f"the {field} of messages of the role {message['role']} is not in the text as it "
                "is: the chat template leaves it out or changes it"
            )
    names = [str(called(tool).get("name", "")) for tool in chat.tools or ()]
    if names and not (template.mentions("tools") and all(_occurs(name, text) for name in names)):
        yield "tools are not in the text: the chat template does not render them"
    if not all(_occurs(one, text) for one in texts_in(chat.documents)):
        yield "documents are not in the text: the chat template does not render them"
    for name in chat.settings:
        if not template.mentions(name):
            yield f"{name} of chat_template_kwargs is nothing that the chat template names"


def unread_fields(template: ChatTemplate, chat: Conversation, text: str) -> Iterator[str]:
    """Yield names of messages' fields that the template does not render."""
    known = {"role", "content", "tool_calls", *REASONING}
    fields = {name: value for message in chat.messages for name, value in message.items()}
    for name, value in fields.items():
        texts = list(texts_in(value))
        is_shown = all(_occurs(one, text) for one in texts) if texts else template.mentions(name)
        if name not in known and not is_shown:
            yield f"{name} of messages"
