"""Compiles `guard.cpp` against the torch that is installed. Without importing torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_guard(folder: Path) -> Path:
    """The library, which a process must load before it imports torch; a few seconds."""
    found, spec = compiler(), importlib.util.find_spec("torch")
    assert found is not None
    assert spec is not None
    torch = Path(str(spec.origin)).parent
    source, library = Path(__file__).with_name("guard.cpp"), folder / "guard.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}"]
    links = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = [found, *flags, str(source), "-o", str(library), "-Wl,--no-as-needed", *links]
    subprocess.run(command, check=True)
    return library
