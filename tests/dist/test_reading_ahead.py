"""`data.num_workers`: other processes read a slow dataset, and nothing else changes."""

from __future__ import annotations

import os
import signal

import psutil

from tests.running import Colotrain, losses, pid_of, wait_for_step

PROGRAM = """
import random, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.outer(torch.tanh(self.inner(x))), labels)

class Augmented(torch.utils.data.Dataset):
    def __init__(self, split="train", pause=0.0):
        self.pause = pause

    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(self.pause)
        return {"x": torch.randn(8) + random.random(), "labels": torch.tensor(index % 3)}

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"x": torch.zeros(8), "labels": torch.tensor(0)}

    def state_dict(self):
        return {}
"""
SETTINGS = (
    "model.target=ahead_mine:Net",
    "data.target=ahead_mine:Augmented",
    "data.num_workers=2",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.max_steps=12",
    "train.eval_every=4",
    "train.eval_steps=2",
    "checkpoint.every=3",
    "cluster.procs_per_node=2",
    "plugin=zero2",
)


def test_losses_are_the_same_for_any_number_of_processes_and_ranks_and_after_a_kill(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "ahead_mine.py").write_text(PROGRAM)
    whole = losses(colotrain.run(*SETTINGS, "name=whole"))
    assert losses(colotrain.run(*SETTINGS, "name=more", "data.num_workers=3")) == whole
    assert losses(colotrain.run(*SETTINGS, "name=none", "data.num_workers=0")) == whole
    alone = losses(colotrain.run(*SETTINGS, "name=alone", "cluster.procs_per_node=1"))
    assert max(abs(a - b) for a, b in zip(alone, whole, strict=True)) < 1e-6
    process = colotrain.start("run", *SETTINGS, "name=killed", "data.args.pause=0.05", "--json")
    wait_for_step(colotrain, "killed", 5)
    pid = pid_of(colotrain, "killed", rank=1)
    readers = psutil.Process(pid).children()
    assert len(readers) >= 4  # two for training, two for evaluation
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    events = colotrain.events("killed")
    found = {
        e.fields["step"]: e.fields["loss"]
        for e in events
        if "loss" in e.fields and e.kind == "step" and e.rank == 0
    }
    assert [found[step] for step in range(1, 13)] == whole
    assert any(event.kind == "restart" for event in events)
    assert not any(reader.is_running() for reader in readers)


def test_a_stream_is_refused(colotrain: Colotrain) -> None:
    (colotrain.cwd / "ahead_mine.py").write_text(PROGRAM)
    result = colotrain("run", *SETTINGS, "data.target=ahead_mine:Endless", "name=endless")
    assert result.code != 0
    assert "data.num_workers=2: expected 0 for a stream" in result.err


def test_verify_gives_the_reference_the_same_draws(colotrain: Colotrain) -> None:
    (colotrain.cwd / "ahead_mine.py").write_text(PROGRAM)
    options = ("--plugins", "zero2", "--world-sizes", "2", "--accumulation", "2", "--steps", "2")
    result = colotrain("verify", *SETTINGS, *options)
    assert result.code == 0, result.err
