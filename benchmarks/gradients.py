"""What recording the statistics of every gradient costs, as a share of step time.

One run of llm-25m on two CPU ranks, recording in every second step: the steps with and without a
record are interleaved in the same processes. `python benchmarks/gradients.py [plugin …]`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from colotrain.events.log import EventReader
from colotrain.rundir import RunDir

STEPS = 23
WARM_UP = 3


def measure(plugin: str, folder: Path) -> tuple[float, float]:
    """Median seconds of a step without and with a record, over both ranks."""
    command = [
        *(sys.executable, "-m", "colotrain", "run", "recipe=llm-25m", f"plugin={plugin}"),
        *(f"name={plugin}", f"train.max_steps={STEPS}", "train.eval_steps=1", "train.eval_every=0"),
        *(
            "observe.grads_every=2",
            "checkpoint.every=0",
            "train.global_batch=8",
            "cluster.procs_per_node=2",
        ),
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    events = EventReader(RunDir(folder / "runs" / plugin)).drain()
    steps = [e.fields for e in events if e.kind == "step" and e.fields["step"] > WARM_UP]
    seconds = {parity: [s["step_s"] for s in steps if s["step"] % 2 == parity] for parity in (0, 1)}
    return median(seconds[1]), median(seconds[0])


def main(plugins: list[str]) -> None:
    print(f"{'plugin':<12} {'without':>9} {'with':>9} {'cost':>7}")
    for plugin in plugins:
        with tempfile.TemporaryDirectory() as folder:
            without, recorded = measure(plugin, Path(folder))
        cost = recorded / without - 1
        print(f"{plugin:<12} {without:>8.3f}s {recorded:>8.3f}s {cost:>6.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["zero2"])
