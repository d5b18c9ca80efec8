"""Reading conversations: messages, tools and documents in the shapes that files have them.

Every shape (OpenAI's, ShareGPT's, questions with answers) becomes messages as chat templates expect
them: a role, a content, and `tool_calls` where a message calls tools. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from colotrain.data.prepare.records import BadRecord
from colotrain.errors import suggest

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""Usual roles of messages; a chat template may know others."""
CALLS = ("function_call", "tool_call")
"""ShareGPT's roles of messages whose text is a call of a tool."""
NAMES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "ai", *CALLS), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response", "function_response"), "tool"),
    "developer": "system",
}
"""Other names of roles, which templates seldom know."""
FLAGS = ("weight", "train", "loss_mask")
"""Fields of a message that say whether it is trained on."""
REASONING = ("reasoning_content", "thinking", "reasoning")
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
"""Arguments of a template that `chat_template_kwargs` may not have."""
DEVELOPER = (
    "messages of the role developer are rendered as system: the chat template does not name it"
)
NOT_TRAINED = "only the assistant's messages are trained on: `{}` of another role has no effect"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages and whatever else a chat template may render."""

    messages: list[dict[str, Any]]
    untrained: set[int] = field(default_factory=set)
    """Positions of messages that the record says not to train on."""
    first: int = 0
    """Position of the first message that may be trained on."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments for the template (`chat_template_kwargs`)."""
    notes: list[str] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    """Images that parts of contents bring along, in their order."""

    def prepend(self, other: Conversation) -> None:
        """Put another's messages before these, which are then the first to be trained on."""
        count = len(other.messages)
        self.messages[:0] = other.messages
        self.untrained = {index + count for index in self.untrained} | other.untrained
        self.first += count
        self.notes += other.notes
        self.images[:0] = other.images

    @property
    def num_images(self) -> int:
        """Number of parts of contents that are images."""
        return sum(is_image(part) for m in self.messages for part in parts_of(m.get("content")))

    def place_images(self, count: int) -> None:
        """Let contents be lists of parts with `count` images, and raise `BadRecord` for another
        number.

        Without parts that are images, they are at the marks `<image>` of the texts, or else before
        the text of the first message of the user, as TRL puts them.
        """
        marks = 0 if self.num_images else self._num_marks()
        if marks not in (0, count):
            raise BadRecord(
                f"there are {marks} marks {MARK} in the texts, and {count} images: write images as "
                'parts of contents, {"type": "image"}'
            )
        for message in (m for m in self.messages if "content" in m):
            parts = parts_of(message["content"])
            message["content"] = [*_with_marked_images(parts)] if marks else parts
        if not self.num_images and count:
            asks = (m for m in self.messages if m["role"] == "user" and "content" in m)
            first = next(asks, None)
            if first is None:
                raise BadRecord("no message of the user, which could show the images")
            first["content"][:0] = [dict(IMAGE) for _ in range(count)]
        if self.num_images != count:
            raise BadRecord(f"there are {count} images, and {self.num_images} parts for them")

    def _num_marks(self) -> int:
        return sum(part["text"].count(MARK) for part in self.text_parts())

    def text_parts(self) -> Iterator[dict[str, Any]]:
        for message in self.messages:
            yield from (part for part in parts_of(message.get("content")) if not is_image(part))

    def answers(self, loss_on: str) -> list[int]:
        """Positions of the answers that are trained on; raises `BadRecord` where there is none,
        unless everything is trained on."""
        found = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if loss_on == "all":
            return [index for index in found if index not in self.untrained]
        found = [index for index in found if index >= self.first]
        if not found:
            raise BadRecord("no message of the assistant: there is nothing to train on")
        found = [index for index in found if index not in self.untrained]
        if not found:
            raise BadRecord("every answer is marked as not to be trained on")
        found = found[-1:] if loss_on == "last" else found
        if not any(
            value for i in found for key, value in self.messages[i].items() if key != "role"
        ):
            raise BadRecord("every answer is empty: there is nothing to train on")
        return found


