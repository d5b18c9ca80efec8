"""Compare cases drawn at random with one process: `scripts/random_cases.py [--cases N] [--seed S]`.

A case is a tiny model with plugin, mesh axes, objective, optimizer, precision, recomputation,
adapter, freezing, accumulation and more drawn by its seed and number; it trains two steps on up to
eight ranks. It must be the same as `colotrain verify`'s reference (one process of plain torch, in
float64 where the model allows it), or refused before anything starts: by a row of `RULES`, or by a
check of the model or of arithmetic. The rest are faults: a difference, a traceback, workers that
end or hang, a refusal by workers, and a plan that has another value than was asked for.

`--only K…` repeats cases; with `--reduce` settings of a fault are left out one by one, as long as
it stays one. `--keep FILE.jsonl` adds equal cases to a file, and `--seed FILE.jsonl` repeats those:
tests/dist/random_cases.jsonl has the gate's. Ends with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CI", "1")

from random_cases_drawing import (  # noqa: E402
    IMPORTED,
    Drawing,
    Settings,
    arguments_of,
    broken_rows,
    write_folder,
)

from colotrain.data.prepare.tokens import prepare_all  # noqa: E402
from colotrain.dotted import described  # noqa: E402
from colotrain.errors import ColotrainError, ConfigError, DoesNotFit, UsageError  # noqa: E402
from colotrain.launch.server import forkserver  # noqa: E402
from colotrain.launch.server.compiler import postpone_compiler  # noqa: E402
from colotrain.records import to_plain  # noqa: E402
from colotrain.runs.resolving import resolve_config  # noqa: E402
from colotrain.spec.plan import RunPlan  # noqa: E402
from colotrain.verify.compare import CaseResult  # noqa: E402
from colotrain.verify.runner import verify  # noqa: E402

PLANNED_AT_ONCE, AT_ONCE = 32, 8
"""Cases that are planned together, and those of a world size that share a launch."""
EQUAL, REFUSED, FAULT = "equal", "refused", "fault"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case."""

    number: int
    settings: Settings
    kind: str
    text: str = ""
    rows: tuple[str, ...] = ()
    """The rows of `RULES`, or else the checks, that refused it."""
    ranks: int = 0
    weak: str = ""
    """Why being equal proves little."""


@dataclass
class Cases:
    """Cases of one seed, which share a folder with their models and data."""

    seed: str
    folder: Path
    names: Mapping[str, list[str]] = field(init=False)
    kept: Sequence[Settings] = field(init=False)
    """The cases of the file that `seed` names, if it names one."""
    launches: int = 0

    def __post_init__(self) -> None:
        self.names = write_folder(self.folder)
        is_file = self.seed.endswith(".jsonl")
        self.kept = kept_cases(ROOT / self.seed) if is_file else ()

    def settings_of(self, number: int) -> Settings:
        return self.kept[number] if self.kept else Drawing(self.seed, number, self.names).case()

    def outcomes(self, drawn: Mapping[int, Settings]) -> Iterator[Outcome]:
        """Yield what becomes of each case; those of a world size share launches."""
        plans: dict[int, dict[int, RunPlan]] = {}
        for number, settings in drawn.items():
            found = self._planned(number, settings)
            if isinstance(found, Outcome):
                yield found
            else:
                plans.setdefault(found.world_size, {})[number] = found
        for group in plans.values():
            numbers = list(group)
            for first in range(0, len(numbers), AT_ONCE):
                some = {number: group[number] for number in numbers[first : first + AT_ONCE]}
                for number, kind, text, weak in self._compared(some):
                    ranks = group[number].world_size
                    yield Outcome(
                        number=number,
                        settings=drawn[number],
                        kind=kind,
                        text=text,
                        ranks=ranks,
                        weak=weak,
                    )

    def _planned(self, number: int, settings: Settings) -> RunPlan | Outcome:
        rows = tuple(dict.fromkeys(f"{row.when} → {row.key}" for row in broken_rows(settings)))

        def outcome(kind: str, text: str, rows: tuple[str, ...] = ()) -> Outcome:
            return Outcome(number=number, settings=settings, kind=kind, text=text, rows=rows)

        try:
            plan = resolve_config(arguments_of(settings, f"case-{number}")).plan
            prepare_all(plan.data)
        except ConfigError as error:
            checks = tuple(dict.fromkeys(f"check of {p.key}" for p in error.problems))
            return outcome(REFUSED, "\n".join(error.lines()), rows or checks)
        except (UsageError, DoesNotFit) as error:
            return outcome(REFUSED, str(error), ("check: " + error.problem[:40],))
        except Exception as error:
            return outcome(FAULT, f"while planning: {described(error)}\n{traceback.format_exc()}")
        if rows:
            return outcome(FAULT, f"not refused, against {rows[0]}")
        if other := "; ".join(changed(settings, plan)):
            return outcome(FAULT, f"the plan has another value: {other}")
        return plan

    def _compared(self, group: Mapping[int, RunPlan]) -> Iterator[tuple[int, str, str, str]]:
        """Yield number, kind, text and weakness; where a launch fails, halves have one each."""
        self.launches += 1
        folder = self.folder / f"launch-{self.launches}"
        numbers = list(group)
        try:
            results = list(verify([*group.values()], folder))
        except ColotrainError as error:
            if len(group) == 1:
                yield numbers[0], FAULT, f"while training: {error}\n{_last_lines(folder)}", ""
                return
        except Exception as error:
            if len(group) == 1:
                text = f"while comparing: {described(error)}\n{traceback.format_exc()}"
                yield numbers[0], FAULT, text, ""
                return
        else:
            for number, result in zip(numbers, results, strict=True):
                kind = EQUAL if result.passed else FAULT
                yield number, kind, result.difference or "", weakness(result)
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        half = len(numbers) // 2
        for some in (numbers[:half], numbers[half:]):
            yield from self._compared({number: group[number] for number in some})

    def reduced(self, outcome: Outcome) -> Outcome:
        """Leave out settings one by one, as long as the case stays the same kind of fault."""
        for key in [k for k in outcome.settings if k not in ("model", "plugin.name", "replicas")]:
            fewer = {k: v for k, v in outcome.settings.items() if k != key}
            if key == "adapter.name":
                fewer = {k: v for k, v in fewer.items() if not k.startswith("adapter.")}
            found = next(self.outcomes({outcome.number: fewer}))
            if found.kind == FAULT and found.text.split(":")[0] == outcome.text.split(":")[0]:
                outcome = found
        return outcome


