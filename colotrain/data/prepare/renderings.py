"""Conversations as samples: texts by a chat template, and the spans that are trained on.

What is trained on is what the template encloses in `{% generation %}`. A template without such
marks is rendered up to each answer: what it then adds is the answer. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from colotrain.data.prepare.messages import (
    REASONING,
    Conversation,
    called,
    is_image,
    parts_of,
    text_of,
    texts_in,
    turn,
    with_arguments,
)
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.templates import ChatTemplate, Messages, Span

PROBE = "\ufdd0"
"""A text that no message contains: a Unicode noncharacter."""

BY_TURN = (
    "the chat template renders earlier turns differently once others follow: each answer is a "
    "sample of its own, after the conversation as the model sees it then"
)
NO_END = (
    "answers are trained on without a token that ends them: the chat template has none behind "
    "them, or leaves it out of {% generation %}, so that the model does not learn to stop"
)
OTHER_PROMPT = (
    "the chat template renders answers without something that its prompt for them ends with, such "
    "as the beginning of a part of reasoning"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A text with the spans, in characters, that are trained on."""

    text: str
    answers: tuple[Span, ...]
    last: int | None = None
    """Position of the last message that is trained on."""


class Rendering:
    """A conversation's messages under a template: their text, and the texts of their beginnings."""

    def __init__(self, template: ChatTemplate, messages: Messages, chat: Conversation) -> None:
        self.template, self.messages, self.chat = template, messages, chat
        self.whole, self.marked = template.apply(messages, chat)
        self.notes: dict[str, None] = {}
        self._beginnings = {len(messages): (self.whole, self.marked), 0: ("", [])}

    def upto(self, count: int) -> tuple[str, list[Span]]:
        """Text and marked spans of the first `count` messages."""
        if count not in self._beginnings:
            self._beginnings[count] = self.template.apply(self.messages[:count], self.chat)
        return self._beginnings[count]

    def prompt(self, index: int) -> str:
        """The text that the model sees before it writes message `index`."""
        before = self.messages[:index]
        if index:
            return self.template.apply(before, self.chat, add_generation_prompt=True)[0]
        # many templates take no empty conversation, or begin its text otherwise
        with suppress(BadRecord):
            prompt, _ = self.template.apply(before, self.chat, add_generation_prompt=True)
            if self.upto(1)[0].startswith(prompt):
                return prompt
        text, _ = self.template.apply([self._probe()], self.chat)
        return text.partition(PROBE)[0]

    def _probe(self) -> dict[str, Any]:
        """An answer with a text that no message contains, in the form of the other contents."""
        probe = turn("assistant", PROBE)
        if any(isinstance(message.get("content"), list) for message in self.messages):
            probe["content"] = parts_of(PROBE)
        return probe

    def samples(self, asked: list[int], loss_on: str) -> list[Sample]:
        """The samples in which the messages `asked` are trained on: one, or one for each."""
        if loss_on == "all":
            return [Sample(text=self.whole, answers=self._all_but(self.chat.untrained))]
        one = self._marked_in(asked, loss_on) if self.template.has_marks else self._spans(asked)
        if one is not None:
            return [Sample(text=self.whole, answers=tuple(one), last=asked[-1])]
        alone = self._alone_by_marks if self.template.has_marks else self._alone
        return [sample for index in asked if (sample := alone(index)).answers]

    def _spans(self, asked: list[int]) -> list[Span] | None:
        """The spans of messages in the whole text; None where that renders them differently."""
        found = []
        for index in asked:
            text, _ = self.upto(index + 1)
            begin = self._begin(index) if self.whole.startswith(text) else None
            if begin is None:
                return None
            found.append((begin, len(text)))
        return found

    def _begin(self, index: int) -> int | None:
        """Where message `index` begins in the text of the messages up to it; None where that text
        does not begin with those before it."""
        (text, _), prompt = self.upto(index + 1), self.prompt(index)
        if text.startswith(prompt):
            return len(prompt)
        begin = _count_shared(text, prompt)
        if begin < len(self.upto(index)[0]):
            return None
        self.notes[OTHER_PROMPT] = None
        return begin

    def _alone(self, index: int) -> Sample:
        """Message `index` after the conversation as the template shows it to the model."""
        text, _ = self.upto(index + 1)
        begin = self._begin(index)
        if begin is None:  # the answer's text is found by writing another in its place
            probe = [*self.messages[:index], self._probe()]
            header, mark, _ = self.template.apply(probe, self.chat)[0].partition(PROBE)
            if not mark or not text.startswith(header):
                raise BadRecord(
                    f"the chat template renders what is before message {index + 1} differently "
                    "once that follows, and its answer cannot be found (mark it by {% generation %}"
                    " in the template)"
                )
            prompt = self.prompt(index)
            asks = prompt.removeprefix(self.upto(index)[0])  # what the template asks the model with
            if asks != prompt and asks and asks in header:  # it may write more before the answer
                kept = header[: header.rindex(asks) + len(asks)]
            else:
                kept = header if prompt[-1:].isspace() else header.rstrip()
            begin, text = len(prompt), prompt + text[len(kept) :]
        return Sample(text=text, answers=((begin, len(text)),), last=index)

    def _alone_by_marks(self, index: int) -> Sample:
        text, marked = self.upto(index + 1)
        begin = _count_shared(text, self.upto(index)[0])
        answers = tuple(_within(marked, [(begin, len(text))]))
        return Sample(text=text, answers=answers, last=index)

    def _marked_in(self, asked: list[int], loss_on: str) -> list[Span] | None:
        """The marked spans without those of answers that are not trained on; None where these
        are rendered differently in the whole text."""
        if loss_on == "last":
            wanted = [self._region(asked[-1], asked[-1] + 1)]
        else:
            # edges at answers alone: some templates refuse a system message without a question
            answers = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
            begin = self.chat.first if any(i < self.chat.first for i in answers) else 0
            left_out = [i for i in answers if i >= begin and i in self.chat.untrained]
            edges = [begin, *(edge for i in left_out for edge in (i, i + 1)), len(self.messages)]
            pairs = zip(edges[::2], edges[1::2], strict=True)
            wanted = [self._region(start, stop) for start, stop in pairs if stop > start]
        known = [region for region in wanted if region is not None]
        return _within(self.marked, known) if len(known) == len(wanted) else None

    def _region(self, start: int, stop: int) -> Span | None:
        """The span of messages `start` to `stop` in the whole text."""
        before, upto = self.upto(start)[0], self.upto(stop)[0]
        is_part = self.whole.startswith(upto) and upto.startswith(before)
        return (len(before), len(upto)) if is_part else None

    def _all_but(self, untrained: set[int]) -> tuple[Span, ...]:
        spans = self._spans(sorted(untrained))
        if spans is None:
            raise BadRecord(
                "messages that are not to be trained on cannot be found, because the chat template "
                "renders them differently once others follow (use data.loss_on=answers)"
            )
        edges = [0, *(edge for span in spans for edge in span), len(self.whole)]
        return tuple(zip(edges[::2], edges[1::2], strict=True))


def render(
    template: ChatTemplate, chat: Conversation, *, loss_on: str
) -> tuple[list[Sample], list[str], list[str]]:
    """The conversation as samples, notes about them, and names of fields that are not read.

    It is one sample unless the template renders earlier turns differently once others follow: then
    each answer is one. Raises `BadRecord`.
    """
    asked = chat.answers(loss_on)
    rendering = _choose_rendering(template, chat)
    samples = rendering.samples(asked, loss_on)
    text = "\n".join([rendering.whole, *(sample.text for sample in samples)])
    notes = [*chat.notes, *unrendered(template, chat, text, asked)]
    if not any(stop > start for sample in samples for start, stop in sample.answers):
        where = (
            "marks nothing of it by {% generation %}" if template.has_marks else "is empty for it"
        )
        raise BadRecord(f"the chat template {where}: there is nothing to train on")
    if len(samples) > 1:
        notes.append(BY_TURN)
    if any(_has_no_end(s, rendering.messages[s.last]) for s in samples if s.last is not None):
        notes.append(NO_END)
    return samples, [*notes, *rendering.notes], list(unread_fields(template, chat, text))


def _choose_rendering(template: ChatTemplate, chat: Conversation) -> Rendering:
    """The first form of the messages of which the template leaves nothing out, or else the first
    that it takes: some want the arguments of tool calls as an object, some as JSON text."""
    first: Rendering | None = None
    refusal: BadRecord | None = None
    for messages in _forms(chat):
        try:
            rendering = Rendering(template, messages, chat)
        except BadRecord as error:
            refusal = refusal or error
            continue
        if not any(lost_fields(template, m, rendering.whole) for m in messages):
            return rendering
        first = first or rendering
    if first is None:
        assert refusal is not None, "there is always a form"
        raise refusal
    return _as_parts(first) or first


def _forms(chat: Conversation) -> Iterator[Messages]:
    objects = with_arguments(chat.messages, as_text=False)
    yield objects
    if any("tool_calls" in message for message in objects):
        texts = with_arguments(chat.messages, as_text=True)
        yield texts
        if any("content" not in message for message in objects):
            for form in (objects, texts):
                yield [{**message, "content": message.get("content", "")} for message in form]


def _as_parts(rendering: Rendering) -> Rendering | None:
    """A rendering of contents as lists of parts, where the template shows no content that is
    text."""
    if any(
        text_of(m.get("content"))
        and "content" not in lost_fields(rendering.template, m, rendering.whole)
        for m in rendering.messages
    ):
        return None
    messages = [
        {**m, "content": parts_of(m["content"])} if "content" in m else m
        for m in rendering.messages
    ]
    try:
        found = Rendering(rendering.template, messages, rendering.chat)
    except BadRecord:
        return None
    return None if "'type': 'text'" in found.whole else found


def _has_no_end(sample: Sample, message: dict[str, Any]) -> bool:
    """Whether the last text that is trained on is the message's own, with nothing behind it."""
    content = text_of(message.get("content")).rstrip()
    if not content or "tool_calls" in message or not sample.answers:
        return False
    start, stop = sample.answers[-1]
    return sample.text[start:stop].rstrip().endswith(content)


def _count_shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    shortest = min(len(one), len(other))
    return next((index for index, (a, b) in pairs if a != b), shortest)


def _within(spans: list[Span], regions: list[Span]) -> list[Span]:
    """The parts of spans that are in one of the regions."""
    found = [(max(a, start), min(b, stop)) for a, b in spans for start, stop in regions]
    return [(start, stop) for start, stop in found if start < stop]


def lost_fields(
    template: ChatTemplate, message: dict[str, Any], text: str, *, is_past: bool = False
) -> list[str]:
    """Names of the message's fields whose text is not in `text`.

    The words of a call may stand in the text for another reason, so that a template has to mention
    calls, too. `is_past`: templates rightly leave the reasoning out of answers before the one in
    question.
    """
    lost = []
    parts = (part for part in parts_of(message.get("content")) if not is_image(part))
    pieces = [part["text"] for part in parts]
    if len(pieces) < 2:  # else images are between them
        pieces = re.split("</?think>", "".join(pieces))
        pieces = pieces[-1:] if is_past else pieces
    if not all(_occurs(piece, text) for piece in pieces):
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
