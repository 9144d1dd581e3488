"""A large store: what more conversations cost whom.

Stores conversations of a few turns with rows of 4 bytes a token until the trie has 1,000, then
10,000, 100,000 and 1,000,000 nodes: 20 system prompts, turns of 6 tokens, every conversation but
the first of four leaves another one in the middle of its fourth turn. At each size, in fresh
processes:

* open:      opening and closing; and the memory that is held while the store is open and used
* lookup:    a stored conversation and one token more, ``Space.explain``
* insert:    a turn is stored, and waited for
* evict:     a hundredth of the bytes goes, by node
* ls:        what ``kvkeep ls`` reads, in all
* verify:    ``kvkeep verify``, in all

Times are medians. The growth is that of the last size over the first. The store is opened with
durability="process", so that the disk's own time for a flush, which is the same at any size, is
left out.

``--churn`` measures something else: a store of 1 GiB that is full, into which 8 GiB of
conversations of 1 to 16 MiB are written. For each GiB: the seconds, and the file over the budget.

Examples:
  python -m benchmarks.scale                          all sizes: about half an hour, 2 GB of disk
  python -m benchmarks.scale --nodes 1000 10000       these sizes
  python -m benchmarks.scale --churn                  a minute or two
  python -m benchmarks.scale --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Answer, Bench, milliseconds, say
from benchmarks.memory import Peak, _held
from benchmarks.rows import MIB, Shape, empty
from benchmarks.steps import IDENTITY, load_imports

SIZES = (1000, 10_000, 100_000, 1_000_000)
TINY = Shape(1, 1, 1)
SYSTEMS, SYSTEM, TURN = 20, 50, 6
TURNS = 10
CHURNED = Shape(4, 8, 128)
SHARED = 3 * TURN + TURN // 2
REPEATS = 200
AHEAD = 1 << 40
"""Conversations from here on are those that a measurement stores."""


def tokens(number: int) -> Any:
    """The tokens of a conversation, after its last turn."""
    leader = number - number % 4
    own, trunk = (
        np.random.default_rng((2, n)).integers(0, 150_000, TURN * TURNS) for n in (number, leader)
    )
    system = np.random.default_rng((1, leader % SYSTEMS)).integers(0, 150_000, SYSTEM)
    return np.concatenate([system, trunk[:SHARED], own[SHARED:]])


def ends(number: int) -> Iterator[int]:
    """Where the turns of a conversation end."""
    first = 3 if number % 4 else 0
    return (SYSTEM + TURN * (turn + 1) for turn in range(first, TURNS))


class Caches:
    """Live caches of every length that occurs, made once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def __getitem__(self, count: int) -> Any:
        import mlx.core as mx

        if count not in self._made:
            (cache,) = empty(TINY)
            rows = mx.zeros((1, 1, count, 1), mx.bfloat16)
            cache.update_and_fetch(rows, rows)
            mx.eval(cache.keys, cache.values)
            self._made[count] = [cache]
        return self._made[count]


def opened(folder: str) -> tuple[Any, Any]:
    """The store and its space."""
    from kvkeep.prefixstore.store import open_store

    store = open_store(folder, max_bytes="64GB", disk_reserve=1, durability="process")
    return store, store.space(identity=IDENTITY, layout=empty(TINY))


def count_nodes(store: Any) -> int:
    """Nodes of the trie."""
    with store.env.begin() as txn:
        return int(txn.count("nodes"))


def fill(folder: str, start: int, nodes: int) -> Answer:
    """Store conversations from ``start`` on until there are so many nodes."""
    load_imports()
    store, space = opened(folder)
    caches, number, snapshots = Caches(), start, 0
    began = time.perf_counter()
    while count_nodes(store) < nodes:
        for _ in range(max(1, min(20, nodes // 1000))):
            row = tokens(number)
            for end in ends(number):
                space.snapshot(row[:end], caches[end])
                snapshots += 1
            number += 1
        store.flush()
    seconds = time.perf_counter() - began
    answer: Answer = {
        "next": number,
        "seconds": seconds,
        "snapshots": snapshots,
        "nodes": count_nodes(store),
        "used": store.used_bytes,
        "file": store.env.file_bytes(),
    }
    store.close()
    return answer


def reading(folder: str, conversations: int) -> Answer:
    """Opening, looking up, and the memory that this takes."""
    load_imports()
    warm, space = opened(folder)
    space.explain(tokens(0))
    warm.close()
    before = _held()
    opening = milliseconds(lambda: opened(folder)[0].close(), 20)
    store, space = opened(folder)
    rng = np.random.default_rng(3)
    prompts = [np.append(tokens(int(n)), 7) for n in rng.integers(0, conversations, REPEATS)]
    found: list[int] = []
    waiting = iter(prompts)
    lookup = milliseconds(lambda: found.append(space.explain(next(waiting)).offset), REPEATS)
    assert all(offset >= SYSTEM for offset in found), "every one is stored, or was evicted in part"
    held = _held() - before
    store.close()
    return {"open": opening, "lookup": lookup, "held": held / MIB}


def writing(folder: str, turn: int) -> Answer:
    """Storing turns one by one, and evicting a hundredth."""
    load_imports()
    store, space = opened(folder)
    caches = Caches()
    inserts: list[tuple[Any, int]] = []
    for number in range(AHEAD + 4 * turn * REPEATS, AHEAD + 4 * (turn + 1) * REPEATS, 4):
        row = tokens(number)
        inserts += [(row, end) for end in ends(number)]
        if len(inserts) >= REPEATS:
            break
    waiting = iter(inserts)

    def insert() -> None:
        row, end = next(waiting)
        assert space.snapshot(row[:end], caches[end]).wait(), "a turn was not stored"

    inserting = milliseconds(insert, REPEATS)
    before = count_nodes(store)
    began = time.perf_counter()
    store.evict(to=store.used_bytes - max(store.used_bytes // 100, 50_000))
    seconds = time.perf_counter() - began
    gone = before - count_nodes(store)
    store.close()
    assert gone >= 20, gone
    return {"insert": inserting, "evict": seconds * 1e3 / gone, "gone": gone}


def listing(folder: str) -> Answer:
    """What ``kvkeep ls`` and ``kvkeep verify`` read, and the memory that they take for it."""
    load_imports()
    store, _ = opened(folder)
    with Peak() as ls_peak:
        began = time.perf_counter()
        (space,) = store.spaces()
        listed = len(store.conversations())
        ls = time.perf_counter() - began
    with Peak() as verify_peak:
        began = time.perf_counter()
        audit = store.verify()
        verify = time.perf_counter() - began
    assert audit.problems == [], audit.problems[:3]
    assert (audit.nodes, listed) == (space.nodes, space.conversations)
    store.close()
    return {
        "ls": ls * 1e3,
        "verify": verify * 1e3,
        "ls_memory": ls_peak.extra,
        "verify_memory": verify_peak.extra,
        "nodes": audit.nodes,
        "conversations": listed,
    }


def churn(folder: str, budget: int, times: int) -> Answer:
    """Write ``times`` budgets of new conversations; what each took, and the file's size."""
    load_imports()
    import mlx.core as mx

    from kvkeep.prefixstore.store import open_store

    rng = np.random.default_rng(4)
    pool = {}
    for count in range(64, 1025, 64):
        pool[count] = empty(CHURNED)
        for cache in pool[count]:
            rows = mx.array(rng.integers(0, 1 << 16, (1, 8, count, 128), np.uint16))
            cache.update_and_fetch(rows.view(mx.bfloat16), rows.view(mx.bfloat16))
            mx.eval(cache.keys, cache.values)
    seconds, sizes, gone = [], [], []
    with open_store(folder, max_bytes=budget, disk_reserve=1, durability="process") as store:
        space = store.space(identity=IDENTITY, layout=empty(CHURNED))
        for _ in range(times):
            written = 0
            began = time.perf_counter()
            while written < budget:
                count = int(rng.choice(list(pool)))
                receipt = space.snapshot(rng.integers(0, 150_000, count), pool[count])
                assert receipt.stored, receipt.reason
                written += receipt.bytes_written
            seconds.append(time.perf_counter() - began)
            sizes.append(store.env.file_bytes() / budget)
            gone.append(len(store.conversations()))
    return {"seconds": seconds, "file": sizes, "kept": gone}


ROWS = {
    "nodes": ("nodes of the trie", "{:,.0f}"),
    "conversations": ("conversations", "{:,.0f}"),
    "used": ("bytes in use, MiB", "{:,.1f}"),
    "file": ("data file, MiB", "{:,.1f}"),
    "open": ("open and close, ms", "{:,.1f}"),
    "lookup": ("lookup, ms", "{:,.2f}"),
    "insert": ("insert, ms", "{:,.2f}"),
    "evict": ("evict, ms a node", "{:,.2f}"),
    "ls": ("ls, ms", "{:,.0f}"),
    "ls_node": ("ls, µs a node", "{:,.1f}"),
    "verify": ("verify, ms", "{:,.0f}"),
    "verify_node": ("verify, µs a node", "{:,.1f}"),
    "held": ("memory while open and used, MiB", "{:,.1f}"),
    "ls_memory": ("memory of ls, MiB", "{:,.1f}"),
    "verify_memory": ("memory of verify, MiB", "{:,.1f}"),
}


def measure(bench: Bench, sizes: list[int]) -> list[dict[str, float]]:
    """The median numbers of each size."""
    out = []
    start = 0
    folder = bench.folder / "store"
    for size in sizes:
        say(f"filling up to {size:,} nodes")
        filled = bench.step(fill, folder=folder, start=start, nodes=size)
        start = filled["next"]
        pace = filled["seconds"] * 1e3 / max(1, filled["snapshots"])
        say(f"  {filled['snapshots']:,} snapshots, {pace:.2f} ms each")
        answers: list[Answer] = []
        for number in range(bench.rounds):
            say(f"  round {number + 1} of {bench.rounds}")
            found = bench.step(reading, folder=folder, conversations=start)
            found |= bench.step(listing, folder=folder)
            found |= bench.step(writing, folder=folder, turn=start * 10 + number)
            answers.append(found)
        row = {key: statistics.median(a[key] for a in answers) for key in answers[0]}
        row |= {"used": filled["used"] / MIB, "file": filled["file"] / MIB, "pace": pace}
        row |= {f"{key}_node": row[key] * 1e3 / row["nodes"] for key in ("ls", "verify")}
        out.append(row)
    return out


def churned(bench: Bench) -> str:
    """Markdown: a row for each time the budget was written."""
    found = bench.step(churn, folder=bench.folder / "store", budget=1 << 30, times=8)
    lines = [
        "| budgets written | s | file ÷ budget | conversations kept |",
        "|---:|---:|---:|---:|",
    ]
    rows = zip(found["seconds"], found["file"], found["kept"], strict=True)
    lines += [f"| {n} | {s:.1f} | {f:.2f} | {k} |" for n, (s, f, k) in enumerate(rows, 1)]
    return "\n".join(lines)


def table(rows: list[dict[str, float]]) -> str:
    """Markdown: a column for each size, and the growth from the first to the last."""
    lines = ["| |" + " |" * len(rows) + " growth |", "|---|" + "---:|" * (len(rows) + 1)]
    for key, (label, form) in ROWS.items():
        cells = [form.format(row[key]) for row in rows]
        growth = rows[-1][key] / rows[0][key] if rows[0][key] else 0.0
        lines.append(f"| {label} | {' | '.join(cells)} | {growth:,.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES), help="sizes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each size is measured")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--churn", action="store_true", help="a full store instead")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    from benchmarks import scale

    with tempfile.TemporaryDirectory(prefix="kvkeep-scale-", dir=options.folder) as folder:
        # Not this module's own, which is called __main__: steps are found by name.
        bench = Bench(Path(folder), options.rounds, quick=False)
        if options.churn:
            print(scale.churned(bench))
            return 0
        rows = scale.measure(bench, sorted(options.nodes))
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
