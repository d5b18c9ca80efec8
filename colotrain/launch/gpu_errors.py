"""What NVIDIA's driver reports about the GPUs of this host: Xid errors, and memory that failed.

An Xid is a line of the kernel's log. Its number tells what happened, in every version of the driver
(NVIDIA, "Xid Errors"). Reading that log may need rights: those that are lacking are no error.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
TIMEOUT_S = 10.0
SLACK_S = 5.0
"""Seconds by which the kernel's clock may differ from ours."""
MOST = 3
"""Errors that are told; the first ones caused the others."""
RECORD_BYTES = 8192
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
MEANINGS = {
    13: "a kernel raised an exception",
    31: "a kernel accessed memory that is not mapped",
    43: "the GPU stopped working for the process",
    45: "the process's work was ended after an earlier error",
    48: "an error in GPU memory could not be corrected",
    62: "the GPU's firmware halted",
    63: "failing GPU memory is replaced by spare rows at the next reset",
    64: "failing GPU memory could not be replaced by spare rows",
    74: "a link between GPUs (NVLink) failed",
    79: "the GPU is no longer reached over PCIe",
    94: "an error in GPU memory ended the process that used it",
    95: "an error in GPU memory may have reached other processes",
    109: "a change between processes took too long",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
    140: "an error in GPU memory could not be corrected",
}
NEEDS_RESET = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
"""Errors after which the GPU does not work again until it is reset, or its host is replaced."""


def gpu_errors(within_s: float) -> str:
    """Return this host's errors of the last seconds, in one line; empty if none is known."""
    found = list(dict.fromkeys(xids(kernel_lines(within_s))))
    told = [_described(gpu, number) for gpu, number in found[:MOST]]
    told += [f"{len(found) - MOST} more Xid errors"] if len(found) > MOST else []
    told += uncorrected()
    if not told:
        return ""
    needs = any(number in NEEDS_RESET for _, number in found)
    advice = "; it needs a reset (`nvidia-smi -r`), or another host" if needs else ""
    return f"on {socket.gethostname()}: {', '.join(told)}{advice}"


def _described(gpu: str, number: int) -> str:
    meaning = f" ({MEANINGS[number]})" if number in MEANINGS else ""
    return f"GPU {gpu} has Xid {number}{meaning}"


def xids(lines: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the PCI address and the number of each Xid error, oldest first."""
    for line in lines:
        if found := XID.search(line):
            yield found[1], int(found[2])


def kernel_lines(within_s: float) -> list[str]:
    """Return the kernel's messages of the last seconds, from its log or else the journal."""
    oldest = time.monotonic() - within_s - SLACK_S  # the kernel counts from its start, too
    try:
        log_file = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return _journal(time.time() - within_s)
    lines = []
    try:
        while True:
            try:
                record = os.read(log_file, RECORD_BYTES)
            except BrokenPipeError:  # this record was overwritten; the next read has a newer one
                continue
            except OSError:  # there are no more
                break
            if not record:
                break
            for text in record.decode("utf-8", "replace").splitlines():
                about, _, message = text.partition(";")
                micros = [*about.split(","), "", "", ""][2]
                if micros.isdecimal() and int(micros) / 1e6 > oldest:
                    lines.append(message)
    finally:
        os.close(log_file)
    return lines


def _journal(since: float) -> list[str]:
    return _said(
        ["journalctl", "--dmesg", f"--since=@{since:.0f}", "-o", "cat", "--no-pager", "-q"]
    )


def uncorrected() -> Iterator[str]:
    """Yield what GPUs count of uncorrected memory errors since their driver was loaded."""
    query = "--query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total"
    for line in _said(["nvidia-smi", query, "--format=csv,noheader,nounits"]):
        gpu, _, number = line.partition(",")
        if number.strip().isdecimal() and int(number):
            yield f"GPU {gpu} counts {int(number)} uncorrected memory errors"


def _said(command: list[str]) -> list[str]:
    """Return the lines that a command prints; none if it is missing, fails, or takes long."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").splitlines()
