"""Prove that two checkouts compute the same: `scripts/same_bits.py OLD NEW [--only PATTERN]…`.

Each case of `same_bits_corpus.py` runs with the one `colotrain` and with the other, in a folder of
the same name, and everything that it leaves is compared to the last bit: plans, losses, gradient
records, the tensors and bytes of checkpoints (parameters, optimizer states), and what every verb
prints as JSON. The first difference of each case is named. `same_bits_compare.py` lists what may
differ, and which files are not compared, with the reasons. Models and data come from the checkout
of this script. Ends with 0 if all cases are the same, 4 if one differs, 2 for bad arguments. A case
that both refuse with the same message is the same, and shown as refused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import same_bits_corpus as corpus  # noqa: E402
from same_bits_compare import OUTPUTS, difference, facts_of  # noqa: E402

UNEQUAL = 4
START_S = 300
"""Seconds in which a warm process has to start, and to end."""
MODULES = ("__init__.py", "families.py", "dist/__init__.py", "dist/difficult.py", "dist/foreign.py")
"""Modules of tests that have the models and samples of cases."""


@dataclass
class Side:
    """One of the two checkouts, and a warm process of its own, of which commands are forks."""

    name: str
    checkout: Path
    python: str
    code: Path
    environment: dict[str, str] = field(init=False)
    address: str = ""
    """Of the warm process; "" where the checkout has none, and each command is a new Python."""
    driver: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.environment = {**os.environ, **one_thread, "PYTHONHASHSEED": "0", "CI": "1"}
        self.environment |= {"PYTHONPATH": str(self.checkout)}
        if (self.checkout / "tests" / "processes.py").is_file():
            warm = "import sys; from tests.processes import launchers as address; "
            self.driver = subprocess.Popen(
                [self.python, "-c", f"{warm}print(address(), flush=True); sys.stdin.read()"],
                cwd=self.checkout,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ready, _, _ = select.select([self.driver.stdout], [], [], START_S)
            self.address = self.driver.stdout.readline().strip() if ready else ""  # type: ignore[union-attr]
            if not self.address:
                self.close()
                sys.exit(f"error: {self.checkout}: its tests/processes.py starts no warm process")
        self.environment["PYTHONPATH"] = f"{self.code}{os.pathsep}{self.checkout}"

    def close(self) -> None:
        if self.driver is not None:
            try:
                self.driver.communicate(timeout=START_S)
            except subprocess.TimeoutExpired:
                self.driver.kill()

    def command(self, words: Sequence[str], cwd: Path, timeout_s: float) -> dict[str, Any]:
        """Run a command; its exit code is None where it took too long."""
        environment = self.environment | {"COLOTRAIN_CACHE": str(cwd / "cache")}
        arguments = ["-m", "colotrain", *words]
        process: Any
        if self.address:
            from tests.processes import Process

            process = Process(self.address, arguments, cwd=cwd, environment=environment)
        else:
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            out, err = process.communicate(timeout=timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err, code = "", f"error: took longer than {timeout_s:.0f} s", None
        return {"words": list(words), "code": code, "out": out, "err": err}


@dataclass(frozen=True)
class Result:
    case: str
    verdict: str
    """same, refused or failed (by both, alike), or DIFFERS."""
    detail: str
    seconds: float


def run_case(case: corpus.Case, sides: Sequence[Side], folder: Path, timeout_s: float) -> Result:
    """Run a case with both checkouts, one after the other in one folder, and compare."""
    began, work, facts = time.monotonic(), folder / "work" / case.name, []
    outputs: list[dict[str, Any]] = []
    for side in sides:
        work.mkdir(parents=True)
        outputs = []
        for command in case.commands:
            places = {"{made}": str(folder / "made"), "{python}": side.python}
            words = [re.sub(r"\{\w+\}", lambda m: places.get(m[0], m[0]), w) for w in command]  # noqa: B023
            outputs.append(side.command(words, work, timeout_s))
            # what processes really took would be in the plan of a later command
            shutil.rmtree(work / "cache" / "peaks", ignore_errors=True)
            if outputs[-1]["code"] is None:
                break
        (work / OUTPUTS).write_text(json.dumps(outputs, indent=1), "utf-8")
        kept = folder / side.name / case.name
        kept.parent.mkdir(exist_ok=True)
        work.rename(kept)
        facts.append(facts_of(kept, side.checkout))
    verdict, detail = "same", difference(*facts) or ""
    wrong = [o for o in outputs if o["code"] not in (0, 3, UNEQUAL) or not o["out"]]
    if detail or any(output["code"] is None for output in wrong):
        verdict = "DIFFERS"
    elif wrong:
        verdict = "refused" if wrong[0]["code"] in (2, 3) else "failed"
    if verdict != "DIFFERS":
        for side in sides:
            shutil.rmtree(folder / side.name / case.name)
    if wrong and not detail:
        lines = [line for line in wrong[0]["err"].splitlines() if line.startswith("error:")]
        detail = f"{wrong[0]['words'][0]}: {(lines or ['exit code ' + str(wrong[0]['code'])])[0]}"
    return Result(case.name, verdict, detail, time.monotonic() - began)


def make(name: str, folder: Path) -> None:
    """Fill the folder that commands call `{made}/NAME`: with files, or a directory of a model."""
    folder.mkdir(parents=True)
    if name in FILES:
        file, records = FILES[name]
        rows = records()
        text = "".join(row if isinstance(row, str) else f"{json.dumps(row)}\n" for row in rows)
        (folder / file).write_text(text, "utf-8")
        return
    from tests.dist.hf import make_chat_directory, make_directory
    from tests.families import FAMILIES
    from tests.masked import make_tokenizer

    if name == "chat-model":
        make_chat_directory(folder)
    elif name == "bytes-llama":
        make_directory("llama", folder, vocab_size=256, max_position_embeddings=64)
    else:
        kind = name.removeprefix("letters-")
        next(family for family in FAMILIES if family.kind == kind).make(folder)
        if kind != name:
            make_tokenizer(folder)


def _draws(count: int) -> Iterator[tuple[random.Random, str, str]]:
    draw = random.Random(0)
    for _ in range(count):
        good, bad = draw.sample(("red", "blue", "green", "seven", "house", "tree", "river"), 2)
        yield draw, good, bad


def _text() -> list[Any]:
    return [f"def {good}(n): return {bad} * {d.randint(0, 99)}\n" for d, good, bad in _draws(800)]


def _letters() -> list[Any]:
    return [{"text": " ".join((good, bad) * d.randint(1, 2))} for d, good, bad in _draws(120)]


def _preferences() -> list[Any]:
    return [
        {"prompt": f"Say {good}: ", "chosen": good + "." * d.randint(0, 3), "rejected": bad}
        for d, good, bad in _draws(40)
    ]


def _chat() -> list[Any]:
    return [
        {
            "messages": [
                {"role": "user", "content": good},
                {"role": "assistant", "content": bad + "!" * d.randint(0, 5)},
            ]
        }
        for d, good, bad in _draws(60)
    ]


def _audited() -> list[Any]:
    return [(ROOT / "tests" / "dist" / "audited.py").read_text("utf-8")]


def _deepspeed() -> list[Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}}
    zero = {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}}
    batch = {"train_batch_size": 64, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0}
    return [{**batch, "optimizer": optimizer, "zero_optimization": zero, "bf16": {"enabled": True}}]


FILES = {
    "text": ("text.txt", _text),
    "letters": ("letters.jsonl", _letters),
    "preferences": ("preferences.jsonl", _preferences),
    "chat": ("chat.jsonl", _chat),
    "audited": ("audited.py", _audited),
    "deepspeed": ("config.json", _deepspeed),
}
"""Folder → its file, and the function that makes its records or lines."""


def prepare(cases: Sequence[corpus.Case], folder: Path) -> None:
    """Fill the folder with the models, data and modules that the cases use."""
    (folder / "code" / "tests" / "dist").mkdir(parents=True)
    for name in MODULES:
        shutil.copy(ROOT / "tests" / name, folder / "code" / "tests" / name)
    shutil.copy(corpus.__file__, folder / "code")
    words = " ".join(word for case in cases for command in case.commands for word in command)
    for name in sorted(set(re.findall(r"\{made\}/([\w-]+)", words))):
        make(name, folder / "made" / name)


def compare(
    cases: Sequence[corpus.Case], arguments: argparse.Namespace, folder: Path
) -> Iterator[Result]:
    """Yield the results of the cases as they end."""
    prepare(cases, folder)
    sides = []
    try:
        for name in ("old", "new"):
            checkout = getattr(arguments, name).resolve()
            sides.append(Side(name, checkout, arguments.python, folder / "code"))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            futures = [
                pool.submit(run_case, case, sides, folder, arguments.timeout) for case in cases
            ]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        for side in sides:
            side.close()


def read_arguments() -> tuple[argparse.Namespace, list[corpus.Case]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("old", type=Path, nargs="?", help="a folder with a colotrain package")
    parser.add_argument("new", type=Path, nargs="?", help="another one")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="glob on names of cases")
    parser.add_argument("--list", action="store_true", help="print the cases' commands instead")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at once")
    parser.add_argument("--python", default=sys.executable, help="Python that runs both")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="of a command")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for what differs")
    arguments = parser.parse_args()
    only = arguments.only or ["*"]
    cases = [c for c in corpus.cases() if any(fnmatchcase(c.name, glob) for glob in only)]
    if not cases:
        parser.error(f"--only {' '.join(only)}: no case has such a name; see --list")
    if arguments.jobs < 1 or arguments.timeout <= 0:
        parser.error("--jobs and --timeout: expected numbers above 0")
    if arguments.keep is not None and arguments.keep.exists():
        parser.error(f"--keep {arguments.keep}: expected a folder that does not exist yet")
    for checkout in () if arguments.list else (arguments.old, arguments.new):
        if checkout is None or not (checkout / "colotrain" / "__init__.py").is_file():
            parser.error(f"{checkout}: expected two folders with a colotrain package")
    return arguments, cases


def main() -> int:
    arguments, cases = read_arguments()
    if arguments.list:
        for case in cases:
            print(
                case.name, *(f"  colotrain {' '.join(words)}" for words in case.commands), sep="\n"
            )
        return 0
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="same-bits-"))
    socket.setdefaulttimeout(arguments.timeout)  # for the answer of a warm process
    counts: dict[str, int] = {}
    try:
        for result in compare(cases, arguments, folder):
            counts[result.verdict] = counts.get(result.verdict, 0) + 1
            detail = f": {result.detail}" if result.detail else ""
            print(f"{result.verdict:8} {result.case} ({result.seconds:.0f} s){detail}", flush=True)
    finally:
        socket.setdefaulttimeout(None)
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(cases)} cases:", ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return UNEQUAL if "DIFFERS" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
