"""Rendering records as text: plain text, prompt and completion, or chat messages. No torch here.

Every record becomes one text. If only answers count in the loss, it comes with their spans. Chat
messages are rendered by the chat template. Answers are what the template encloses in
`{% generation %}`, or are found by rendering the conversation up to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.vocabulary import settings_beside
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.spec.plan import DataPlan

COLUMNS = ("text", "prompt", "completion", "messages", "chosen", "rejected")
"""Roles that a column of records may have."""
PAIR = ("chosen", "rejected")
"""Answers of a preference pair, of which the first is the better one."""
ALPACA = ("instruction", "input", "output")
"""Columns of Alpaca's records; `input` may be empty or absent."""
NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""Usual roles of messages; a chat template may know others."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks around text in `{% generation %}`: Unicode noncharacters, which texts do not contain."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set call = call.function or call %}"
    "{{ '\n<tool_call>\n{\"name\": ' + call.name | tojson + ', \"arguments\": ' }}"
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A record as text."""

    text: str
    answers: tuple[tuple[int, int], ...] | None
    """Spans, in characters, that count in the loss; None: the whole text."""
    ends: bool
    """Whether a separator token is added at the end; chat templates end their turns themselves."""
    notes: tuple[str, ...] = ()
    """What a user should know about this record; the same words for all records alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders the records of a plan as text. It is plain data, so that it can be pickled."""

    columns: dict[str, str]
    loss_on: str
    template: str | None
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens such as bos_token, by name, which templates may use."""
    pairs: bool = field(default=False, repr=False)
    """Whether records are preference pairs."""

    def wanted(self) -> frozenset[str]:
        """Names of the columns that are read."""
        own = {self.columns.get(meaning, meaning) for meaning in COLUMNS}
        return frozenset(own | {"conversations", "tools", *ALPACA})

    def documents(self, record: Mapping[str, Any]) -> list[Rendered]:
        """The record as text: one, none where it is empty, or a pair's two. Raises `BadRecord`."""
        found = self._pair(record) if self.pairs else [self._render(record)]
        found = [one for one in found if one is not None and one.text]
        if self.pairs and len(found) == 1:
            raise BadRecord("one of the pair's texts is empty")
        try:
            for one in found:
                one.text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"not valid Unicode ({error.reason})") from error
        return found

    def _pair(self, record: Mapping[str, Any]) -> list[Rendered]:
        """The chosen and the rejected text of a preference pair."""
        names = [self.columns.get(meaning, meaning) for meaning in ("prompt", *PAIR)]
        prompt, *answers = (record.get(name) for name in names)
        missing = [name for name, a in zip(names[1:], answers, strict=True) if a is None]
        if missing:
            expected = "expected {}, {} and {}".format(*names)
            raise BadRecord(f"{expected}; it has {', '.join(map(str, record)) or '-'}")
        if any(isinstance(answer, str) for answer in answers):
            return [
                self._completion(prompt, answer, record, name=n)
                for n, answer in zip(names[1:], answers, strict=True)
            ]
        chats = [_messages(answer) for answer in answers]
        if isinstance(prompt, list):
            before = _messages(prompt)
            chats = [[*before, *chat] for chat in chats]
        elif isinstance(prompt, str) and all(chat[0]["role"] == "assistant" for chat in chats):
            chats = [[*_messages([{"role": "user", "content": prompt}]), *chat] for chat in chats]
        common = [a == b for a, b in zip(*chats, strict=False)]
        shared = common.index(False) if False in common else len(common)
        return [self._chat(chat, record, learn_from=shared) for chat in chats]

    def _render(self, record: Mapping[str, Any]) -> Rendered | None:
        messages, prompt, completion, text = (
            record.get(self.columns.get(meaning, meaning))
            for meaning in ("messages", "prompt", "completion", "text")
        )
        messages = messages if messages is not None else record.get("conversations")
        if completion is None and all(record.get(self.columns.get(m, m)) is not None for m in PAIR):
            raise BadRecord("a preference pair: train on it with train.objective=dpo")
        if messages is not None:
            return self._chat(_messages(messages), record, learn_from=0)
        if prompt is not None or completion is not None:
            context = record.get("input")
            if self.columns.get("prompt") == "instruction" and isinstance(context, str):
                prompt = f"{prompt}\n\n{context}" if context else prompt
            return self._completion(prompt, completion, record)
        if isinstance(text, str):
            return Rendered(text=text, answers=None, ends=True)
        name = self.columns.get("text", "text")
        if name not in record and "instruction" in record and "output" in record:
            return self._alpaca(record)
        if name in record:
            raise BadRecord(f"{name}: expected text, not {_shown(text)}")
        raise BadRecord(f"expected {self._expected()}; it has {', '.join(map(str, record)) or '-'}")

    def _expected(self) -> str:
        names = {meaning: self.columns.get(meaning, meaning) for meaning in COLUMNS}
        return "{text}, or {prompt} and {completion}, or {messages}".format(**names)

    def _alpaca(self, record: Mapping[str, Any]) -> Rendered | None:
        """Render a record of Alpaca's: as a conversation, or with headings without a template."""
        values = [record.get(name) for name in ALPACA]
        for name, value in zip(ALPACA, values, strict=True):
            if not isinstance(value, str) and not (name == "input" and value is None):
                raise BadRecord(f"{name}: expected text, not {_shown(value)}")
        instruction, context, output = (value or "" for value in values)
        if not output:
            raise BadRecord("output: it is empty")
        if self.template is not None:
            asked = f"{instruction}\n\n{context}" if context else instruction
            messages = [("user", asked), ("assistant", output)]
            found = _messages([{"role": role, "content": text} for role, text in messages])
            return self._chat(found, record, learn_from=0)
        parts = [f"### Instruction:\n{instruction}"]
        parts += [f"### Input:\n{context}"] if context else []
        return self._completion("\n\n".join([*parts, "### Response:\n"]), output, record)

    def _completion(
        self, prompt: Any, completion: Any, record: Mapping[str, Any], *, name: str | None = None
    ) -> Rendered:
        """Render prompt and completion: two texts, or two lists of messages."""
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _messages(prompt)
            return self._chat([*before, *_messages(completion)], record, learn_from=len(before))
        name = name or self.columns.get("completion", "completion")
        for column, value in ((self.columns.get("prompt", "prompt"), prompt), (name, completion)):
            if not isinstance(value, str):
                raise BadRecord(f"{column}: expected text, not {_shown(value)}")
        if not completion:
            raise BadRecord(f"{name}: it is empty")
        text, begin = prompt + completion, len(prompt)
        answers = None if self.loss_on == "all" else ((begin, len(text)),)
        return Rendered(text=text, answers=answers, ends=True)

    def _chat(
        self, messages: list[dict[str, Any]], record: Mapping[str, Any], *, learn_from: int
    ) -> Rendered:
        if self.template is None:
            raise no_template()
        for index, message in enumerate(messages):
            self._check_role(message["role"], index)
        whole, marked = self._apply(messages, record)
        if self.loss_on == "all":
            return Rendered(text=whole, answers=None, ends=False)
        asked = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= learn_from]
        if not asked:
            raise BadRecord("no message of the assistant: there is nothing to train on")
        if self.loss_on == "last":
            asked = asked[-1:]
        if not any(value for i in asked for key, value in messages[i].items() if key != "role"):
            raise BadRecord("every answer is empty: there is nothing to train on")
        if marked:
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            if len(marked) == len(turns):
                spans = [span for turn, span in zip(turns, marked, strict=True) if turn in asked]
                return Rendered(text=whole, answers=tuple(spans), ends=False)
        spans = [self._span(messages, record, index, whole) for index in asked]
        return Rendered(text=whole, answers=tuple(spans), ends=False)

    def _check_role(self, role: str, index: int) -> None:
        """Refuse a role that neither is usual nor stands in the template: a mistyped `assistant`
        would not be trained on."""
        template = str(self.template)
        if role not in ROLES and not any(f"{q}{role}{q}" in template for q in "'\""):
            hint = suggest(role.lower(), ROLES)
            what = f"the role {role!r} is unknown, also to the chat template"
            raise BadRecord(f"message {index + 1}: {what} ({hint})")

    def _span(
        self, messages: list[dict[str, Any]], record: Mapping[str, Any], index: int, whole: str
    ) -> tuple[int, int]:
        """Span of message `index` in `whole`, found by rendering the messages before it."""
        before, _ = self._apply(messages[:index], record, add_generation_prompt=True)
        upto = whole
        if index + 1 < len(messages):
            upto, _ = self._apply(messages[: index + 1], record)
        if not whole.startswith(before) or not whole.startswith(upto):
            raise BadRecord(
                f"the chat template renders message {index + 1} differently once others follow, "
                "so its answer cannot be found (use data.loss_on=last, or a template with "
                "{% generation %})"
            )
        return len(before), len(upto)

    def _apply(
        self,
        messages: list[dict[str, Any]],
        record: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Apply the template; returns the text, and its spans in `{% generation %}`."""
        import jinja2

        given = {**self.tokens, "messages": messages, "tools": record.get("tools")}
        try:
            text = _compiled(str(self.template)).render(
                **given, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRecord(f"the chat template refuses it ({error})") from error
        return _without_marks(text)


def renderer_of(plan: DataPlan) -> Renderer:
    """The plan's renderer, with the plan's chat template or else the tokenizer's."""
    beside = settings_beside(plan.tokenizer)
    tokens = {
        name: value
        for name, value in beside.items()
        if name.endswith("_token") and isinstance(value, str)
    }
    return Renderer(
        columns=dict(plan.columns),
        loss_on=plan.loss_on,
        template=_template(plan, beside),
        tokens=tokens,
        pairs=plan.pairs,
    )


def _template(plan: DataPlan, beside: Mapping[str, Any]) -> str | None:
    if plan.chat_template == "chatml":
        return CHATML
    if plan.chat_template is not None:
        return Path(plan.chat_template).read_text("utf-8")
    found = beside.get("chat_template")
    if isinstance(found, list):  # named templates
        by_name = {entry.get("name"): entry.get("template") for entry in found}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


def no_template() -> ConfigError:
    expected = "a template: the data has chat messages, and the tokenizer has no template"
    fix = "set data.chat_template=chatml or to a Jinja file, or data.tokenizer to a folder with one"
    return ConfigError([Problem(key="data.chat_template", expected=expected, fix=fix)])


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages with the keys role and content, for which `from` and `value` are accepted, too."""
    if not isinstance(value, list) or not value:
        raise BadRecord(f"messages: expected a list with messages in it, not {_shown(value)}")
    found = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise BadRecord(f"message {index + 1}: expected role and content")
        role = message.get("role", message.get("from"))
        content = _joined(message.get("content", message.get("value")), index)
        if not isinstance(role, str):
            raise BadRecord(f"message {index + 1}: expected a role, not {_shown(role)}")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise BadRecord(f"message {index + 1}: expected text as content, not {_shown(content)}")
        if isinstance(content, str) and (OPEN in content or CLOSE in content):
            raise BadRecord(f"message {index + 1}: holds a code point that Unicode keeps unused")
        rest = {k: v for k, v in message.items() if k not in ("from", "value") and v is not None}
        found.append({**rest, "role": NAMES.get(role, role), "content": content})
    return found


def _joined(content: Any, index: int) -> Any:
    """The text of a content that is a list of parts; any other content as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise BadRecord(f"message {index + 1}: expected parts that are text, not {kind}")
        texts.append(text)
    return "".join(texts)


@cache
def _compiled(template: str) -> Any:
    """Compile the template in a sandbox, with the functions that transformers gives templates."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _no_clock
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        expected = f"a Jinja template (line {error.lineno}: {error.message})"
        fix = "correct the template"
        raise ConfigError(
            [Problem(key="data.chat_template", expected=expected, fix=fix)]
        ) from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def _no_clock(_: str) -> str:
    """A fixed date for templates that write today's, so that tokens do not depend on the day."""
    return "1 January 2024"


def _generation() -> type[Any]:
    """Jinja extension for `{% generation %}…{% endgeneration %}`, which marks the contents."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = self.call_method("_mark")
            return nodes.CallBlock(mark, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    return Generation


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    parts, spans, length = [], [], 0
    first, *rest = text.split(OPEN)
    parts.append(first)
    length += len(first)
    for piece in rest:
        inside, _, after = piece.partition(CLOSE)
        spans.append((length, length + len(inside)))
        parts += [inside, after]
        length += len(inside) + len(after)
    return "".join(parts), spans


def _shown(value: Any) -> str:
    return "null" if value is None else type(value).__name__
