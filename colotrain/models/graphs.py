"""Parts of a model that torch's compiler leaves as they are.

The compiler cannot trace what ranks exchange through shared memory or a process group, nor what
depends on the numbers in a tensor, such as how many tokens an expert gets. A compiled model leaves
its graph there, and what is before and behind it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Eager:
    """A function that calls another one; a compiled model leaves its graph for it."""

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return function(*args, **options)


run_eagerly = Eager()


@functools.cache
def leave_graphs() -> None:
    """Hide from torch's compiler what `run_eagerly` calls; call it before a model is compiled.

    A decorator would load the compiler in every process, which takes 30 MiB and 0.3 s. A function
    around a hidden one would itself be compiled, for each number and shape of its arguments.
    """
    Eager.__call__ = torch.compiler.disable(Eager.__call__)  # type: ignore[method-assign]
