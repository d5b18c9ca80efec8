"""Rendering conversations by chat templates, as transformers does, with the spans of answers.
No torch here.
"""

from __future__ import annotations

import operator
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
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
SECONDS = 3.0
"""Most processor time of one rendering: a template may have loops that never end."""
MOST_BYTES, MOST_BITS = 1 << 30, 1 << 16
"""Most memory of one rendering, and most bits of a number that a template computes with."""
ARITHMETIC = {
    **{"*": operator.mul, "**": operator.pow, "//": operator.floordiv, "%": operator.mod},
    "/": operator.truediv,
}
"""Operators that may compute for hours without a chance to end them by a signal."""
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
            with _time_limit(SECONDS), _memory_limit(MOST_BYTES), _small_numbers():
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
    limits = {
        TimeoutError: f"within {SECONDS:g} s",
        MemoryError: f"in {MOST_BYTES >> 20} MiB of memory",
        OverflowError: "without huge numbers",
    }
    if limit := next((text for kind, text in limits.items() if isinstance(error, kind)), ""):
        expected = f"a template that renders a conversation {limit}"
        fix = "look for a loop that does not end"
        return ConfigError([Problem(key=key, expected=expected, fix=fix)])
    return BadRecord(f"the chat template refuses it ({error})")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after this processor time, unless somebody else uses its timer."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Let allocations fail with `MemoryError` after so many more bytes of addresses (Linux)."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        used = int(STATM.read_text("ascii").split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    limits = [used + num_bytes, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _small_numbers() -> Iterator[None]:
    """Have templates that are compiled meanwhile compute with numbers of bounded size alone."""
    from jinja2.sandbox import SandboxedEnvironment as Sandbox

    before = Sandbox.intercepted_binops, Sandbox.default_binop_table
    table = {name: partial(_compute, function) for name, function in ARITHMETIC.items()}
    Sandbox.intercepted_binops = before[0] | table.keys()
    Sandbox.default_binop_table = before[1] | table
    try:
        yield
    finally:
        Sandbox.intercepted_binops, Sandbox.default_binop_table = before


def _compute(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    bits = [number.bit_length() for number in (left, right) if isinstance(number, int)]
    if len(bits) == 2 and function is operator.pow:
        bits.append(bits[0] * abs(right))
    if max(bits, default=0) > MOST_BITS:
        raise OverflowError(f"a number of more than {MOST_BITS:,} bits")
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
