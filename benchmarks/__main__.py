"""Measure kvkeep beside mlx_lm's own prompt caches, on the same rows, in the same run.

Every step runs in a fresh process, after another one touched memory (touched.py says why).
Within a round all ways take turns, the order changes with the round, and a ratio is taken
round by round before its median. Every restore is compared bit for bit with what was stored.
The table gives the median over the rounds and the lowest and highest value; the JSON file has
every value.

Examples:
  python -m benchmarks                      everything: about 10 minutes, 3 GB of disk
  python -m benchmarks restore --rounds 9   one measurement, more rounds
  python -m benchmarks --quick              small sizes, 1 round: does it run?
  python -m benchmarks --folder /mnt/ssd    on another disk

Close other programs first: a busy machine shows as a wide range. Times include no import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine, table
from benchmarks.harness import HOME, Bench, LeftOut, Result, say

MEASUREMENTS = (
    "store",
    "restore",
    "first_token",
    "next_turn",
    "diverging",
    "layouts",
    "crowd",
    "lookup",
    "compression",
    "startup",
    "memory",
    "damage",
    "prefill",
    "beside",
)
"""In the order of the table; each is a module of this package with a ``measure``."""


def main() -> int:
    """Run what the command line names; 0 when all of it ran."""
    options = _parser().parse_args()
    names = options.measurement or list(MEASUREMENTS)
    rounds = options.rounds or (1 if options.quick else 5)
    before = machine.describe(options.folder)
    results: dict[str, Result] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-", dir=options.folder) as folder:
        bench = Bench(Path(folder), rounds, options.quick, options.model, options.peers_dir)
        for name in names:
            say(f"{name}:")
            try:
                results[name] = importlib.import_module(f"benchmarks.{name}").measure(bench)
            except LeftOut as why:
                left_out[name] = str(why)
    print(_heading(before, rounds, options.quick))
    print(table.render(list(results.values())))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    file = options.json or HOME / "benchmarks" / "results" / time.strftime("%Y-%m-%d-%H%M%S.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "rounds": rounds,
        "quick": options.quick,
        "machine": before,
        "results": {name: table.as_json(result) for name, result in results.items()},
        "left_out": left_out,
    }
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"Every value is in {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<13}{_summary(name)}" for name in MEASUREMENTS)
    named = [name for name in MEASUREMENTS if name in sys.argv[1:]]
    about = "".join(f"\n\n{importlib.import_module(f'benchmarks.{n}').__doc__}" for n in named)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"measurements (name one before --help for all about it):\n{listed}{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "measurement", nargs="*", type=_known, metavar="MEASUREMENT", help="see below (all)"
    )
    parser.add_argument("--rounds", type=int, help="how often each step is taken (5)")
    parser.add_argument("--quick", action="store_true", help="small sizes and 1 round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where every value is written")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where stores and files are made, and so which disk is measured (%(default)s)",
    )
    parser.add_argument(
        "--model", help="folder or hub id of the model that reads a text (the demo's model)"
    )
    parser.add_argument(
        "--peers-dir",
        type=Path,
        metavar="DIR",
        help="folder with a virtual environment for each peer (see benchmarks/beside.py)",
    )
    return parser


def _known(name: str) -> str:
    if name not in MEASUREMENTS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(MEASUREMENTS)}")
    return name


def _summary(name: str) -> str:
    words = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
    return words.partition(": ")[2].rstrip(".")


def _heading(found: dict[str, object], rounds: int, quick: bool) -> str:
    what = "quick sizes, not for comparison" if quick else "full sizes"
    return "\n".join(
        [
            f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB, "
            f"{found['device']}",
            f"{found['system']}, {found['disk']}, huge pages: {found['huge_pages']}",
            f"mlx {found['mlx']}, mlx-lm {found['mlx-lm']}, lmdb {found['lmdb']}, "
            f"Python {found['python']}, kvkeep {found['kvkeep']}",
            f"{what}, {rounds} round{'s' if rounds > 1 else ''}, load before: {found['load']}",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
