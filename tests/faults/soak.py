"""Many processes write and read one small store at once, and every restored byte is checked.

    python -m tests.faults.soak --seconds 60 --writers 4 --readers 8

The budget is a fraction of what is written, so that there is always something to evict. Some
readers are killed in the middle of a read and replaced. At the end the store must be as it
should: ``verify`` finds nothing, the counter equals a recount, the budget holds, and the file
has not grown without end.
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
from pathlib import Path

import kvkeep
from tests.faults import light
from tests.faults.rows import KINDS, caches, tokens_of, wrong
from tests.faults.sigkill import ROOT, recount
from tests.faults.worker import open_spaces, small_chunks

BUDGET = 3 << 20
CONVERSATIONS = 64
MOST_GROWTH = 5
"""Times the budget, which is tiny here: what is written during one read stays until it ends."""

KILL_EVERY = 1.5


def write(store: kvkeep.Store, rng: random.Random, seen: Counter[str]) -> None:
    """Store a conversation, new or grown."""
    kind, conversation = rng.choice(KINDS), rng.randrange(CONVERSATIONS)
    tokens = tokens_of(conversation, rng.randint(20, 600))
    receipt = open_spaces(store)[kind].snapshot(tokens, caches(kind, tokens))
    seen["snapshots"] += 1
    seen["bytes written"] += receipt.bytes_written
    seen[f"  answered: {receipt.reason.split(':')[0][:60]}"] += 1


def read(store: kvkeep.Store, rng: random.Random, seen: Counter[str]) -> None:
    """Resume a prompt and compare every byte."""
    kind, conversation = rng.choice(KINDS), rng.randrange(CONVERSATIONS)
    tokens = tokens_of(conversation, rng.randint(20, 600))
    hit = open_spaces(store)[kind].resume(tokens)
    seen["lookups"] += 1
    seen["hits"] += hit.caches is not None
    seen[f"  decided: {hit.decision.why}"] += 1
    if hit.caches is not None:
        problem = wrong(kind, tokens, hit.offset, hit.caches)
        assert not problem, (kind, conversation, hit.decision, problem)
        seen["bytes compared"] += sum(cache.nbytes for cache in hit.caches)


def work(role: str, folder: str, seed: int, seconds: float) -> None:
    """One process: write or read until the time is over, then say what was seen."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    act = {"writer": write, "reader": read}[role]
    end = time.monotonic() + seconds
    with kvkeep.open(folder, disk_reserve=1) as store:
        while time.monotonic() < end:
            act(store, rng, seen)
    print(json.dumps(seen))


def start(role: str, folder: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    """A process that does ``work``."""
    job = json.dumps({"role": role, "folder": str(folder), "seed": seed, "seconds": seconds})
    command = [sys.executable, "-W", "error", "-m", "tests.faults.soak", "--work", job]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def run(folder: Path, seconds: float, writers: int, readers: int, seed: int) -> Counter[str]:
    """The whole soak; what was seen. Raises ``AssertionError`` for anything wrong."""
    rng = random.Random(seed)
    kvkeep.open(folder, max_bytes=BUDGET, disk_reserve=1).close()
    end = time.monotonic() + seconds
    seen: Counter[str] = Counter()
    kept = [start("writer", folder, rng.randrange(1 << 30), seconds) for _ in range(writers)]
    reading = [start("reader", folder, rng.randrange(1 << 30), seconds) for _ in range(readers)]
    while readers and time.monotonic() + KILL_EVERY < end:
        time.sleep(KILL_EVERY)
        victim = reading.pop(0)
        victim.kill()
        victim.communicate()
        seen["readers killed"] += 1
        left = max(0.0, end - time.monotonic())
        reading.append(start("reader", folder, rng.randrange(1 << 30), left))
        seen["largest file"] = max(seen["largest file"], (folder / "data.mdb").stat().st_size)
    for process in kept + reading:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert not errors, errors
        seen += Counter(json.loads(out))
    check(folder, seen)
    return seen


def check(folder: Path, seen: Counter[str]) -> None:
    """The store after the soak."""
    with kvkeep.open(folder, disk_reserve=1) as store:
        problems = store.verify().problems
        assert not problems, problems
        seen["bytes in use at the end"] = store.used_bytes
        assert recount(store) == store.used_bytes <= BUDGET
        seen["largest file"] = max(seen["largest file"], store.env.file_bytes())
    assert seen["largest file"] <= MOST_GROWTH * BUDGET, seen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        light.install()
        small_chunks()
        work(**json.loads(options.work))
        return
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-soak-")) / "store"
    seen = run(folder, options.seconds, options.writers, options.readers, options.seed)
    for what, count in sorted(seen.items()):
        print(f"{count:>14,}  {what}")
    print(f"budget {BUDGET:,}; seed {options.seed}; store in {folder}")


if __name__ == "__main__":
    main()