def kept_cases(path: Path) -> list[Settings]:
    """The settings of a file's cases, one on each line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def keep(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Add to a file the settings of cases that were equal."""
    with path.open("a", encoding="utf-8") as file:
        for outcome in outcomes:
            if outcome.kind == EQUAL:
                file.write(json.dumps(outcome.settings) + "\n")


def _last_lines(folder: Path) -> str:
    """The end of the tracebacks that workers left."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(folder.rglob("*.log"))]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-25:])


def weakness(result: CaseResult) -> str:
    if result.not_exact:
        return "the reference has no float64"
    if result.zero_gradients:
        return f"{result.zero_gradients} parameters had gradients of zeros"
    return ""


def changed(settings: Settings, plan: RunPlan) -> Iterator[str]:
    """Say which settings have another value in the plan than what was asked for."""
    plain = to_plain(plan)
    for key, wanted in settings.items():
        value: Any = plain
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        is_simple = isinstance(wanted, (int, str, float)) and isinstance(value, type(wanted))
        if is_simple and value != wanted:
            yield f"{key}={value}, not {wanted}"


def repeated(seed: str, number: int) -> str:
    return f"scripts/random_cases.py --seed {seed} --only {number}"


def shown(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def report(outcomes: Sequence[Outcome]) -> str:
    """Counts by kind, world size and row."""
    kinds = Counter(o.kind for o in outcomes)
    sizes = Counter(o.ranks for o in outcomes if o.kind == EQUAL)
    rows = Counter(row for o in outcomes for row in o.rows[:1])
    weak = Counter(o.weak for o in outcomes if o.kind == EQUAL and o.weak)
    lines = [f"{len(outcomes)} cases: " + ", ".join(f"{n} {k}" for k, n in kinds.items())]
    lines.append(
        "ranks of equal cases: " + ", ".join(f"{s}: {n}" for s, n in sorted(sizes.items()))
    )
    lines += [f"  weak: {n} × {text}" for text, n in weak.most_common()]
    lines += [f"  refused: {n} × {row}" for row, n in rows.most_common()]
    return "\n".join(lines)


@contextlib.contextmanager
def opened(seed: str) -> Iterator[Cases]:
    """Cases of a seed, with a temporary folder, in which this process is meanwhile."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="colotrain-cases-") as name:
        os.chdir(name)
        sys.path.insert(0, name)
        try:
            yield Cases(seed, Path(name))
        finally:
            os.chdir(before)
            sys.path.remove(name)


def warm_up() -> None:
    """Have processes forked from one that has imported what models and workers import."""
    postpone_compiler()
    forkserver.PRELOAD[-1:-1] = IMPORTED
    forkserver.warm_up()


def run(cases: Cases, numbers: Sequence[int], *, reduce: bool = False) -> Iterator[Outcome]:
    """Yield outcomes, and print those of faults with the command that repeats them."""
    for first in range(0, len(numbers), PLANNED_AT_ONCE):
        some = numbers[first : first + PLANNED_AT_ONCE]
        for outcome in cases.outcomes({n: cases.settings_of(n) for n in some}):
            is_fault = outcome.kind == FAULT
            found = cases.reduced(outcome) if is_fault and reduce else outcome
            print(f"case {found.number}: {found.kind}", file=sys.stderr, flush=True)
            if is_fault:
                print(f"{repeated(cases.seed, found.number)}: {shown(found.settings)}")
                print(f"    {found.text}", flush=True)
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", default="0", help="anything, such as a date, or a .jsonl")
    parser.add_argument("--keep", type=Path, help="add cases that were equal to a .jsonl")
    parser.add_argument("--only", nargs="+", type=int, default=[], metavar="K")
    parser.add_argument("--reduce", action="store_true", help="find the fewest settings of a fault")
    parser.add_argument("--json", action="store_true", help="print all outcomes as JSON")
    arguments = parser.parse_args()
    first, most = arguments.first, arguments.cases
    kept_in = arguments.keep and arguments.keep.absolute()
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        warm_up()
        with opened(arguments.seed) as cases:
            drawn = range(first, min(first + most, len(cases.kept) or first + most))
            outcomes = list(run(cases, arguments.only or drawn, reduce=arguments.reduce))
        if kept_in:
            keep(kept_in, outcomes)
        if arguments.only:
            for outcome in outcomes:
                print(f"case {outcome.number}: {outcome.kind}: {shown(outcome.settings)}")
                print(outcome.text)
        print(report(outcomes))
        print(f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    return 1 if any(outcome.kind == FAULT for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
