"""Tiny image-text directories with processors of their own, made without a network, and records."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colotrain.export.tokenizer import _byte_characters

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ("<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
LANGUAGE = {
    **{"vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": None},
    **{"eos_token_id": 256, "pad_token_id": 257},
}
SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 16, "patch_size": 4},
}


@dataclass(frozen=True)
class ImageText:
    """A family: its architecture, and functions that make its configuration and processor."""

    name: str
    architecture: str
    kind: str
    marks: tuple[str, ...]
    settings: Callable[[Any], dict[str, Any]]
    """Settings of the configuration, for a tokenizer."""
    processor: Callable[[Any], Any]
    image: str
    """What the chat template writes for an image."""

    def make(self, folder: Path) -> Path:
        """Save a model with random weights, and its processor, as transformers does."""
        self.make_processor(folder)
        return self.make_model(folder)

    def make_model(self, folder: Path) -> Path:
        import transformers

        torch.manual_seed(3)
        settings = self.settings(make_tokenizer(self.marks))
        config = transformers.AutoConfig.for_model(self.kind, **settings)
        model = getattr(transformers, self.architecture)(config)
        for parameter in model.parameters():
            if not parameter.any():  # Gemma 3's projection is: its gradient would be thousands
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
        return folder

    def make_processor(self, folder: Path) -> Any:
        processor = self.processor(make_tokenizer(self.marks))
        processor.chat_template = TEMPLATE.replace("IMAGE", self.image)
        processor.save_pretrained(folder)
        return processor


def make_tokenizer(marks: tuple[str, ...]) -> Any:
    """A tokenizer of bytes and special tokens; those named `NAME=TEXT` are the attribute NAME."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    named = dict(mark.split("=", 1) for mark in marks)
    made.add_special_tokens([*MARKS, *named.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", **named
    )


def _gemma3(tokenizer: Any) -> Any:
    import transformers as t

    images = t.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4)
    return t.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _clip(size: int) -> Any:
    import transformers as t

    return t.CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


def _llava(tokenizer: Any) -> Any:
    import transformers as t

    return t.LlavaProcessor(
        _clip(16),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


GRIDS = [[16, 32], [32, 16], [32, 32]]


def _llava_next(tokenizer: Any) -> Any:
    import transformers as t

    images = t.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=GRIDS,
    )
    return t.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _idefics3(tokenizer: Any) -> Any:
    import transformers as t

    images = t.Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    return t.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _qwen(tokenizer: Any) -> Any:
    import transformers as t

    images = t.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return t.Qwen2_5_VLProcessor(images, tokenizer, t.Qwen2VLVideoProcessor())


def _id(tokenizer: Any, mark: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(mark))


CLIP = {**SIGHT, "model_type": "clip_vision_model", "projection_dim": 32}
GEMMA3 = ImageText(
    "Gemma 3",
    "Gemma3ForConditionalGeneration",
    "gemma3",
    ("boi_token=<boi>", "eoi_token=<eoi>", "image_token=<img>"),
    lambda tokenizer: {
        "text_config": LANGUAGE,
        "vision_config": {**SIGHT, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": _id(tokenizer, "<img>"),
        "boi_token_index": _id(tokenizer, "<boi>"),
        "eoi_token_index": _id(tokenizer, "<eoi>"),
    },
    _gemma3,
    "<boi>",
)
LLAVA = ImageText(
    "LLaVA",
    "LlavaForConditionalGeneration",
    "llava",
    ("image_token=<image>",),
    lambda tokenizer: {
        "text_config": {**LANGUAGE, "model_type": "llama"},
        "vision_config": CLIP,
        "image_token_index": _id(tokenizer, "<image>"),
    },
    _llava,
    "<image>",
)


def _with_experts(tokenizer: Any) -> dict[str, Any]:
    of_experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    return {**LLAVA.settings(tokenizer), "text_config": {**LANGUAGE, **of_experts}}


LLAVA_OF_EXPERTS = replace(LLAVA, name="LLaVA of experts", settings=_with_experts)
LLAVA_NEXT = ImageText(
    "LLaVA-NeXT",
    "LlavaNextForConditionalGeneration",
    "llava_next",
    ("image_token=<image>",),
    lambda tokenizer: {
        "text_config": {**LANGUAGE, "model_type": "llama"},
        "vision_config": CLIP,
        "image_token_index": _id(tokenizer, "<image>"),
        "image_grid_pinpoints": GRIDS,
    },
    _llava_next,
    "<image>",
)
IDEFICS3 = ImageText(
    "Idefics 3",
    "Idefics3ForConditionalGeneration",
    "idefics3",
    (
        *("image_token=<image>", "a_token=<fake_token_around_image>"),
        *("b_token=<end_of_utterance>", "c_token=<global-img>"),
    ),
    lambda tokenizer: {
        "text_config": {**LANGUAGE, "model_type": "llama"},
        "vision_config": SIGHT,
        "image_token_id": _id(tokenizer, "<image>"),
        "scale_factor": 2,
    },
    _idefics3,
    "<image>",
)
QWEN = ImageText(
    "Qwen2.5-VL",
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    (
        *("a_token=<|image_pad|>", "b_token=<|video_pad|>"),
        *("c_token=<|vision_start|>", "d_token=<|vision_end|>"),
    ),
    lambda tokenizer: {
        "text_config": {
            **LANGUAGE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision_config": {
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4},
            **{"patch_size": 4, "out_hidden_size": 32, "window_size": 16},
            "fullatt_block_indexes": [1],
        },
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
    },
    _qwen,
    "<|vision_start|><|image_pad|><|vision_end|>",
)
FAMILIES = (GEMMA3, LLAVA, LLAVA_NEXT, IDEFICS3, QWEN)

SIZES = ((24, 16), (16, 40), (32, 32), (40, 24), (20, 20))
"""Width and height of images, in turn."""


def pictures(count: int, *, seed: int = 0) -> list[Any]:
    """Images of random pixels and different sizes."""
    from PIL import Image

    draws = np.random.default_rng(seed)
    sizes = [SIZES[index % len(SIZES)] for index in range(count)]
    return [
        Image.fromarray(draws.integers(0, 255, (height, width, 3), dtype=np.uint8))
        for width, height in sizes
    ]


def as_png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def conversations(count: int, *, seed: int = 0) -> list[tuple[list[dict[str, Any]], list[Any]]]:
    """Messages in parts, with one or two images each, and these images.

    Every third conversation has two answers, with an image in each question.
    """
    images, found = iter(pictures(2 * count, seed=seed)), []
    for index in range(count):
        text = [{"type": "text", "text": f"What is {index}?"}]
        one, two = next(images), next(images)
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"It is {index * 7}."}]}
        image = {"type": "image"}
        if index % 3 == 0:
            asked = [{"role": "user", "content": [image, *text]}]
            again = [{"role": "user", "content": [*text, image]}]
            found.append(([*asked, answer, *again, answer], [one, two]))
        elif index % 3 == 1:
            found.append(([{"role": "user", "content": [*text, image]}, answer], [one]))
        else:
            found.append(([{"role": "user", "content": [image, image, *text]}, answer], [one, two]))
    return found


def write_records(folder: Path, count: int, *, in_files: bool = True, seed: int = 0) -> Path:
    """A JSONL file of conversations, whose images are files beside it, or bytes in base64."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (messages, images) in enumerate(conversations(count, seed=seed)):
        given: list[Any] = []
        for index, image in enumerate(images):
            if in_files:
                name = f"pictures/{number}-{index}.png"
                (folder / "pictures").mkdir(exist_ok=True)
                (folder / name).write_bytes(as_png(image))
                given.append(name)
            else:
                given.append({"bytes": base64.b64encode(as_png(image)).decode(), "path": None})
        lines.append(json.dumps({"messages": messages, "images": given}))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
