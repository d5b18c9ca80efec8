"""Rendering conversations by chat templates, as transformers does, with the spans of answers.
No torch here.
"""

from __future__ import annotations

import operator
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from colotrain.data.prepare.messages import Conversation
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.vocabulary import load, tokenizer_file
from colotrain.errors import ColotrainError, ConfigError, Problem

Span = tuple[int, int]
Messages = list[dict[str, Any]]

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKEN = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|\[/?(?:INST|SYSTEM_PROMPT)\]"
)
"""What only special tokens look like: `<|im_end|>`, `<start_of_turn>`, `[INST]`."""
DATE = date(2024, 1, 1)
"""The date for templates that write today's, so that tokens do not depend on the day."""
DIRECTIVES = ("-d", "-m", "-I", "-H", "%", *"aAbBdHIjmMpSwxXyYcZ")
"""Directives of strftime; the longer ones first."""
STATM = Path("/proc/self/statm")
SECONDS, LOOK_S = 3.0, 0.05
"""Most processor time of one rendering, whose loops may never end, and after how much it is
looked at."""
MOST_BYTES = 1 << 30
"""Most memory that one rendering may fill, as far as it is looked at."""
MOST_BITS, MOST_REPEATED = 1 << 16, 1 << 26
"""Most bits of a number that a template computes with, and most items of what `*` repeats."""
ARITHMETIC = {
    **{"*": operator.mul, "**": operator.pow, "//": operator.floordiv, "%": operator.mod},
    "/": operator.truediv,
}
"""Operators that may compute for hours without a chance to end them by a signal."""
COMPILING = threading.Lock()
CHATML = (
    "{% set first = messages[0] if messages and messages[0].role == 'system' else none %}"
    "{% if first or tools %}{{ '<|im_start|>system\n' + (first.content if first else '') }}"
    "{% if tools %}{{ '\n\n' if first else '' }}{{ '# Tools\n\nThese functions can be called, "
    "each described by JSON:\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}"
    "{% endfor %}{{ '\n</tools>\n\nA call is JSON with the name and the arguments:\n<tool_call>\n"
    '{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\' }}{% endif %}'
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in (messages[1:] if first else messages) %}"
    "{% set content = message.content or '' %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% set thought = message.reasoning_content or message.thinking or message.reasoning %}"
    "{% if thought %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for call in message.tool_calls or [] %}{% set called = call.function or call %}"
    "{{ '\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": ' + called.name | tojson + ', \"arguments\": ' }}"
    "{{ called.arguments if called.arguments is string else called.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}"
    "{{ '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The built-in template: ChatML, with tools and their calls in the manner of Hermes and Qwen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template, and the special tokens that it may use, by name. It can be pickled."""

    source: str
    tokens: dict[str, str]

    @property
    def has_marks(self) -> bool:
        return GENERATION.search(self.source) is not None

    def mentions(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def apply(
        self, messages: Messages, chat: Conversation, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of messages, and its spans in `{% generation %}`."""
        source = self.source
        if "strftime_now" in source:
            source = _fixed_date() + source
        render = _transformers_renderer()
        try:
            with limits():
                _compile(source)
                texts, marked = render(
                    conversations=[messages],
                    tools=chat.tools,
                    documents=chat.documents,
                    chat_template=source,
                    return_assistant_tokens_mask=self.has_marks,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.tokens, **chat.settings},
                )
        except ImportError as error:  # jinja2 is absent or too old
            raise _not_installed() from error
        except Exception as error:  # a template may raise any
            raise _refusal(error) from error
        return texts[0], [(start, stop) for start, stop in marked[0]] if marked else []


@cache
def _transformers_renderer() -> Any:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise _not_installed() from error
    return render_jinja_template


def _not_installed() -> ColotrainError:
    problem = "conversations need transformers and jinja2, which render chat templates"
    return ColotrainError(problem, "pip install 'colotrain[hf]'")


def _refusal(error: Exception) -> Exception:
    import jinja2

    key = "data.chat_template"
    if isinstance(error, jinja2.TemplateSyntaxError):
        expected = f"a Jinja template (line {error.lineno}: {error.message})"
        return ConfigError([Problem(key=key, expected=expected, fix="correct the template")])
    limits = {TimeoutError: f"within {SECONDS:g} s", MemoryError: f"in {MOST_BYTES >> 20} MiB"}
    for kind, limit in limits.items():
        if isinstance(error, kind):
            expected = f"a template that renders a conversation {limit}"
            fix = "look for a loop that does not end"
            return ConfigError([Problem(key=key, expected=expected, fix=fix)])
    return BadRecord(f"the chat template refuses it ({error})")


@contextmanager
def limits() -> Iterator[None]:
    """Raise `TimeoutError` or `MemoryError` after too much processor time or memory.

    Not in other threads than the main one, nor where somebody else uses its timer.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return
    began, used_before = time.thread_time(), _used_bytes()

    def look(*_: object) -> None:
        is_late = time.thread_time() - began > SECONDS
        if is_late or _used_bytes() - used_before > MOST_BYTES:
            signal.setitimer(signal.ITIMER_VIRTUAL, 1, 1)  # again only where nothing ends by this
            raise TimeoutError if is_late else MemoryError

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # the last signal may come right here
            signal.signal(signal.SIGVTALRM, before)


def _used_bytes() -> int:
    """Return the memory that is this process's alone, without what it shares with files (Linux)."""
    try:
        _, resident, shared, *_ = STATM.read_bytes().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


@lru_cache
def _compile(source: str) -> None:
    """Have transformers compile, and keep, a template that computes with small numbers alone.

    jinja2 asks the class of its sandbox when it compiles a template, which transformers makes.
    """
    from jinja2.sandbox import SandboxedEnvironment as Sandbox

    table = {name: partial(_compute, function) for name, function in ARITHMETIC.items()}
    with COMPILING:
        before = Sandbox.intercepted_binops, Sandbox.default_binop_table
        Sandbox.intercepted_binops = before[0] | table.keys()
        Sandbox.default_binop_table = before[1] | table
        try:
            _transformers_renderer()(conversations=[], chat_template=source)
        finally:
            Sandbox.intercepted_binops, Sandbox.default_binop_table = before


def _compute(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    bits = [number.bit_length() for number in (left, right) if isinstance(number, int)]
    if len(bits) == 2 and function is operator.pow:
        bits.append(bits[0] * abs(right))
    if max(bits, default=0) > MOST_BITS:
        raise OverflowError(f"a number of more than {MOST_BITS:,} bits")
    if len(bits) == 1 and function is operator.mul:
        number, items = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(items, Sequence) and len(items) * number > MOST_REPEATED:
            raise OverflowError(f"{len(items):,} items {number:,} times")
    return function(left, right)


@cache
def _fixed_date() -> str:
    """A macro in place of the function `strftime_now` that transformers gives templates."""
    replaced = "".join(
        f" | replace('%{directive}', '{DATE.strftime('%' + directive)}')"
        for directive in DIRECTIVES
    )
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}"


def unknown_marks(template: str, tokenizer: str | Path, tokens: Sequence[str] = ()) -> list[str]:
    """The marks in a template that are no tokens of a tokenizer to which `tokens` are added.

    Empty for `bytes` and `bpe-SIZE`, which have special tokens of no template.
    """
    file = tokenizer_file(str(tokenizer))
    marks = dict.fromkeys(TOKEN.findall(template))
    if file is None or not marks:
        return []
    known = load(file)
    return [mark for mark in marks if mark not in tokens and known.token_to_id(mark) is None]


def describe_marks(marks: Sequence[str]) -> str:
    """Say that these marks of a template are no tokens, and what follows."""
    names, one = ", ".join(marks), len(marks) == 1
    return (
        f"{names} of the chat template {'is' if one else 'are'} no token{'s' * (not one)} of the "
        f"tokenizer: {'it is' if one else 'each is'} read and trained on as several pieces of text"
    )
