"""What starting a run must not do: each costs every worker, or every `plan`, a part of a second."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import colotrain
from colotrain.engine.comms import process
from colotrain.engine.model import block_reasons
from colotrain.engine.sharding import grouping
from colotrain.errors import UsageError
from colotrain.forked import in_fork
from colotrain.launch.server import forkserver
from colotrain.models.llm import LLM
from tests.dist import difficult


def test_the_groups_are_found_with_one_trial_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = 0

    def counted(trial):  # type: ignore[no-untyped-def]
        nonlocal trials
        trials += 1
        return in_fork(trial)

    monkeypatch.setattr(block_reasons, "in_fork", counted)
    with torch.device("meta"):
        model = LLM(vocab_size=32, d_model=64, num_layers=5, num_heads=1)
    ids = torch.zeros(1, 8, dtype=torch.long)
    groups = grouping.find_groups(model, chunk_bytes=None, batch={"input_ids": ids, "labels": ids})
    assert [name for name, _ in groups] == [f"blocks.{n}" for n in range(5)]
    assert trials == 1


def test_blocks_whose_parameters_are_used_outside_them_are_no_groups() -> None:
    batch = {"x": torch.zeros(2, difficult.WIDTH), "target": torch.zeros(2, dtype=torch.long)}
    batch["kind"] = torch.zeros(2, dtype=torch.long)
    for chunk_bytes in (None, 1):
        groups = grouping.find_groups(
            difficult.Penalty(), chunk_bytes=chunk_bytes, batch=batch, split=True
        )
        assert {name.partition(".")[0] for name, _ in groups} == {"others"}
    groups = grouping.find_groups(difficult.MixedDtypes(), chunk_bytes=None, batch=batch)
    assert len(groups) == 4  # a dtype is asked for outside


class Alone(difficult.Stack):
    """Called once each, but for what a subclass makes of it."""

    def __init__(self) -> None:
        super().__init__(layers=4)


class Twice(Alone):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(super().features(x))


class Sharing(Alone):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.layers[0].norm


class Slopes(Alone):
    """Needs gradients in its forward, as its author knows that training has them."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = super().features(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


class Fails(Alone):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class OneTwice(Alone):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](super().features(x))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Alone, None),
        (OneTwice, None),  # a small part of the model
        (Twice, "layers.0, layers.1, layers.2 … are called 2 times"),
        (Sharing, "layers.0, layers.1, layers.2 … share parameters with others"),
        (difficult.Penalty, "layers.0, layers.1, layers.2 have weights that are used outside them"),
        (
            difficult.InputGradient,
            "layers.0, layers.1, layers.2 have weights that are used outside",
        ),
        (Slopes, "layers.0, layers.1, layers.2 … have weights that are used outside them, or grad"),
        (Fails, "are in a model whose forward failed with one sample"),
    ],
)
def test_why_most_of_a_model_is_gathered_at_once_is_told(
    model: type[torch.nn.Module], says: str | None
) -> None:
    batch = {name: torch.stack([s[name] for s in difficult.samples(2)]) for name in ("x", "kind")}
    batch["target"] = torch.zeros(2, dtype=torch.long)
    told: list[str] = []
    grouping.find_groups(model(), chunk_bytes=None, batch=batch, tell=told.append)
    assert len(told) == (says is not None)
    assert (says or "") in "".join(told)


class Deciding(Alone):
    """Leaves layers out, or runs them in another order, as `decides` says."""

    def __init__(self, decides: Callable[[int], bool] | None) -> None:
        super().__init__()
        self.decides = decides

    def features(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers)
        if self.decides is None:
            random.shuffle(layers)
        for number, layer in enumerate(layers):
            if self.training and self.decides is not None and self.decides(number):
                continue
            x = layer(x)
        return x


DECIDE: dict[str, Callable[[int], bool] | None] = {
    "a rare number of torch": lambda n: bool(torch.rand([]) < 1e-4),
    "a rare number on the CPU": lambda n: torch.rand(1, device="cpu").item() < 1e-4,
    "a rare number of Python": lambda n: random.random() < 1e-4,
    "numbers of Python": lambda n: random.uniform(0, 1) < 0.3,
    "numbers of numpy": lambda n: np.random.rand() < 0.3,
    "Bernoulli": lambda n: bool(torch.bernoulli(torch.tensor(0.3)).item()),
    "the last layer alone": lambda n: n == 3 and random.random() > 1 - 1e-4,
    "the order": None,
}


@pytest.mark.parametrize("decides", DECIDE)
def test_layers_that_run_as_random_numbers_decide_are_no_groups(decides: str) -> None:
    batch = {name: torch.stack([s[name] for s in difficult.samples(2)]) for name in ("x", "kind")}
    batch["target"] = torch.zeros(2, dtype=torch.long)
    model, steady = Deciding(DECIDE[decides]), Deciding(lambda n: False)
    states = torch.get_rng_state(), random.getstate()
    assert grouping.find_groups(model, chunk_bytes=None, batch=batch) == []
    assert len(grouping.find_groups(steady, chunk_bytes=None, batch=batch)) == 4
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


