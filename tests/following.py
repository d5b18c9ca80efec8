"""Following a page of the documentation: its files are made, its commands run, in their order.

The rules by which a command is run otherwise than on a user's machine; there are no others, and a
line that none of them covers is an error:

1. *Size.* `recipes/llm-*.yaml` of the page's folder are the shipped ones, with a model of four
   narrow layers, 32 tokens, 8 samples and four steps. Commands stay as they stand. What they set
   at full size is resolved by tests/unit/test_readme.py, which makes all plans of such recipes.
   Pages with `submit`, which plans and does not train, have the shipped ones.
2. *Runs of one's own.* `my-run`, `RUN` and the like, where the page does not make them, are copies
   of one small run.
3. *Places.* `/scratch/me` and `books/` are folders, this one with a text in it; `node0:29500` is
   a free port of this machine.
4. *Several machines.* Commands of one block with `cluster.node_rank` are started together, here;
   the doctor may find there that the head is this machine, and nothing else.
5. *A running job.* `--live` and `stop` meet a run that is started before and stopped after.
6. *Schedulers.* Their commands are stand-ins; SLURM's take every job, and tests/slurm has the real
   ones.
7. *Records.* A block of JSON is the file that the command after it names.
8. *Models.* `my-model` is a small Llama with a tokenizer of bytes.
9. *Installing.* `pip` and `make` are not run; `make run` is the `colotrain run` that it stands for.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.dist.hf import make_chat_directory
from tests.pages import ROOT, Block, blocks, words
from tests.running import Colotrain, wait_for_step

PROGRAMS = ("colotrain", "python", "make", "pip")
"""What a line may begin with."""
RUNS = ("my-run", "other-run", "RUN", "first", "second", "third")
SMALL_MODEL = {"vocab_size": 256, "d_model": 32, "num_layers": 4, "num_heads": 2, "d_hidden": 64}
SMALL_DATA = {"corpus": "stdlib", "seq_len": 32, "tokenizer": "bytes"}
SMALL_TRAIN = {"max_steps": 4, "global_batch": 8, "micro_batch": 2, "eval_steps": 1}
TAKES_LONG = {"--advise", "--compare", "--measure", "--trace"}
"""Options of `plan` that are tried with a small recipe; at full size, only the settings are."""
SLURM = {
    "sbatch": 'case "$*" in *--test-only*) echo fine >&2;; *) echo "77";; esac',
    "squeue": "exit 0",
    "scontrol": "exit 0",
    "sacct": "exit 0",
    "scancel": "exit 0",
    "sinfo": "exit 0",
    **dict.fromkeys(("kubectl", "sky", "dstack", "ssh"), "exit 1"),
}
A_RUN = (
    "run",
    "recipe=llm-tiny",
    "train.max_steps=20",
    "train.global_batch=8",
    "train.micro_batch=2",
    "checkpoint.every=10",
)


@dataclass
class Follower:
    """Follows one page in the folder of `colotrain`."""

    colotrain: Colotrain
    page: Path
    sample: Path
    """The folder of a small run that has ended."""
    ran: list[list[str]] = field(default_factory=list)
    """What was run, as it stands on the page."""

    def follow(self) -> None:
        self._put_slurm()
        self._write("books/one.txt", "A text of one's own, of no great length. " * 100)
        found = blocks(self.page)
        shown = [line for block in found for line in block.lines]
        self._put_runs(shown)
        if any("hf: my-model" in block.body for block in found):
            make_chat_directory(self.colotrain.cwd / "my-model")
        if not any(line.startswith("colotrain submit ") for line in shown):
            write_small_recipes(self.colotrain.cwd)
        for index, block in enumerate(found):
            if block.path:
                self._write(block.path, block.body)
            elif block.language == "json":
                self._write_records(block, found[index + 1 :])
            elif block.language == "python":
                self._python("-c", block.body)
            together = [line for line in block.lines if "cluster.node_rank=" in line]
            if together:
                self._at_once(together)
            for line in block.lines:
                if line not in together:
                    self._line(line)

    def _line(self, line: str) -> None:
        first, *rest = words(line)
        if first == "colotrain":
            self._colotrain(line, rest)
        elif [first, *rest[:1]] == ["make", "run"]:
            given = " ".join(w.removeprefix("ARGS=") for w in rest[1:]).split()
            self._colotrain(line, ["run", *(given or ["recipe=llm-tiny"])])
        elif first == "python":
            self._python(*rest)
        elif first not in PROGRAMS:
            raise AssertionError(f"{self.page.name}: no rule covers the line: {line}")

    def _colotrain(self, line: str, given: list[str]) -> None:
        self.ran.append(given)
        if given[0] == "plan" and is_planned_at_full_size(given):
            return
        given = [self._here(word) for word in given]
        if "--live" in given or given[0] == "stop":
            with _Running(self.colotrain, given[-1]):
                result = self.colotrain(*given, env=self._environment())
        else:
            result = self.colotrain(*given, env=self._environment())
        assert result.code == 0, f"{line}\n{result.out}\n{result.err}"

    def _at_once(self, lines: list[str]) -> None:
        """Start all, as on machines of their own, and see each to its end."""
        port = free_port()
        started = []
        for line in lines:
            self.ran.append(words(line)[1:])
            given = [self._here(word, port=port) for word in words(line)[1:]]
            started.append(self.colotrain.start(*given, env=self._environment()))
        ended = [(process.communicate(timeout=300), process.returncode) for process in started]
        for line, ((out, err), code) in zip(lines, ended, strict=True):
            failed = [found for found in out.splitlines() if found.startswith("fail")]
            one_machine = "doctor" in line and all(f.startswith("fail  head:") for f in failed)
            assert code == 0 or (failed and one_machine), f"{line}\n{out}\n{err}"

    def _here(self, word: str, *, port: int = 0) -> str:
        scratch = self.colotrain.cwd / "scratch"
        if "/scratch/me" in word:
            scratch.mkdir(exist_ok=True)
        return word.replace("/scratch/me", str(scratch)).replace("node0:29500", f"127.0.0.1:{port}")

    def _python(self, *given: str) -> None:
        subprocess.run([sys.executable, *given], cwd=self.colotrain.cwd, check=True, timeout=300)

    def _environment(self) -> dict[str, str]:
        """PATH as of a reader who has activated the environment, with a stand-in for SLURM."""
        own = Path(sys.executable).parent
        return {"PATH": f"{self.colotrain.cwd / 'slurm'}:{own}:{os.environ['PATH']}"}

    # -- what a page takes for granted

    def _put_runs(self, lines: list[str]) -> None:
        named = {word for line in lines for word in words(line)}
        for name in RUNS:
            if name in named and f"name={name}" not in named:
                shutil.copytree(self.sample, self.colotrain.cwd / "runs" / name)

    def _put_slurm(self) -> None:
        for name, script in SLURM.items():
            self._write(f"slurm/{name}", f"#!/bin/sh\n{script}\n")
            (self.colotrain.cwd / "slurm" / name).chmod(0o755)

    def _write(self, path: str, text: str) -> None:
        place = self.colotrain.cwd / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def _write_records(self, block: Block, after: list[Block]) -> None:
        """As the file that the next command names; of records there are enough to train on."""
        lines = [line for later in after for line in later.lines]
        named = re.search(r"[\w.-]+\.jsonl?\b", lines[0]) if lines else None
        if named is not None:
            self._write(named[0], block.body * (100 if named[0].endswith("l") else 1))


@dataclass
class _Running:
    """A run that goes on while something else is done; afterwards all is as it was."""

    colotrain: Colotrain
    name: str

    def __enter__(self) -> None:
        self.path = self.colotrain.rundir(self.name).path
        self.before = self.path.with_name("before")
        self.path.rename(self.before)
        endless = (*A_RUN, f"name={self.name}", "train.max_steps=100000", "checkpoint.every=0")
        self.process = self.colotrain.start(*endless)
        wait_for_step(self.colotrain, self.name, 2)

    def __exit__(self, *_: object) -> None:
        self.colotrain("stop", self.name)
        self.process.communicate(timeout=120)
        shutil.rmtree(self.path)
        self.before.rename(self.path)


def is_planned_at_full_size(given: list[str]) -> bool:
    chosen = next((w.partition("=")[2] for w in given if w.startswith("recipe=")), "")
    return chosen.startswith("llm-") and not TAKES_LONG & set(given)


def write_small_recipes(folder: Path) -> None:
    """The shipped recipes under their own names, as small as rule 1 says."""
    (folder / "recipes").mkdir(exist_ok=True)
    for path in sorted((ROOT / "recipes").glob("llm-*.yaml")):
        recipe = yaml.safe_load(path.read_text("utf-8"))
        recipe["model"]["args"] |= SMALL_MODEL
        recipe["model"]["args"] |= (
            {"num_kv_heads": 1} if "num_kv_heads" in recipe["model"]["args"] else {}
        )
        recipe["data"] |= SMALL_DATA
        recipe["train"] |= SMALL_TRAIN
        recipe["optim"]["schedule"] |= {"warmup_steps": 1}
        (folder / "recipes" / path.name).write_text(yaml.safe_dump(recipe))


def make_sample(folder: Path) -> Path:
    """The small run that pages look at."""
    write_small_recipes(folder)
    colotrain = Colotrain(folder)
    result = colotrain(*A_RUN, "name=sample")
    assert result.code == 0, result.err
    return colotrain.rundir("sample").path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
