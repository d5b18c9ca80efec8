"""Tiny tokenizers built as those of known model families are, and texts that try them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, the worst of times.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café, Ελλάδα.",
    "def area(radius):\n    return 3.14 * radius ** 2\n\n\nprint(area(2))\n",
    "Question: what is the capital of Italy?\nAnswer: Rome is the capital of Italy.\n",
]
WORDS = ["the", "quick", "brown", " fox", " lazy", " dog", "e", " ", "  ", "\n", "\n\n", ".", ", "]
PIECES = [
    *WORDS,
    "\n\t\n\n",
    "! ?",
    "über ",
    "日本",
    "語 ",
    "🙂",
    "👩‍👩‍👧 ",
    "e\u0301",
    "\u00a0",
    "İstanbul ",
    "ﬁ",
    "0123 ",
]
STYLES = ("llama3", "gemma", "gpt2", "prefix", "bert", "t5")


def random_text(draw: random.Random, most: int = 30, pieces: Sequence[str] = PIECES) -> str:
    return "".join(draw.choice(pieces) for _ in range(draw.randint(1, most)))


def make(folder: Path, style: str, **settings: Any) -> Path:
    """Save a tokenizer in the style of a family; `settings` go into tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel
    special = {
        "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        "gpt2": {"eos_token": "<|endoftext|>"},
        "prefix": {"bos_token": "<s>", "eos_token": "</s>"},
        "bert": {
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "mask_token": "[MASK]",
        },
        "t5": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    }[style]
    names = list(special.values())
    wanted = {"vocab_size": 400, "special_tokens": names, "show_progress": False}
    if style in ("llama3", "gpt2", "prefix"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=style == "prefix")
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = BpeTrainer(initial_alphabet=byte_level.alphabet(), **wanted)
    elif style == "gemma":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        wanted["special_tokens"] = [*names, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = BpeTrainer(**{**wanted, "vocab_size": 500})
    elif style == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = WordPieceTrainer(**wanted)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = UnigramTrainer(unk_token="<unk>", **wanted)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)

    def template(single: str) -> Any:
        ids = [(name, tokenizer.token_to_id(name)) for name in names if name in single]
        return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)

    tokenizer.post_processor = {
        "llama3": lambda: processors.Sequence(
            [processors.ByteLevel(trim_offsets=True), template("<|begin_of_text|> $A")]
        ),
        "gemma": lambda: template("<bos> $A"),
        "gpt2": lambda: processors.ByteLevel(trim_offsets=True),
        "prefix": lambda: processors.RobertaProcessing(
            ("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>"))
        ),
        "bert": lambda: template("[CLS] $A [SEP]"),
        "t5": lambda: template("$A </s>"),
    }[style]()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder
