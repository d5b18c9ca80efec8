"""colotrain's pipeline stages beside torch's own 1F1B over `fully_shard`, in turns.

With `--schedules 1f1b interleaved` both of colotrain's take turns with it. Prints the ratio of step
times in turns, and the share of a step for which each stage waits, measured and planned. A turn has
several steps: the one in which a system is halted lasts as long as the others' turns, so that
shares are medians over steps.
"""

from __future__ import annotations

import argparse
import signal
from statistics import median, quantiles

from compare import CELLS, PIPELINE, Cell, Contestant, System, compete


def report(cell: Cell, found: list[Contestant]) -> None:
    torch, *ours = found
    for mine in ours:
        ratios = [a / b for a, b in zip(mine.turns_s, torch.turns_s, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        print(
            f"{cell}, {mine.system.label}:\n  step time {median(ratios):.2f} "
            f"({low:.2f} to {high:.2f}) of"
        )
        print(f"  {torch.system.label}'s, {median(mine.turns_s):.2f} s a turn")
        for stage in mine.stages:
            planned, waited = stage.planned_wait, stage.wait or 0.0
            off = f"{planned / waited - 1:+.0%}" if waited else "-"
            print(
                f"  stage {stage.stage} waits {waited:.1%} of a step, planned {planned:.1%} ({off})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a turn")
    parser.add_argument("--plugin", default="zero1")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # halted systems end with this
    for cell in (cell for cell in CELLS if cell.pp > 1 and cell.ranks in asked.ranks):
        systems = [
            PIPELINE,
            *(
                System("colotrain", asked.plugin, 2, settings=(f"mesh.pp_schedule={schedule}",))
                for schedule in asked.schedules
            ),
        ]
        found = compete(systems, cell, turns=asked.turns, steps=asked.steps)
        report(cell, found)


if __name__ == "__main__":
    main()
