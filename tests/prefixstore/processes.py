"""Python programs in processes of their own, with the store's test helpers at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(body, *arguments):
    """A process that runs ``body``; any warning ends it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", body]
        + [str(argument) for argument in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def together(*processes):
    """Let go of processes that say ``ready`` and wait for a line; what each wrote then."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    written = []
    for process in processes:
        out, errors = process.communicate(timeout=90)
        assert (process.returncode, errors) == (0, "")
        written.append(out)
    return written
