"""A process that uses a store until it is killed, and says what it does.

    echo '{"folder": …, "seed": 7, "budget": 2000000}' | python -m tests.faults.worker

Lines on stdout, each written before or after the fact that it tells:

``P phase``            before ``open``, ``write``, ``flush``, ``evict``, ``split``, ``repair`` …
``S kind conv length`` before a snapshot is handed in
``D kind conv length`` after ``flush()`` said that it is stored
``H chunk``            before a chunk is damaged on purpose
``C``                  after a repair
``E``                  before anything that may drop what was stored
"""

from __future__ import annotations

import json
import random
import signal
import sys
from typing import Any

import kvkeep
from kvkeep.prefixstore import recipe, writer
from tests.faults import light
from tests.faults.rows import CONVERSATIONS, KINDS, caches, tokens_of, wrong

PHASES = ("open", "write", "large", "split", "flush", "evict", "repair", "resume", "close")


def small_chunks() -> None:
    """Many chunks and several transactions for one snapshot, although it is small."""
    assert writer.ONE_TRANSACTION > recipe.CHUNK_BYTES
    recipe.CHUNK_BYTES = 8 << 10
    writer.ONE_TRANSACTION = 32 << 10


def open_spaces(store: Any) -> dict[str, Any]:
    """The space of each kind."""
    return {k: store.space(identity={"rows": k}, layout=caches(k, ())) for k in KINDS}


class Worker:
    """Random work on one store."""

    durability = "safe"

    def __init__(self, folder: str, seed: int, budget: int, harm: bool) -> None:
        self.folder, self.budget, self.most, self.harm = folder, budget, budget, harm
        self.random = random.Random(seed)

    def open(self) -> None:
        tell("P open")
        if self.random.random() < 0.2:
            tell("E")
            self.budget = int(self.most * self.random.uniform(0.6, 1.0))
        self.store = kvkeep.open(
            self.folder, max_bytes=self.budget, disk_reserve=1, durability=self.durability
        )
        self.spaces = open_spaces(self.store)

    def run(self) -> None:
        self.open()
        steps = [self.write, self.write, self.split, self.large, self.evict, self.repair]
        steps += [self.resume, self.reopen]
        while True:
            self.random.choice(steps)()

    def write(self, phase: str = "write", lengths: tuple[int, int] = (20, 260)) -> None:
        taken = []
        for _ in range(self.random.randint(1, 3)):
            kind, conversation = self.random.choice(KINDS), self.random.randrange(CONVERSATIONS)
            tokens = tokens_of(conversation, self.random.randint(*lengths))
            tell(f"P {phase}")
            tell(f"S {kind} {conversation} {len(tokens)}")
            receipt = self.spaces[kind].snapshot(tokens, caches(kind, tokens))
            taken.append((kind, conversation, len(tokens), receipt))
        if self.random.random() < 0.7:
            tell("P flush")
            self.store.flush()
            for kind, conversation, length, receipt in taken:
                if receipt.stored:
                    tell(f"D {kind} {conversation} {length}")

    def large(self) -> None:
        self.write("large", (600, 1200))

    def split(self) -> None:
        self.write("split", (1, 149))

    def resume(self) -> None:
        tell("P resume")
        for kind in KINDS:
            tokens = tokens_of(self.random.randrange(CONVERSATIONS), 250)
            hit = self.spaces[kind].resume(tokens)
            found = wrong(kind, tokens, hit.offset, hit.caches) if hit.caches else ""
            assert not found, found

    def evict(self) -> None:
        tell("E")
        tell("P evict")
        self.store.evict(to=max(1, int(self.store.used_bytes * self.random.random())))

    def repair(self) -> None:
        self.store.flush()
        with self.store.env.begin() as txn:
            keys = list(txn.keys("chunks"))
        if keys and self.harm:
            key = self.random.choice(keys)
            tell(f"H {int.from_bytes(key, 'big')}")
            tell("E")
            with self.store.env.begin(write=True) as txn:
                bad = bytearray(txn.get("chunks", key) or b"")
                bad[self.random.randrange(len(bad))] ^= 1 << self.random.randrange(8)
                txn.put("chunks", key, bytes(bad))
        tell("P repair")
        self.store.repair()
        tell("C")

    def reopen(self) -> None:
        tell("P close")
        self.store.close()
        self.open()


def tell(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    light.install()
    small_chunks()
    caches(KINDS[0], tokens_of(0, 4))
    tell("ready")
    if sys.argv[1:]:
        Worker.durability = sys.argv[1]
        signal.alarm(int(sys.argv[2]))  # which ends the process
    Worker(**json.loads(sys.stdin.readline())).run()
