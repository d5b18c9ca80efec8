"""Tensors in a folder of safetensors files, read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from colotrain.errors import ColotrainError, fix_of
from colotrain.rundir import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
POINTER = b"version https://git-lfs"
"""Begin of what a clone without Git LFS has in place of a large file."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes of the format that hold a parameter's values as they are."""


class StoredTensors:
    """Tensors of several safetensors files by name; only requested rows are read.

    Files stay memory-mapped while the object lives. Raises `ColotrainError` for a file that is not
    safetensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for path in files:
            try:
                opened = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Any:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype as the format names it, such as F32 or F8_E4M3."""
        return str(self._files[name].get_slice(name).get_dtype())

    def rows(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """`count` rows of dimension 0 from `start` on (default: all of the tensor)."""
        if count is None or not self.shape(name):
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[start : start + count]


def _unreadable(path: Path, error: Exception) -> ColotrainError:
    with path.open("rb") as file:
        is_pointer = file.read(len(POINTER)) == POINTER
    if is_pointer:
        return ColotrainError(f"{path}: a pointer of Git LFS, without the weights", "git lfs pull")
    problem = f"{path}: not a safetensors file that can be read ({error})"
    return ColotrainError(problem, "copy the file again")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model directory; raises `ColotrainError` where there are none.

    Pickles (`pytorch_model.bin`) are never read: they may hold code.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            problem = f"{folder}: {missing[0]} is missing ({len(missing)} of {len(names)} files)"
            raise ColotrainError(problem, "copy the directory again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if pickles := sorted(path.name for glob in PICKLES for path in folder.glob(glob)):
        raise ColotrainError(
            f"{folder}: its weights are pickles ({pickles[0]}), which may hold code",
            "if you trust them, load and save the model once with transformers: save_pretrained "
            f"writes {SINGLE}",
        )
    raise ColotrainError(f"{folder}: has no {SINGLE}", "give a directory with safetensors weights")


def _weight_map(index: Path) -> Mapping[str, str]:
    """Tensor → file name, without folders: no file outside the directory is opened."""

    try:
        named = read_json(index)["weight_map"]
        return {name: Path(file).name for name, file in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{index}: not an index of safetensors files ({error})"
        raise ColotrainError(problem, fix_of(error, "copy the file again")) from error
