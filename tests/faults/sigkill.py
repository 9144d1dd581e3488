"""Kill processes at random moments of their work on a store, and check it after each kill.

    python -m tests.faults.sigkill --kills 300

After a kill the store is opened for writing, as the next process would. Then

* ``verify`` finds nothing: no damage, no orphan, no wrong count. The only exception is the one
  chunk that the worker damages on purpose before it repairs; after a second repair it is gone
  as well. Chunks of a snapshot that was not published are freed by the opening;
* the counter of used bytes equals a recount that shares no code with it;
* every resume point resumes at its very offset, with every bit as it must be (in stores where
  chunks were damaged on purpose: there or lower, for want of exactly those rows);
* what ``flush()`` vouched for is there, unless something was evicted since.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import kvkeep
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.records import unpack
from tests.faults.rows import CONVERSATIONS, KINDS, tokens_of, wrong
from tests.faults.worker import PHASES, open_spaces

ROOT = Path(__file__).parents[2]
KILLS_PER_STORE = 12
BUDGETS = (1_500_000, 500_000_000)
PATIENCE = 5.0


@dataclass
class Told:
    """What a worker said before it died."""

    phase: str = "start"
    durable: list[tuple[str, int, int]] = field(default_factory=list)
    since: int = 0
    harmed: int | None = None

    def hear(self, line: str, small: bool) -> None:
        """Take one line of ``worker``. ``small``: any snapshot may evict older ones."""
        word, *rest = line.split()
        if word == "P":
            self.phase = rest[0]
        elif word == "S":
            self.since += 1
            if small and self.since > 1:
                self.durable.clear()
        elif word == "D":
            if small:
                self.durable.clear()
            self.durable.append((rest[0], int(rest[1]), int(rest[2])))
            self.since = 0
        elif word == "H":
            self.harmed = int(rest[0])
        elif word == "C":
            self.harmed = None
        elif word == "E":
            self.durable.clear()


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """A worker that has imported everything and waits for its store."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.faults.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen[str], job: dict[str, object], rng: random.Random) -> Told:
    """Let the worker work, and kill it at a random moment of a random phase."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    told = Told()
    small = job["budget"] == BUDGETS[0]
    target = rng.choice(PHASES)
    end = time.monotonic() + PATIENCE
    while told.phase != target and time.monotonic() < end:
        if not _listen(process.stdout, told, small):
            break
    time.sleep(rng.random() ** 2 * 0.05)
    process.kill()
    while _listen(process.stdout, told, small):
        pass
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait() == -9, errors
    assert not errors, errors
    return told


def _listen(stream: IO[str], told: Told, small: bool) -> bool:
    line = stream.readline()
    if line.endswith("\n"):  # the last line may be cut short by the kill
        told.hear(line, small)
    return bool(line)


def check(folder: Path, told: Told, harm: bool) -> Counter[str]:
    """Open the store as the next process would, and check all of it.

    ``harm``: workers damaged chunks of this store on purpose, and repaired it.
    """
    seen: Counter[str] = Counter()
    if not (folder / "store.json").exists():
        assert not told.durable
        seen["killed before there was a store"] += 1
        return seen
    with kvkeep.open(folder, disk_reserve=1) as store:
        found = store.verify().problems
        if told.harmed is not None:
            other = [p for p in found if p.where != f"chunk {told.harmed}"]
            assert not other, other
            seen["killed with damage in the store"] += bool(found)
            store.repair()
            found = store.verify().problems
        assert not found, found
        assert store.used_bytes == recount(store) <= store.max_bytes
        spaces = open_spaces(store)
        for kind, conversation, length in told.durable:
            tokens = tokens_of(conversation, length + 1)
            hit = spaces[kind].resume(tokens)
            assert hit.offset == length, (kind, conversation, length, hit.decision)
            seen["flushed snapshots that are there"] += 1
        known = {space.id.hex(): kind for kind, space in spaces.items()}
        for stored in store.conversations():
            check_conversation(store, spaces, known[stored.space], stored, harm, seen)
    return seen


def check_conversation(store, spaces, kind, stored, harm, seen) -> None:
    """Every resume point of a conversation resumes there, and every bit is right."""
    ids = store.conversation_tokens(stored.id)
    for point in store.inspect(spaces[kind], ids).points:
        tokens = [*ids[: point.offset], 1]
        hit = spaces[kind].resume(tokens)
        if hit.offset != point.offset:
            assert harm, (kind, point, hit.decision)
            assert hit.decision.reason is kvkeep.Reason.ROWS_MISSING, (kind, point, hit.decision)
            seen["resume points that lost rows to a repair"] += 1
        if not hit.caches:
            continue
        problem = wrong(kind, tokens, hit.offset, hit.caches)
        assert not problem, (kind, point, problem)
        seen["resume points restored bit for bit"] += 1
        seen["bytes compared"] += sum(cache.nbytes for cache in hit.caches)


def recount(store) -> int:
    """Bytes that nodes and their chunks take, from the records alone."""
    used = 0
    with store.env.begin() as txn:
        assert txn.count("pending") == 0
        owned = set()
        for key, data in txn.items("nodes"):
            used += layout.footprint(len(data))
            owned |= set(unpack(key, data).chunk_ids())
        for key, data in txn.items("chunks"):
            assert layout.from_u64(key) in owned
            used += layout.footprint(len(data))
        assert txn.count("chunks") == len(owned)
        assert txn.count("uses") == txn.count("lru") == txn.count("nodes")
    return used


def run(root: Path, kills: int, seed: int) -> Counter[str]:
    """Kill ``kills`` workers one after the other; what was seen."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for number in range(kills):
        folder = root / f"store{number // KILLS_PER_STORE}"
        setup = number // KILLS_PER_STORE % 4
        harm, budget = setup > 1, BUDGETS[setup % 2]
        seed = rng.randrange(1 << 30)
        job = {"folder": str(folder), "seed": seed, "budget": budget, "harm": harm}
        with started() as process:
            told = kill(process, job, rng)
        seen[f"killed in {told.phase}"] += 1
        try:
            seen += check(folder, told, harm)
        except AssertionError as error:
            error.add_note(f"kill {number}, {job}, {told}, store kept in {folder}")
            raise
    seen["kills"] = kills
    return seen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvkeep-sigkill-"))
    start = time.monotonic()
    seen = run(root, options.kills, options.seed)
    for what, count in sorted(seen.items()):
        print(f"{count:>14,}  {what}")
    print(f"{time.monotonic() - start:>14.0f}  seconds, seed {options.seed}; stores in {root}")


if __name__ == "__main__":
    assert CONVERSATIONS
    assert KINDS
    main()
