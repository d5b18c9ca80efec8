"""Rendering records as text: plain text, prompt and completion, or chat messages. No torch here.

Every record becomes one text, or one for each answer under some chat templates. If only answers
count in the loss, a text comes with their spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colotrain.data.prepare import images
from colotrain.data.prepare.classes import (
    LABEL,
    LABELS_OF_WORDS,
    WORDS,
    class_name,
    class_number,
    is_number,
    label_columns,
    labels_of_words,
)
from colotrain.data.prepare.messages import (
    MARK,
    Conversation,
    parsed,
    read_conversation,
    read_documents,
    read_settings,
    read_tools,
    shown,
    texts_in,
    turn,
)
from colotrain.data.prepare.records import BadRecord, UnreadColumn
from colotrain.data.prepare.renderings import render
from colotrain.data.prepare.templates import CHATML, ChatTemplate
from colotrain.data.prepare.vocabulary import settings_beside, tokenizer_file
from colotrain.errors import ConfigError, Problem
from colotrain.rundir import read_text
from colotrain.spec.objectives import IGNORE_INDEX, MARGIN
from colotrain.spec.objectives import PAIRS as PAIR_OBJECTIVES
from colotrain.spec.plan import DataPlan

SHAPES = ("text", "prompt", "completion", "messages", "chosen", "rejected")
BESIDE = ("system", "history", "tools", "documents", "chat_template_kwargs", "label", "images")
COLUMNS = (*SHAPES, "question", "answer", "context", *BESIDE)
"""Meanings that a column of records may have: the text itself, and what is read beside it."""
OF_OBJECTIVES = (WORDS[0], LABELS_OF_WORDS[0], MARGIN)
"""Meanings of columns that some objectives alone read."""
RELATED_TEXTS = ("query", "positive", "negative")
"""Texts of which a model of embeddings makes vectors."""
PAIR = ("chosen", "rejected")
"""Answers of a preference pair, of which the first is the better one."""
CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "inputs")
"""Columns that may hold a question, as a text, in the order in which they are looked for."""
CONTEXTS = ("input", "context")
"""Columns with more of the question, which may be empty or absent."""
ANSWERS = ("output", "answer", "response", "solution", "targets")
MOST_SHOWN = 20
"""Classes that a message names."""
MOST_MARGIN = 1e30
SYSTEMS = ("system", "system_prompt")
ANCHOR = "anchor"
"""Another name of the column query, as in data of sentence-transformers."""
LABELS = ("label", "kto_tag")
"""Columns of KTO's data, in which false means that an answer is a bad one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A record as text."""

    text: str
    answers: tuple[tuple[int, int], ...] | None
    """Spans, in characters, that count in the loss; None: the whole text."""
    ends: bool
    """Whether a separator token is added at the end; chat templates end their turns themselves."""
    label: int | None = None
    """Number of its class: then it has the tokenizer's own tokens around it, and no separator."""
    words: tuple[str, ...] = ()
    """The words of a text whose words have classes; (): another text."""
    labels: tuple[int, ...] = ()
    """Number of each word's class; -100: it has none."""
    notes: tuple[str, ...] = ()
    """What a user should know about this record; the same words for all records alike."""
    unread: tuple[str, ...] = ()
    """Names of the record's fields that mean nothing here, such as an id."""
    margin: float | None = None
    """The pair's margin, where this is its chosen text and pairs have margins."""
    is_bad: bool = False
    """Whether the record's label says that its answer is a bad one."""
    images: tuple[Any, ...] = ()
    """The images of the record, as it names them."""


class Fields:
    """The fields of a record, by their meaning, which are marked as they are read."""

    def __init__(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        self.record, self.columns = record, columns
        self._read: set[str] = set()

    def name(self, meaning: str) -> str:
        return self.columns.get(meaning, meaning)

    def find(self, *meanings: str) -> str | None:
        """The first of the meanings that the record has."""
        return next((one for one in meanings if self.record.get(self.name(one)) is not None), None)

    def take(self, *meanings: str) -> Any:
        """The value with the first of these meanings that the record has, or None."""
        found = self.find(*meanings)
        if found is None:
            return None
        self._read.add(self.name(found))
        return self.record[self.name(found)]

    def take_text(self, *meanings: str) -> str:
        """The same, as a text, empty where there is none."""
        value = self.take(*meanings)
        if value is not None and not isinstance(value, str):
            name = self.name(self.find(*meanings) or "")
            raise BadRecord(f"{name}: expected text, not {shown(value)}")
        return value or ""

    def unread(self) -> list[str]:
        return [
            name
            for name, value in self.record.items()
            if name not in self._read and value not in (None, "", [], {})
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a record asks in columns of its own, instead of messages."""

    asked: str
    context: str = ""
    system: str = ""
    history: tuple[tuple[str, str], ...] = ()
    """Earlier questions with their answers."""
    is_plain: bool = False
    """Whether the answer continues the text, without a template or headings."""

    def messages(self) -> list[dict[str, Any]]:
        found = [turn("system", self.system)] if self.system else []
        for asked, answer in self.history:
            found += [turn("user", asked), turn("assistant", answer)]
        return [*found, turn("user", self.plain())]

    def plain(self) -> str:
        return f"{self.asked}\n\n{self.context}" if self.context else self.asked

    def with_headings(self) -> list[tuple[str, str]]:
        """The earlier turns and the last one with Alpaca's headings: texts, each with its answer,
        which is "" for the last."""
        context = f"\n\n### Input:\n{self.context}" if self.context else ""
        turns = [*self.history, (self.asked + context, "")]
        gaps = [f"{self.system}\n\n" if self.system else "", *("\n\n" for _ in self.history)]
        return [
            (f"{gap}### Instruction:\n{asked}\n\n### Response:\n", answer)
            for gap, (asked, answer) in zip(gaps, turns, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders the records of a plan as text. It is plain data, so that it can be pickled."""

    columns: dict[str, str]
    loss_on: str
    template: str | None
    tool_template: str | None = None
    """The template of conversations with tools, where the tokenizer has one of its own."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens such as bos_token, by name, which templates may use."""
    pairs: bool = field(default=False, repr=False)
    """Whether records are preference pairs."""
    margins: bool | None = field(default=None, repr=False)
    """Whether each pair has a margin; None: one is of no use."""
    related: tuple[str, ...] = field(default=(), repr=False)
    """Columns with the texts of a sample, each a text by itself; (): other records."""
    rated: bool = field(default=False, repr=False)
    """Whether records are answers with a label, which says whether they are good."""
    classes: tuple[str, ...] = field(default=(), repr=False)
    """Names of the classes of texts; none: records have no class."""
    classes_of_words: bool = field(default=False, repr=False)
    """Whether each word has one of the classes, instead of the text."""
    classes_numbered: bool = field(default=False, repr=False)
    """Whether labels may be the numbers of classes."""
    processor: str | None = field(default=None, repr=False)
    """Folder of the processor of the records' images; None: records have no images."""

    @property
    def needs_texts(self) -> bool:
        """Whether records that hold tokens instead of texts are of no use."""
        return bool(
            self.pairs or self.rated or self.related or self.classes or self.processor is not None
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that may have classes, in the order in which they are looked for."""
        return label_columns(self.columns, of_words=self.classes_of_words) if self.classes else ()

    def wanted(self) -> frozenset[str]:
        """Names of the columns that are read."""
        own = (*CHATS, *QUESTIONS, *CONTEXTS, *ANSWERS, *SYSTEMS, *LABELS, "functions")
        related = (*RELATED_TEXTS, ANCHOR) if self.related else ()
        words = (*WORDS, *LABELS_OF_WORDS) if self.classes_of_words else ()
        margins = () if self.margins is None else (MARGIN,)
        meanings = (*COLUMNS, *own, *related, *words, *margins)
        meanings = tuple(one for one in meanings if one not in images.COLUMNS)
        meanings += images.COLUMNS if self.processor is not None else ()
        return frozenset(self.columns.get(meaning, meaning) for meaning in meanings)

    def documents(self, record: Mapping[str, Any]) -> list[Rendered]:
        """The record as texts: one, none where it is empty, a pair's two, or one for each answer.

        Raises `BadRecord`.
        """
        fields = Fields(record, self.columns)
        found = self._rated(fields) if self.rated else self._texts(fields)
        found = [one for one in found if one.text]
        if self.processor is not None and not all(one.images for one in found):
            raise BadRecord("no image: under data.images=true each record has one in its messages")
        if self.pairs and len(found) == 1:
            raise BadRecord("one of the pair's texts is empty")
        try:
            for one in found:
                one.text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"not valid Unicode ({error.reason})") from error
        return self._with_unread(found, fields)

    def _texts(self, fields: Fields) -> list[Rendered]:
        if self.related:
            return self._related(fields)
        if self.classes:
            return self._tagged(fields) if self.classes_of_words else self._labelled(fields)
        if not self.pairs:
            return self._render(fields)
        margin = self._margin(fields)
        chosen, *others = self._pair(fields)
        return [replace(chosen, margin=margin), *others]

    def _margin(self, fields: Fields) -> float | None:
        name = fields.name(MARGIN)
        if self.margins is False and fields.find(MARGIN):
            raise UnreadColumn(
                "train.reward.margins",
                f"true, or records without the column {name}",
            )
        if not self.margins:
            return None
        value = fields.take(MARGIN)
        try:
            margin = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            margin = math.nan
        if not abs(margin) <= MOST_MARGIN:
            raise BadRecord(f"{name}: expected a number, not {shown(value)}")
        return margin

    def _related(self, fields: Fields) -> list[Rendered]:
        """The texts of a sample, each by itself."""
        found = []
        for column in self.related:
            meanings = ("query", ANCHOR) if column == "query" else (column,)
            text = fields.take_text(*meanings)
            if not text.strip():
                has = ", ".join(map(str, fields.record)) or "-"
                named = fields.find(*meanings)
                what = "it is empty" if named else f"expected a text; the record has {has}"
                raise BadRecord(f"{fields.name(named or column)}: {what}")
            found.append(Rendered(text=text, answers=None, ends=True))
        if "negative" not in self.related and fields.find("negative"):
            name = fields.name("negative")
            raise UnreadColumn(
                "train.embed.negatives",
                f"true, or records without the column {name}",
            )
        return found

    def _rated(self, fields: Fields) -> list[Rendered]:
        """The text of an answer with a label."""
        is_good = _is_good(fields)
        if is_good is None and (label := fields.find(*LABELS)):
            name = fields.name(label)
            raise BadRecord(f"{name}: expected true or false, not {fields.record[name]!r}")
        if is_good is None:
            names = ", ".join(map(fields.name, ("prompt", "completion", "label")))
            raise BadRecord(f"expected {names}; it has {', '.join(map(str, fields.record)) or '-'}")
        found = self._render(fields)
        if any(one.answers is None for one in found):
            raise BadRecord(f"expected {fields.name('prompt')} and {fields.name('completion')}")
        return [replace(one, is_bad=not is_good) for one in found]

    def _with_unread(self, found: list[Rendered], fields: Fields) -> list[Rendered]:
        """Add the fields that were not read: as a note those that mean something in other records
        and are not in the text anyway, the others by their names."""
        text = "\n".join(one.text for one in found)
        names = fields.unread()
        known = self.wanted() - {fields.name(label) for label in LABELS}
        said = {name: [one.strip() for one in texts_in(fields.record[name])] for name in names}
        missed = [
            name
            for name in names
            if name in known and not (said[name] and all(one in text for one in said[name]))
        ]
        notes = tuple(f"the column {name} is not read" for name in missed)
        unread = tuple(name for name in names if name not in missed)
        return [replace(one, notes=one.notes + notes, unread=one.unread + unread) for one in found]

    def _pair(self, fields: Fields) -> list[Rendered]:
        """The chosen and the rejected text of a preference pair."""
        names = [fields.name(meaning) for meaning in ("prompt", *PAIR)]
        missing = [name for name in names[1:] if fields.record.get(name) is None]
        if missing:
            expected = "expected {}, {} and {}".format(*names)
            raise BadRecord(f"{expected}; it has {', '.join(map(str, fields.record)) or '-'}")
        answers = {fields.name(meaning): fields.take(meaning) for meaning in PAIR}
        before = fields.find("prompt", *QUESTIONS, *CHATS) or "prompt"
        asked = fields.record.get(fields.name(before))
        is_text = any(isinstance(answer, str) for answer in answers.values())
        if is_text and asked is None:
            raise BadRecord(f"expected {names[0]}: without it both answers are lists of messages")
        if is_text and not isinstance(asked, list):
            question = self._question(fields, ("prompt", *QUESTIONS))
            pair = [self._answered(question, answer, fields, n) for n, answer in answers.items()]
            return [one for texts in pair for one in texts]
        chats = [self._conversation(_as_answer(answer), name) for name, answer in answers.items()]
        are_answers = all(chat.messages[0]["role"] == "assistant" for chat in chats)
        if asked and (are_answers or (before == "prompt" and isinstance(asked, list))):
            for chat in chats:
                value = fields.take(before)
                value = [turn("user", value)] if isinstance(value, str) else value
                chat.prepend(self._conversation(value, fields.name(before)))
        if chats[0].messages == chats[1].messages:
            raise BadRecord(f"{' and '.join(answers)}: expected two answers, they are the same")
        common = [a == b for a, b in zip(*(chat.messages for chat in chats), strict=False)]
        for chat in chats:
            chat.first = common.index(False) if False in common else len(common)
        return [one for chat in chats for one in self._chat(chat, fields)]

    def _labelled(self, fields: Fields) -> list[Rendered]:
        """A text and its class."""
        text, name = fields.take_text("text"), fields.name(LABEL)
        if not text:
            raise BadRecord(f"{fields.name('text')}: expected a text, and there is none")
        number = self._class_number(fields.take(LABEL), name)
        return [Rendered(text=text, answers=None, ends=True, label=number)]

    def _class_number(self, value: Any, name: str) -> int:
        number = class_number(value, self.classes, numbered=self.classes_numbered)
        if number is None:
            known = ", ".join(self.classes[:MOST_SHOWN])
            more = ", …" if len(self.classes) > MOST_SHOWN else ""
            is_other = isinstance(value, list | dict)
            label = shown(value) if is_other else class_name(value) or "nothing"
            unnumbered = self._unnumbered if is_number(label) else ""
            raise BadRecord(f"{name}: expected one of {known}{more}, not {label}{unnumbered}")
        return number

    @property
    def _unnumbered(self) -> str:
        """What is to be said of numbers, where the classes have none."""
        if self.classes_numbered or any(map(is_number, self.classes)):
            return ""
        section = "classify_tokens" if self.classes_of_words else "classify"
        return f" (numbers stand for the classes of train.{section}.classes, in their order)"

    def _tagged(self, fields: Fields) -> list[Rendered]:
        """The words of a text, and the class of each."""
        found = fields.find(*WORDS) or WORDS[0]
        name, words = fields.name(found), parsed(fields.name(found), fields.take(found))
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            has = ", ".join(map(str, fields.record)) or "-"
            raise BadRecord(f"{name}: expected a list of words, as texts; the record has {has}")
        column = fields.name(fields.find(*LABELS_OF_WORDS) or LABELS_OF_WORDS[0])
        fields.take(*LABELS_OF_WORDS)
        labels = labels_of_words(fields.record, self.columns)
        if labels is None or len(labels) != len(words):
            has = "none" if labels is None else f"{len(labels)}"
            raise BadRecord(f"{column}: expected a label for each of {len(words)} words, not {has}")
        numbers = tuple(
            IGNORE_INDEX if label == IGNORE_INDEX else self._class_number(label, column)
            for label in labels
        )
        text = " ".join(words)
        return [Rendered(text=text, answers=None, ends=True, words=tuple(words), labels=numbers)]

    def _render(self, fields: Fields) -> list[Rendered]:
        prompt, completion, text = (
            fields.record.get(fields.name(meaning)) for meaning in ("prompt", "completion", "text")
        )
        if completion is None and all(fields.find(meaning) for meaning in PAIR):
            first, *others = PAIR_OBJECTIVES
            named = f"train.objective={first} (or {', '.join(others)})"
            raise BadRecord(f"a preference pair: train on it with {named}")
        if messages := fields.find(*CHATS):
            chat = self._conversation(fields.take(messages), fields.name(messages))
            chat.first = len(chat.messages) - 1 if self.rated else 0
            return self._chat(chat, fields)
        answer = "completion" if completion is not None else fields.find(*ANSWERS) or "completion"
        name = fields.name(answer)
        if isinstance(prompt, list) and fields.find(answer):
            chat = self._conversation(_as_answer(fields.take(answer)), name)
            chat.prepend(self._conversation(fields.take("prompt"), fields.name("prompt")))
            return self._chat(chat, fields)
        if completion is not None or (prompt is not None and answer == "completion"):
            question = self._question(fields, ("prompt", *QUESTIONS))
            return self._answered(question, fields.take(answer), fields, name)
        if isinstance(text, str):
            return [Rendered(text=fields.take_text("text"), answers=None, ends=True)]
        if fields.find(answer) and fields.find(*QUESTIONS):
            question = self._question(fields, QUESTIONS)
            return self._answered(question, fields.take(answer), fields, name)
        if fields.name("text") in fields.record:
            raise BadRecord(f"{fields.name('text')}: expected text, not {shown(text)}")
        names = {meaning: fields.name(meaning) for meaning in SHAPES}
        expected = "expected {text}, or {prompt} and {completion}, or {messages}".format(**names)
        raise BadRecord(f"{expected}; it has {', '.join(map(str, fields.record)) or '-'}")

    def _check_label(self, fields: Fields) -> None:
        """Refuse an answer that the record says is a bad one, where it is to be learned."""
        if not self.rated and _is_good(fields) is False:
            name = fields.name(fields.find(*LABELS) or "label")
            value = str(fields.record[name]).lower()
            raise BadRecord(
                f"{name}: {value}, so the answer is no example to learn from "
                "(train.objective=kto learns to avoid it)"
            )

    def _question(self, fields: Fields, meanings: tuple[str, ...]) -> Question:
        meaning = fields.find(*meanings) or "prompt"
        name, asked = fields.name(meaning), fields.take(meaning)
        if not isinstance(asked, str):
            raise BadRecord(f"{name}: expected text, not {shown(asked)}")
        history, system = _read_history(fields.take("history")), fields.take_text(*SYSTEMS)
        is_prompt = meaning == "prompt" and meanings[0] == "prompt"
        contexts = [one for one in CONTEXTS if fields.name(one) != name]
        return Question(
            asked=asked,
            context="" if name == "prompt" else fields.take_text(*contexts),
            system=system,
            history=history,
            is_plain=is_prompt and not history and not system,
        )

    def _answered(
        self, question: Question, answer: Any, fields: Fields, name: str
    ) -> list[Rendered]:
        """The text of a question and its answer, which column `name` has."""
        if not isinstance(answer, str):
            raise BadRecord(f"{name}: expected text, not {shown(answer)}")
        if not answer:
            raise BadRecord(f"{name}: it is empty")
        if not question.is_plain and self.template is not None:
            messages = [*question.messages(), turn("assistant", answer)]
            first = len(messages) - 1 if self.pairs or self.rated else 0
            return self._chat(Conversation(messages=messages, first=first), fields)
        self._check_label(fields)
        turns = [(question.plain(), "")] if question.is_plain else question.with_headings()
        text, spans = "", []
        for asked, reply in [*turns[:-1], (turns[-1][0], answer)]:
            spans.append((len(text + asked), len(text + asked + reply)))
            text += asked + reply
        self._check_images(fields, [text], is_chat=False)
        if self.loss_on == "last" or self.pairs or self.rated:
            spans = spans[-1:]
        answers = ((0, len(text)),) if self.loss_on == "all" else tuple(spans)
        return [Rendered(text=text, answers=answers, ends=True)]

    def _conversation(self, value: Any, name: str) -> Conversation:
        """The messages of a column; a text is an answer."""
        if self.template is None:
            raise no_template()
        value = [value] if isinstance(value, Mapping) else value
        has_images = self.processor is not None
        return read_conversation(value, self.template, name, images=has_images)

    def _chat(self, chat: Conversation, fields: Fields) -> list[Rendered]:
        """A conversation's texts, with what the record's other fields give the template."""
        self._check_label(fields)
        if chat.messages[0]["role"] not in ("system", "developer"):
            system = fields.take_text(*SYSTEMS)
            if system:
                chat.prepend(Conversation(messages=[turn("system", system)]))
        pictures = self._place_images(chat, fields)
        chat.tools = read_tools(fields.take("tools"), fields.take("functions"))
        chat.documents = read_documents(fields.take("documents"))
        chat.settings = read_settings(fields.take("chat_template_kwargs"))
        source = self.tool_template if chat.tools and self.tool_template else self.template
        template = ChatTemplate(source=str(source), tokens=self.tokens)
        samples, notes, unread = render(template, chat, loss_on=self.loss_on)
        if (self.pairs or self.rated) and len(samples) > 1:
            what = "answers of a pair have" if self.pairs else "answer that is rated has"
            raise BadRecord(
                "the chat template renders earlier answers differently once others follow, but the "
                f"{what} to be one text (use data.loss_on=last)"
            )
        return [
            Rendered(
                text=sample.text,
                answers=sample.answers,
                ends=False,
                notes=tuple(notes),
                unread=tuple(unread),
                images=pictures,
            )
            for sample in samples
        ]

    def _place_images(self, chat: Conversation, fields: Fields) -> tuple[Any, ...]:
        """The record's images, for which the conversation then has parts."""
        if self.processor is None:
            texts = [part["text"] for part in chat.text_parts()]
            self._check_images(fields, texts, is_chat=True)
            return ()
        columns = self._columns_of_images(fields)
        if len(columns) > 1:
            names = " and ".join(map(fields.name, columns))
            raise BadRecord(f"{names}: give images in one of them")
        value = fields.take(*columns) if columns else []
        given = value if isinstance(value, list) else [value]
        if given and chat.images:
            raise BadRecord("parts of messages and a column have images: give one of them")
        found = tuple(given or chat.images)
        chat.place_images(len(found))
        return found

    def _check_images(self, fields: Fields, texts: Sequence[str], *, is_chat: bool) -> None:
        """Refuse images that belong to the texts, which would be learned without them.

        Those beside a prompt that does not name their places are a column like others.
        """
        names = [fields.name(column) for column in self._columns_of_images(fields)]
        if names and self.processor is not None:
            raise BadRecord(f"{names[0]}: data.images=true reads images beside messages alone")
        are_shown = is_chat and any(images.shows(fields.record[name]) for name in names)
        if names and (are_shown or any(MARK in text for text in texts)):
            raise BadRecord(
                f"{names[0]}: images beside a conversation, which data.images=true reads (or leave "
                "the column out)"
            )

    def _columns_of_images(self, fields: Fields) -> list[str]:
        found = ((column, fields.record.get(fields.name(column))) for column in images.COLUMNS)
        return [column for column, value in found if not images.is_empty(value)]


def _as_answer(value: Any) -> Any:
    return [turn("assistant", value)] if isinstance(value, str) and value else value


def _is_good(fields: Fields) -> bool | None:
    """Whether the record says that its answer is a good one, as the data of KTO have it.

    None where it says nothing. Numbers are such labels only beside prompt and completion: elsewhere
    0 may be a class.
    """
    label = fields.find(*LABELS) or "label"
    known = {"true": True, "false": False}
    if fields.record.get(fields.name("completion")) is not None:
        known |= {"1": True, "0": False}
    found = known.get(str(fields.record.get(fields.name(label))).lower())
    if found is not None:
        fields.take(label)
    return found


def _read_history(value: Any) -> tuple[tuple[str, str], ...]:
    """Earlier questions and answers, as Alpaca's records have them: a list of pairs."""
    value = parsed("history", value)
    if value is None:
        return ()
    pairs = value if isinstance(value, list) else [value]
    for pair in pairs:
        if not isinstance(pair, list) or [type(one) for one in pair] != [str, str]:
            raise BadRecord("history: expected a list of questions, each with its answer")
    return tuple((asked, answer) for asked, answer in pairs)


def renderer_of(plan: DataPlan) -> Renderer:
    """The plan's renderer, with the plan's chat template or else the tokenizer's."""
    beside = settings_beside(plan.tokenizer)
    tokens = {name: value for name, value in beside.items() if name.endswith("_token")}
    for others in ("extra_special_tokens", "model_specific_special_tokens"):
        tokens |= beside[others] if isinstance(beside.get(others), dict) else {}
    tokens = {name: value for name, value in tokens.items() if isinstance(value, str)}
    named = _templates(plan, beside)
    return Renderer(
        columns=dict(plan.columns),
        loss_on=plan.loss_on,
        template=named.get("default"),
        tool_template=named.get("tool_use"),
        tokens=tokens,
        pairs=plan.pairs,
        margins=plan.margins,
        rated=plan.rated,
        related=plan.related.columns if plan.related is not None else (),
        classes=plan.classes,
        classes_of_words=plan.classes_of_words,
        classes_numbered=plan.classes_numbered,
        processor=plan.tokenizer if plan.images else None,
    )


def trained_template(plan: DataPlan) -> str | None:
    """The chat template that a run renders conversations with; None: none, or no such data."""
    return None if plan.source == "target" else renderer_of(plan).template


def _templates(plan: DataPlan, beside: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: `default`, and others that the tokenizer may have."""
    if plan.chat_template == "chatml":
        return {"default": CHATML}
    if plan.chat_template is not None:
        return {"default": read_text(Path(plan.chat_template))}
    found = beside.get("chat_template")
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    if file := tokenizer_file(plan.tokenizer):
        folder = file.parent / "additional_chat_templates"
        named |= {path.stem: read_text(path) for path in folder.glob("*.jinja")}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def no_template() -> ConfigError:
    expected = "a template: the data has chat messages, and the tokenizer has no template"
    fix = "set data.chat_template=chatml or to a Jinja file, or data.tokenizer to a folder with one"
    return ConfigError([Problem(key="data.chat_template", expected=expected, fix=fix)])