class Looks(Alone):
    """Runs all layers once more for some samples, without gradients or with those of the input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num = how, 0

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.num += 1
        if self.how == "inference" and x[0, 0].item() > 0:
            with torch.inference_mode():
                seen = super().features(x)
            x = x + seen.clone()
        if self.how == "penalty" and self.num % 2 == 0:
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(super().features(x).sum(), x, create_graph=True)
            x = x + slope
        if self.how == "thread" and self.training:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(super().features, x).result()
        return super().features(x)


@pytest.mark.parametrize("how", ["inference", "penalty", "thread"])
def test_layers_that_some_forwards_call_otherwise_are_no_groups(how: str) -> None:
    rows = [s | {"target": torch.zeros((), dtype=torch.long)} for s in difficult.samples(8)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    assert grouping.find_groups(Looks(how), chunk_bytes=None, batch=batch) == []


def test_a_forward_with_fake_tensors_shows_groups_without_a_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = torch.linspace(0, 1, difficult.WIDTH)

    class Reads(Alone):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(x + table)

    monkeypatch.setattr(block_reasons, "LARGEST_REAL_TRIAL_BYTES", 0)
    batch = {name: torch.stack([s[name] for s in difficult.samples(2)]) for name in ("x", "kind")}
    batch["target"] = torch.zeros(2, dtype=torch.long)
    assert len(grouping.find_groups(Reads(), chunk_bytes=None, batch=batch)) == 4


def test_layers_that_run_as_another_sample_decides_are_no_groups() -> None:
    class Exits(Alone):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x if x.sum().item() > 1e6 else layer(x)
            return x

    rows = [s | {"target": torch.zeros((), dtype=torch.long)} for s in difficult.samples(5)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    assert len(grouping.find_groups(Exits(), chunk_bytes=None, batch=batch)) == 4
    other = batch | {"x": batch["x"].clone()}
    other["x"][4] = 1e7
    found = grouping.find_groups(Exits(), chunk_bytes=None, batch=batch, samples=lambda: other)
    assert found == []


def test_building_a_model_on_paper_does_not_load_the_compiler() -> None:
    code = (
        "import sys\n"
        "from colotrain.models.loading import build_on_meta\n"
        "from colotrain.spec.plan import ModelPlan\n"
        "args = dict(vocab_size=32, d_model=64, num_layers=2, num_heads=1)\n"
        "plan = ModelPlan(target='colotrain.models.llm:LLM', args=args, hf=None, adapter=None)\n"
        "model = build_on_meta(plan)\n"
        "assert model is not None and all(p.is_meta for p in model.parameters())\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_workers_keep_no_small_pieces_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tunable = "glibc.malloc.tcache_count"
    for chosen, expected in (
        ("", f"{tunable}=0"),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{tunable}=0"),
        (f"{tunable}=7", f"{tunable}=7"),
    ):
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
        assert forkserver.environment()["GLIBC_TUNABLES"] == expected


def test_settings_for_cuda_are_the_user_s_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spellings = {s for name, (_, *others) in forkserver.OF_CUDA.items() for s in (name, *others)}
    for name in spellings:
        monkeypatch.delenv(name, raising=False)
    assert forkserver.environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in forkserver.environment()


SEES_OPERATIONS = """
import contextlib, importlib, sys
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} while {module} is imported")

with Seen():
    for module in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):  # as the server does
            importlib.import_module(module)
"""


def test_what_the_server_of_workers_imports_runs_no_operation_of_torch() -> None:
    """With TORCH_CUDA_SANITIZER each operation initialises CUDA, and no worker could use it."""
    modules = dict.fromkeys((*forkserver.PRELOAD, *forkserver.PRELOAD_TO_PLAN))
    command = [sys.executable, "-c", SEES_OPERATIONS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_rank_runs_on_the_cores_near_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = os.sched_getaffinity(0)
    address = tmp_path / "0001:3b:00.0"
    address.mkdir()
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(process, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    try:
        (address / "local_cpulist").write_text(f"{min(own)},{max(own) + 1000}-{max(own) + 1003}\n")
        process.run_near(torch.device("cuda", 0))
        assert os.sched_getaffinity(0) == {min(own)}
        (address / "local_cpulist").write_text("\n")  # a virtual machine does not tell
        process.run_near(torch.device("cuda", 0))
        assert os.sched_getaffinity(0) == {min(own)}
    finally:
        os.sched_setaffinity(0, own)


def test_fp32_is_fp32_unless_tf32_is_asked_for() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for wanted, word in ((True, "high"), (False, "highest")):
            process.choose_tf32(wanted)
            assert torch.get_float32_matmul_precision() == word
            assert torch.backends.cudnn.allow_tf32 == wanted
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_the_server_of_workers_is_started_with_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # both are as they were after the test
    for name in (*forkserver.ENVIRONMENT, *forkserver.OF_CUDA):
        monkeypatch.setenv(name, "")
    found: list[dict[str, str]] = []
    started = threading.Event()

    def start() -> None:
        found.append(dict(os.environ))
        started.set()

    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", start)
    forkserver.warm_up()
    assert started.wait(10)
    assert found[0].items() >= forkserver.environment().items()


LISTENS = """
import multiprocessing, os, signal, sys, time
from colotrain.engine.comms.process import StopRequest
from colotrain.rundir import RunDir

stop = StopRequest(RunDir("run"))
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's DataLoader does
context = multiprocessing.get_context("fork")
child = context.Process(target=time.sleep, args=(60,))
child.start()
time.sleep(0.2)  # until it sleeps
child.terminate()
child.join(20)
print(child.exitcode, stop())
os.kill(os.getpid(), signal.SIGUSR1)
print(stop())
"""


def test_a_child_that_ends_or_is_ended_is_no_request_to_stop_its_rank() -> None:
    command = [sys.executable, "-c", LISTENS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["-15 None", "SIGUSR1", ""], done.stderr


def test_a_run_in_a_thread_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(colotrain.run, ["recipe=llm-tiny"]).exception()
    assert isinstance(error, UsageError)
    assert "main thread" in str(error)
    assert not any(tmp_path.iterdir())
