"""A tokenizer of a masked language model, and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

NAMES = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "roberta": {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"},
}
"""Style of a tokenizer → role → special token; ids count from 0 in this order."""
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def make_tokenizer(folder: Path, style: str = "bert") -> dict[str, int]:
    """Save a tokenizer of single letters as transformers does; token → id."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    names = NAMES[style]
    vocabulary = {text: number for number, text in enumerate([*names.values(), *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in names.values()])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {f"{role}_token": text for role, text in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary


def write_texts(path: Path, count: int, *, longest: int = 30, seed: int = 0) -> list[str]:
    """Records of text, of one letter at least."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(LETTERS, k=draw.randint(1, longest))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts
