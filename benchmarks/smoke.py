"""Smoke runs of recipes under plugins, as a table: what ran, its peak, its seconds.

python benchmarks/smoke.py                                  # all recipes × all plugins
python benchmarks/smoke.py --recipes llm-tiny,llm-25m --plugins zero1,gemini
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

from colotrain.config.shipped import recipe_names
from colotrain.spec.plugins import ROWS


def row(recipe: str, plugin: str, *, timeout_s: float, folder: str) -> str:
    words = ["run", f"recipe={recipe}", f"plugin={plugin}", "--smoke", "--json"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "colotrain", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"| {recipe} | {plugin} | not within {timeout_s:.0f} s | | |"
    seconds = time.monotonic() - started
    if done.returncode:
        last = (done.stderr.splitlines() or ["-"])[-1].replace("|", "/")
        return f"| {recipe} | {plugin} | exit code {done.returncode}: {last} | | {seconds:.0f} |"
    summary = json.loads(done.stdout)
    peak = max(summary["memory"]["peak_by_rank"]) / 2**20
    ran = "passed" if summary["smoke"]["passed"] else summary["status"]
    return f"| {recipe} | {plugin} | {ran} | {peak:,.0f} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(recipe_names()))
    parser.add_argument("--plugins", default=",".join(ROWS))
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    asked = parser.parse_args()
    print(
        "| recipe | plugin | outcome | peak per rank, MiB | s |\n| --- | --- | --- | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory(prefix="colotrain-smoke-") as folder:
        for recipe in asked.recipes.split(","):
            for plugin in asked.plugins.split(","):
                print(row(recipe, plugin, timeout_s=asked.timeout, folder=folder), flush=True)


if __name__ == "__main__":
    main()
