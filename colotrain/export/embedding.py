"""Files of sentence-transformers beside the weights of a model of embeddings."""

from __future__ import annotations

from pathlib import Path

from colotrain.export.tokenizer import copy_files
from colotrain.rundir import read_json

MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")


def copy_modules(source: Path, folder: Path) -> None:
    """Copy what sentence-transformers reads beside the model itself; nothing where it is absent.

    A module, such as the pooling, has a folder with its settings; code is never copied.
    """
    if not (source / MODULES).is_file():
        return
    copy_files(source, folder, FILES)
    for module in read_json(source / MODULES):
        name = Path(str(module.get("path", ""))).name
        if name not in ("", ".", "..") and (source / name / "config.json").is_file():
            (folder / name).mkdir(exist_ok=True)
            copy_files(source / name, folder / name, ("config.json",))
