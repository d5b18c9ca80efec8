"""Small directories of models of embeddings, as sentence-transformers saves them, and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.masked import LETTERS, NAMES, make_tokenizer

POOLING = {"bert": "mean_tokens", "qwen3": "lasttoken"}


def make_embedder(folder: Path, kind: str = "bert", *, pooling: bool = True) -> Path:
    """A BERT without a head, or a decoder like Qwen3-Embedding, with a tokenizer of letters."""
    import transformers
    from tokenizers import Tokenizer, processors

    torch.manual_seed(3)
    vocabulary = make_tokenizer(folder)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 24, "num_attention_heads": 2, "initializer_range": 0.15}
    config: Any
    if kind == "bert":
        config = transformers.BertConfig(pad_token_id=0, **sizes)
        model = transformers.BertModel(config)
    else:
        heads = {"num_key_value_heads": 1, "head_dim": 8}
        config = transformers.Qwen3Config(tie_word_embeddings=True, **sizes, **heads)
        model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    around = "[CLS] $A [SEP]" if kind == "bert" else "$A [SEP]"
    special = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    names = {f"{role}_token": text for role, text in NAMES["bert"].items()}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    if pooling:
        write_modules(folder, POOLING[kind])
    return folder


def write_modules(folder: Path, mode: str, *others: str) -> None:
    """The files with which sentence-transformers finds a directory's pooling."""
    kinds = ("Transformer", "Pooling", "Normalize", *others)
    paths = ("", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in (*POOLING.values(), "cls_token")}
    settings = {"word_embedding_dimension": 16, **modes, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def write_related(path: Path, count: int, *, negatives: bool = False, longest: int = 24) -> None:
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(draw.choices(LETTERS.strip(), k=draw.randint(2, longest)))
            record = {"query": text[: len(text) // 2 + 1], "positive": text[::-1]}
            if negatives:
                record["negative"] = "".join(draw.choices(LETTERS.strip(), k=5))
            print(json.dumps(record), file=file)
