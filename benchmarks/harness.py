"""What every measurement needs: steps in fresh processes, interleaved rounds, lines and goals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.touched import touch_memory

HOME = Path(__file__).resolve().parent.parent
Answer = dict[str, Any]
Step = Callable[[int], Answer]


class StepFailed(Exception):
    """A step ended with an error; the message has its words."""


class LeftOut(Exception):
    """A measurement cannot be taken on this machine; the message says why."""


@dataclass(frozen=True)
class Line:
    """One line of the table: a value for each round, in ``unit``."""

    label: str
    values: list[float]
    unit: str

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Goal:
    """A line that has a number to reach: at most ``reach``, or at least where ``more``."""

    line: Line
    reach: float
    more: bool = False

    @property
    def reached(self) -> bool:
        """Whether the median reaches it."""
        median = self.line.median
        return median >= self.reach if self.more else median <= self.reach


@dataclass
class Result:
    """What one measurement found."""

    title: str
    lines: list[Line] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def line(self, label: str, values: list[float], unit: str = "s") -> list[float]:
        """Add a line; its values are handed back."""
        self.lines.append(Line(label, values, unit))
        return values

    def goal(
        self, label: str, values: list[float], reach: float, unit: str = "×", *, more: bool = False
    ) -> None:
        """Add a line with a number to reach."""
        self.goals.append(Goal(Line(label, values, unit), reach, more))


class Bench:
    """The folder, the rounds and the processes of one run."""

    def __init__(
        self,
        folder: Path,
        rounds: int,
        quick: bool,
        model: str | None = None,
        peers_dir: Path | None = None,
    ) -> None:
        self.folder = folder
        self.rounds = rounds
        self.quick = quick
        self.model = model
        self.peers_dir = peers_dir

    def step(self, function: Callable[..., Answer], **arguments: Any) -> Answer:
        """Call ``function`` in a fresh process and return the mapping that it returns.

        ``arguments`` travel as JSON. The answer also has ``peak_rss``, the most memory that
        the process ever held, in bytes. Raises ``StepFailed``.
        """
        touch_memory()
        return self._run(function, arguments)

    def together(self, function: Callable[..., Answer], each: list[Answer]) -> list[Answer]:
        """Call ``function`` in as many fresh processes at once as ``each`` has arguments."""
        touch_memory()
        with ThreadPoolExecutor(len(each)) as pool:
            return list(pool.map(lambda arguments: self._run(function, arguments), each))

    def _run(self, function: Callable[..., Answer], arguments: Answer) -> Answer:
        words = [function.__module__, function.__qualname__, json.dumps(arguments, default=str)]
        child = [sys.executable, "-m", "benchmarks.child", *words]
        return last_answer(child, f"{function.__qualname__} failed")

    def interleaved(self, steps: Mapping[str, Step]) -> dict[str, list[Answer]]:
        """Take every step once in each round, in an order that rotates with the round.

        What else the machine does then meets all of them alike.
        """
        answers: dict[str, list[Answer]] = {name: [] for name in steps}
        names = list(steps)
        for number in range(self.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                say(f"  round {number + 1} of {self.rounds}: {name}")
                answers[name].append(steps[name](number))
        return answers

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder of one measurement, on the disk that is measured; gone afterwards."""
        made = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield made
        finally:
            shutil.rmtree(made)


def last_answer(words: list[str], what: str, more: Mapping[str, str] | None = None) -> Answer:
    """The mapping that a process prints as JSON in its last line.

    ``more`` is added to its environment. Raises ``StepFailed``, which begins with ``what``.
    """
    done = subprocess.run(
        words,
        cwd=HOME,
        env={**os.environ, **(more or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StepFailed(f"{what}:\n{done.stderr.strip()}")
    answer: Answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of ``run``."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def say(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)


def column(answers: list[Answer], name: str, scale: float = 1.0) -> list[float]:
    """One number of every round's answer."""
    return [answer[name] * scale for answer in answers]


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Round by round, so that what slowed the machine down in a round slows both."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def settle_disk() -> None:
    """Write out what earlier steps left, so that no step pays for another."""
    os.sync()
