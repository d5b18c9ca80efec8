"""Tokenizers with chat templates that are built as those of well-known models are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = (
    "user assistant system tool the weather in Rome is sunny and I think so because it says 21 "
    'degrees {"city": "Rome"} function name arguments parameters description type object string '
)

BEGINS = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|start|>system<|sep|>\n\nFunctions:\n' }}"
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}{{- '<|eot|>' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start|>ipython<|sep|>\n\n' + message.content | trim + '<|eot|>' }}"
    "{%- elif message.tool_calls %}"
    "{{- '<|start|>' + message.role + '<|sep|>\n\n' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    "{%- endfor %}{{- '<|eot|>' }}"
    "{%- else %}"
    "{{- '<|start|>' + message.role + '<|sep|>\n\n' + message.content | trim + '<|eot|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|sep|>\n\n' }}{%- endif %}"
)
"""As Llama 3's: begins with bos_token, which the tokenizer's post-processor adds to a text, too."""

THINKS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Functions\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=messages | length - 1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content or '' %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    "{{- '\n' if content or not loop.first else '' }}"
    '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}"
    "{%- endif %}{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
"""As Qwen 3's: reasoning is rendered only in answers behind the last question."""


def make_tokenizer(folder: Path, special: tuple[str, ...], *, begins: bool, **settings: Any) -> Any:
    """Save a byte-level BPE as transformers does, and return what `AutoTokenizer` makes of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 4], trainer)
    if begins:
        number = tokenizer.token_to_id(special[0])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], number)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def with_bos(folder: Path) -> Any:
    special = ("<|begin|>", "<|eot|>", "<|start|>", "<|sep|>")
    names = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    return make_tokenizer(folder, special, begins=True, chat_template=BEGINS, **names)


def with_reasoning(folder: Path) -> Any:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
    return make_tokenizer(
        folder, special, begins=False, chat_template=THINKS, eos_token="<|im_end|>"
    )


def without_template(folder: Path) -> Any:
    return make_tokenizer(folder, ("<eos>",), begins=False, eos_token="<eos>")
