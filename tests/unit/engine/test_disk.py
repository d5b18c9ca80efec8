"""Memory that rests in a file: what is written stays, nothing is left behind, space is checked."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colotrain.engine.offload.disk import PAGE, DiskStore
from colotrain.errors import ColotrainError


def resident_file_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def test_values_survive_being_written_back_and_dropped(tmp_path: Path) -> None:
    store = DiskStore(folder=tmp_path, limit=1 << 30)
    region = store.take(64 << 20)
    (values,) = region.carve([16 << 20], [torch.float32])
    assert values.count_nonzero() == 0
    wanted = torch.randn(16 << 20, generator=torch.Generator().manual_seed(0))
    values.copy_(wanted)
    full = resident_file_bytes()
    region.start_writing()
    region.finish_writing(forget=True)
    assert full - resident_file_bytes() > 60 << 20
    region.fetch(to_write=False)
    assert full - resident_file_bytes() < 8 << 20
    region.drop()
    assert torch.equal(values, wanted)


def test_tensors_of_a_region_do_not_overlap_and_have_their_own_storage(tmp_path: Path) -> None:
    store = DiskStore(folder=tmp_path, limit=1 << 30)
    sizes = [1, 0, 17, 1000]
    tensors = store.take(8192).carve(sizes, [torch.float32] * 4)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.untyped_storage().nbytes() == 4 * size
        assert bool((tensor == number).all())
        assert size == 0 or tensor.data_ptr() % 64 == 0


def test_what_is_reserved_is_handed_out_before_more_is_taken(tmp_path: Path) -> None:
    store = DiskStore(folder=tmp_path, limit=1 << 30)
    store.reserve(4 * PAGE)
    first, second = store.take(PAGE), store.take(2 * PAGE)
    assert store.taken == 4 * PAGE
    assert first.file is second.file
    assert second.start == PAGE
    store.take(2 * PAGE)
    assert store.taken == 6 * PAGE


def test_more_than_the_budget_is_refused(tmp_path: Path) -> None:
    store = DiskStore(folder=tmp_path, limit=10 * PAGE)
    with pytest.raises(ColotrainError, match=r"plugin\.budget\.disk: .* are allowed"):
        store.reserve(11 * PAGE)


def test_a_disk_without_space_is_known_when_it_is_asked_for(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # stands for a full disk: same error path
    store = DiskStore(folder=tmp_path, limit=1 << 40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ColotrainError, match=r"no file of .* bytes can be made"):
            store.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


HOLDS_A_REGION = """
import os, signal, sys
from pathlib import Path
from colotrain.engine.offload.disk import DiskStore
region = DiskStore(folder=Path(sys.argv[1]), limit=1 << 30).take(1 << 20)
region.carve([1 << 18], [__import__("torch").float32])[0].fill_(1.0)
assert not list(Path(sys.argv[1]).iterdir())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS_A_REGION, str(tmp_path)]
    done = subprocess.run(command, timeout=120, env=os.environ, cwd=Path(__file__).parents[3])
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []
