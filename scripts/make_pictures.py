"""Make docs/pictures: what commands show of shipped recipes.

Pictures that end in -80 are of a terminal of 80 columns, the others are written by `--svg`."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLUMNS, LINES = 80, 24
LEFT_SCREEN = "\x1b[?1049l"
"""What a terminal is told when a live view gives it back: the rest stays on it."""
RUN = ["recipe=llm-tiny", "plugin=zero2", "data.seq_len=32", "train.global_batch=16"]
SHORT = ["train.max_steps=12", "train.eval_steps=1", "observe.grads_every=2", "name=tiny"]
LONGER = ["train.max_steps=60", "train.eval_every=15", "train.eval_steps=1", "name=llm-tiny"]
COMMANDS = {
    "plan-80": ["plan", *RUN],
    "run-80": ["run", *RUN, *SHORT],
    "inspect-grads-80": ["inspect-grads", "tiny", "--top", "16"],
    "dashboard-80": ["dashboard", "tiny", "--once"],
}
WRITTEN = {
    "plan": ["plan", "recipe=llm-1b", "hardware=h100", "cluster.procs_per_node=8", "name=llm-1b"],
    "dashboard": ["dashboard", "llm-tiny"],
    "gradients": ["dashboard", "llm-tiny", "--view", "gradients"],
}
"""Commands with an option of their own that writes a picture."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        for name, words in COMMANDS.items():
            picture(name, words, shown(words, Path(folder)).replace(folder, "/home/me"))
        shown(["run", *RUN, *LONGER, "observe.grads_every=2"], Path(folder))
        for name, words in WRITTEN.items():
            shown([*words, "--svg", str(FOLDER / f"{name}.svg")], Path(folder))


def shown(words: list[str], folder: Path) -> str:
    """What a command leaves on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "COLUMNS")}
    environment["COLOTRAIN_CACHE"] = str(folder / "cache")  # nothing measured, nothing known
    process = subprocess.Popen(
        [sys.executable, "-m", "colotrain", *words],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )
    os.close(theirs)
    found = b""
    try:
        while part := os.read(ours, 1 << 16):
            found += part
    except OSError:  # it has ended
        pass
    if process.wait() != 0:
        sys.exit(f"{' '.join(words)}: {found.decode('utf-8', 'replace')}")
    return found.decode("utf-8", "replace").rpartition(LEFT_SCREEN)[2].replace("\r\n", "\n")


def picture(name: str, words: list[str], text: str) -> None:
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, legacy_windows=False)
    command = f"$ colotrain {' '.join(words)}"
    console.print(Text(command, style="bold"), Text.from_ansi(text.strip("\n")), sep="\n")
    svg = console.export_svg(title=f"colotrain {words[0]}")
    (FOLDER / f"{name}.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    main()
