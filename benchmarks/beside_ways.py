"""Which stores stand beside each other, and how a step of one is run in its own Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import HOME, Answer, Bench, Step, StepFailed

STALLED = 300
"""Seconds after which a step of a peer, or all that a crowd does, is ended."""

_SURROUNDINGS: dict[str, Any] = {
    "cwd": HOME,
    "env": {**os.environ, "PYTHONPATH": str(HOME)},
    "text": True,
}


@dataclass(frozen=True)
class Way:
    """A store: its name in the table, its adapter, and the folder of its virtual environment."""

    name: str
    adapter: str
    environment: str = ""
    together: bool = False
    """Whether several processes use one folder; the others have one for each."""
    python: Path = Path(sys.executable)

    @property
    def own(self) -> bool:
        """Whether it runs in the Python of the benchmarks; then no failure is let pass."""
        return not self.environment

    def run(self, step: str, **arguments: Any) -> Answer:
        """One step in a process of its own. Raises ``StepFailed``."""
        words = [*self._program(), step, json.dumps(arguments)]
        what = f"{self.name}, {step}"
        try:
            done = subprocess.run(words, **_SURROUNDINGS, capture_output=True, timeout=STALLED)
        except subprocess.TimeoutExpired as error:
            raise StepFailed(f"{what}: not done after {STALLED} s") from error
        if done.returncode:
            raise StepFailed(f"{what}:\n{done.stderr.strip() or f'ended with {done.returncode}'}")
        answer: Answer = json.loads(done.stdout)
        return answer

    def guarded(self, take: Step) -> Step:
        """A peer that fails does not end the run; kvkeep and mlx-lm do."""

        def guarded(number: int) -> Answer:
            try:
                return take(number)
            except Exception as error:
                if self.own:
                    raise
                lines = str(error).strip().splitlines() or [type(error).__name__]
                return {"failed": lines[-1]}

        return guarded

    @contextmanager
    def crowd(self, count: int) -> Iterator[Callable[..., list[Answer]]]:
        """``count`` processes; as many as are given arguments, from ``first`` on, act at once."""
        processes: list[Any] = [
            subprocess.Popen(
                [*self._program(), "serve"],
                **_SURROUNDINGS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=1,
            )
            for _ in range(count)
        ]

        def end() -> None:
            for process in processes:
                process.kill()

        stalled = threading.Timer(STALLED, end)
        stalled.start()

        def step(name: str, each: list[Answer], first: int = 0) -> list[Answer]:
            asked = processes[first : first + len(each)]
            try:
                for process, arguments in zip(asked, each, strict=True):
                    process.stdin.write(f"{name} {json.dumps(arguments)}\n")
                answers = [json.loads(process.stdout.readline()) for process in asked]
            except (OSError, ValueError) as error:
                raise StepFailed(f"{self.name}, {name}: a process of the crowd ended") from error
            failed = [answer["failed"] for answer in answers if "failed" in answer]
            if failed:
                raise StepFailed(f"{self.name}, {name}:\n{failed[0]}")
            return answers

        try:
            yield step
        finally:
            stalled.cancel()
            end()
            for process in processes:
                process.communicate()

    def _program(self) -> list[str]:
        return [str(self.python), "-m", "benchmarks.peers.program", self.adapter]


OWN = (
    Way("kvkeep", "peer_kvkeep", together=True),
    Way("mlx-lm", "peer_mlx_lm"),
)
PEERS = (
    Way("mlx-vlm", "peer_mlx_vlm", "mlx-vlm", together=True),
    Way("flyto-mlx", "peer_flyto_mlx", "flyto-mlx", together=True),
    Way("vmlx blocks", "peer_vmlx", "vmlx", together=True),
    Way("vmlx prompts", "peer_vmlx_prompts", "vmlx"),
    Way("vllm-mlx", "peer_vllm_mlx", "vllm-mlx"),
    Way("rapid-mlx", "peer_rapid_mlx", "rapid-mlx"),
    Way("mlx-textgen", "peer_mlx_textgen", "mlx-textgen"),
    Way("mlx-openai-server", "peer_mlx_openai_server", "mlx-openai-server"),
)


def installed(bench: Bench) -> tuple[list[Way], list[str]]:
    """The ways that can be taken here, and the names of those that are left out."""
    found, left_out = list(OWN), []
    for way in PEERS:
        python = Path(bench.peers_dir or "").absolute() / way.environment / "bin" / "python"
        if bench.peers_dir and python.exists():
            found.append(replace(way, python=python))
        else:
            left_out.append(way.name)
    return found, left_out