IMAGE = {"type": "image"}
MARK = "<image>"
"""What stands for an image in texts, in the manner of LLaVA's data."""


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The parts of a content; a text is one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or ())


def is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def text_of(content: Any) -> str:
    """The text of a content, without its images."""
    return "".join(part["text"] for part in parts_of(content) if not is_image(part))


def _with_marked_images(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if is_image(part):
            yield part
            continue
        for index, text in enumerate(part["text"].split(MARK)):
            if index:
                yield dict(IMAGE)
            if text or not part["text"]:
                yield {"type": "text", "text": text}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def read_conversation(
    value: Any, template: str, name: str = "messages", *, images: bool = False
) -> Conversation:
    """Messages with the fields role and content, for which `from` and `value` are accepted, too.

    `template` tells which roles it knows by name; `name` is the column's. `images`: whether parts
    of contents may be images.
    """
    value = parsed(name, value)
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{name}: expected a list with messages in it, not {shown(value)}")
    chat = Conversation(messages=[])
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise BadRecord(f"message {index + 1}: expected role and content")
        try:
            chat.messages.append(_message(message, template, chat, images))
            if not _is_trained(message, chat):
                chat.untrained.add(index)
        except BadRecord as error:
            raise BadRecord(f"message {index + 1}: {error}") from error
    return chat


def _message(
    message: Mapping[str, Any], template: str, chat: Conversation, images: bool
) -> dict[str, Any]:
    role, content = (
        message.get(older) if message.get(name) is None else message[name]
        for name, older in (("role", "from"), ("content", "value"))
    )
    content = _with_images(content, chat) if images else _joined(content)
    if not isinstance(role, str):
        raise BadRecord(f"expected a role, not {shown(role)}")
    left_out = {"role", "from", "content", "value", "tool_calls", "function_call", *FLAGS}
    rest = {key: value for key, value in message.items() if key not in left_out}
    calls = _calls(message)
    if role in CALLS and isinstance(content, str):
        calls, content = _calls_of_text(content), None
    if not isinstance(content, str | list) and not calls:
        raise BadRecord(f"expected text as content, not {shown(content)}")
    if role == "developer" and not knows(template, role):
        chat.notes += [DEVELOPER]
    rest |= {"tool_calls": calls} if calls else {}
    rest |= {"content": content} if content is not None else {}
    return {"role": _role(role, template), **{k: v for k, v in rest.items() if v is not None}}


def _role(role: str, template: str) -> str:
    """The role's usual name. Raises `BadRecord` for one that neither is usual nor stands in the
    template: a mistyped `assistant` would not be trained on."""
    usual = NAMES.get(role)
    if usual in ("user", "assistant"):
        return usual
    if knows(template, role):
        return role
    if role not in ROLES and usual is None:
        what = f"the role {role!r} is unknown, also to the chat template"
        raise BadRecord(f"{what} ({suggest(role.lower(), ROLES)})")
    return usual or role


def knows(template: str, role: str) -> bool:
    """Whether a template names this role. (`function` also stands in many as a type of calls.)"""
    quoted = rf"['\"]{re.escape(role)}['\"]"
    if role != "function":
        return re.search(quoted, template) is not None
    return re.search(rf"role['\"]?\]?\s*(==|in)[^%]*{quoted}", template) is not None


def _is_trained(message: Mapping[str, Any], chat: Conversation) -> bool:
    flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise BadRecord(f"{name}: expected 0 or 1, not {value!r}")
        if value and chat.messages[-1]["role"] != "assistant":
            chat.notes.append(NOT_TRAINED.format(name))
    return all(flags.values())


def _joined(content: Any) -> Any:
    """The text of a content that is a list of parts; any other content as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            fix = " (data.images=true reads images)" if kind == "image" else ""
            raise BadRecord(f"expected parts that are text, not {kind}{fix}")
        texts.append(text)
    return "".join(texts)


def _with_images(content: Any, chat: Conversation) -> Any:
    """A content with the texts and images of its parts; the chat gets images that they bring."""
    if not isinstance(content, list) or not any(
        isinstance(part, Mapping) and is_image(part) for part in content
    ):
        return _joined(content)
    parts: list[dict[str, Any]] = []
    number = chat.num_images
    for part in content:
        if isinstance(part, Mapping) and is_image(part):
            if part.get("index") not in (None, number):
                raise BadRecord(f"image {part['index']} stands where image {number} is to be")
            number += 1
            given = [(name, part[name]) for name in SOURCES if part.get(name) is not None]
            chat.images += [
                {"bytes": value} if name in ("bytes", "base64") else value
                for name, value in given[:1]
            ]
            parts.append(dict(IMAGE))
        elif isinstance(part, Mapping) and part.get("type") == "image_url":
            raise BadRecord(
                'an image_url: images are never read from the network: give {"type": "image", '
                '"image": PATH}, or "bytes" in base64'
            )
        else:
            parts.append({"type": "text", "text": _joined([part])})
    return parts


SOURCES = ("image", "path", "url", "bytes", "base64")
"""Fields of a part that say which image it is."""


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls of tools as OpenAI has them: `tool_calls`, or the older `function_call`."""
    calls = parsed("tool_calls", message.get("tool_calls")) or []
    if (older := message.get("function_call")) is not None:
        calls = [*calls, {"type": "function", "function": parsed("function_call", older)}]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRecord("tool_calls: expected a list of objects")
    return [dict(call) for call in calls]


def _calls_of_text(content: str) -> list[dict[str, Any]]:
    """Calls from the text of a ShareGPT message: JSON with `name` and `arguments`, or a list."""
    found = parsed("function_call", content)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRecord("a call of a tool: expected JSON with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def called(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name and the arguments of a call."""
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def with_arguments(messages: list[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Messages whose tool calls have arguments as an object, or as JSON text."""
    return [
        {**m, "tool_calls": [_with_arguments(call, as_text=as_text) for call in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in messages
    ]


def _with_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    inner = called(call)
    arguments = inner.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not as_text and isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else arguments
    changed = {**inner, "arguments": arguments} if "arguments" in inner else dict(inner)
    return {**call, "function": changed} if inner is not call else changed


def read_tools(tools: Any, functions: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools: a list, JSON text, or OpenAI's older `functions`."""
    found = parsed("tools", tools)
    if found is None and functions is not None:
        found = parsed("functions", functions)
        found = found if isinstance(found, list) else [found]
        found = [{"type": "function", "function": parsed("functions", one)} for one in found]
    if not found:
        return None
    listed = found if isinstance(found, list) else [found]
    listed = [parsed("tools", one) for one in listed]
    if not all(isinstance(one, dict) for one in listed):
        raise BadRecord("tools: expected a list of objects, or JSON text with one")
    return listed


def read_documents(value: Any) -> list[dict[str, Any]] | None:
    found = parsed("documents", value)
    if found is not None and not (
        isinstance(found, list) and all(isinstance(one, dict) for one in found)
    ):
        raise BadRecord("documents: expected a list of objects, such as a title and a text")
    return found or None


def read_settings(value: Any) -> dict[str, Any]:
    found = parsed("chat_template_kwargs", value)
    if found is not None and not isinstance(found, dict):
        raise BadRecord(f"chat_template_kwargs: expected an object, not {shown(found)}")
    if taken := [name for name in GIVEN if found and name in found]:
        raise BadRecord(f"chat_template_kwargs: {taken[0]} has a field of its own")
    return found or {}


def parsed(name: str, value: Any) -> Any:
    """A value that may be JSON text, as Arrow and Parquet files have what differs by row."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except RecursionError:
        raise BadRecord(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise BadRecord(f"{name}: not JSON ({error})") from error


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value of lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def shown(value: Any) -> str:
    """What a value is, for a message of what was expected in its place."""
    if value is None:
        return "null"
    return type(value).__name__ if value or not isinstance(value, list) else "an empty list"
