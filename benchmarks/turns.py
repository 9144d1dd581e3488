"""A conversation of 100 turns: what each turn writes, beside saving the whole cache each time.

Tiny models of real architectures (tests/architectures.py) really read every turn and answer it.
Before a turn the cache is resumed from the store, after it the cache is stored. The naive way
is ``mlx_lm``'s ``save_prompt_cache`` after every turn. Counted are bytes, which depend on no
machine's speed.

Examples:
  python -m benchmarks.turns                        the table of docs/eviction.md
  python -m benchmarks.turns --turns 20 --json out.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = {
    "llama": "all layers keep all rows",
    "gemma3_text": "two of three layers keep a window of 24",
    "qwen3_next": "three of four layers keep a state",
}


@dataclass(frozen=True)
class Turn:
    """One turn: tokens of the conversation after it, and the bytes that each way wrote."""

    tokens: int
    kvkeep: int
    naive: int


def conversation(name: str, folder: Path, turns: int, asked: int, answered: int) -> Iterator[Turn]:
    """Hold a conversation: each turn ``asked`` tokens are read and ``answered`` generated."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    import kvkeep
    from kvkeep.hooks.prefill import prefill
    from tests import architectures

    model = architectures.build(name)
    rng = np.random.default_rng(1)
    tokens: list[int] = []
    with kvkeep.open(folder / "store", max_bytes="10GB", disk_reserve=1) as store:
        space = store.space(identity={"model": name}, layout=make_prompt_cache(model))
        for _ in range(turns):
            prompt = tokens + rng.integers(0, architectures.VOCAB, asked).tolist()
            hit = space.resume(prompt)
            assert hit.offset == len(tokens), hit.decision
            caches = hit.caches if hit.caches is not None else make_prompt_cache(model)
            prefill(model, prompt[hit.offset : -1], caches)
            before = space.snapshot(prompt[:-1], caches, origin="prompt")
            tokens = prompt
            for _ in range(answered):
                out = model(mx.array([tokens[-1:]]), cache=caches)
                tokens = [*tokens, int(mx.argmax(out[0, -1]).item())]
            tokens = tokens[:-1]
            after = space.snapshot(tokens, caches, origin="output")
            file = folder / "naive.safetensors"
            save_prompt_cache(str(file), caches)
            written = before.bytes_written + after.bytes_written
            yield Turn(len(tokens), written, file.stat().st_size)


def table(found: dict[str, list[Turn]]) -> str:
    """Markdown: bytes of some turns, and of all."""
    lines = [
        "| model | | first turn | middle turn | last turn | all turns |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, turns in found.items():
        shown = (turns[0], turns[len(turns) // 2], turns[-1])
        for way, label in (("kvkeep", f"`{name}`: {MODELS[name]}"), ("naive", "")):
            cells = [f"{getattr(turn, way):,}" for turn in shown]
            total = sum(getattr(turn, way) for turn in turns)
            lines.append(f"| {label} | {way} | {' | '.join(cells)} | {total:,} |")
        ratio = sum(t.naive for t in turns) / sum(t.kvkeep for t in turns)
        lines.append(f"| | naive ÷ kvkeep | | | | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--asked", type=int, default=24, help="tokens of a question")
    parser.add_argument("--answered", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--model", action="append", choices=MODELS, help="only these models")
    parser.add_argument("--json", type=Path, help="a file for every turn's numbers")
    options = parser.parse_args()
    found: dict[str, list[Turn]] = {}
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory(prefix="kvkeep-turns-") as folder:
            turns = conversation(name, Path(folder), options.turns, options.asked, options.answered)
            found[name] = []
            for turn in turns:
                found[name].append(turn)
                done = len(found[name])
                if sys.stderr.isatty():
                    print(f"\r{name} {done}/{options.turns}", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print(file=sys.stderr)
    print(table(found))
    if options.json is not None:
        numbers: dict[str, Any] = {k: [asdict(turn) for turn in v] for k, v in found.items()}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
