"""Random work on a store of which records are damaged at random: fewer hits, never a wrong bit."""

from __future__ import annotations

import logging
import random
from collections import Counter

from tests.prefixstore.shapes import BOUNDARIES, SHAPES
from tests.prefixstore.test_store_property import LONGEST, ROOMY, TIGHT, World
from tests.prefixstore.test_store_property import seen as hits

SEQUENCES = 90
HARM = {
    "flip": lambda rng, data, other: flipped(rng, data),
    "swap": lambda rng, data, other: other,
    "cut": lambda rng, data, other: data[: rng.randrange(len(data))],
    "delete": lambda rng, data, other: None,
}


def flipped(rng, data):
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def damage(store, rng, seen):
    """Spoil one record of those that hold content."""
    store.flush()
    database = rng.choice(["chunks", "chunks", "nodes", "recipes"])
    with store.env.begin(write=True) as txn:
        records = [(key, bytes(value)) for key, value in txn.items(database)]
        if not records:
            return
        (key, data), (_, other) = rng.choice(records), rng.choice(records)
        how = rng.choice(sorted(HARM))
        spoiled = HARM[how](rng, data, other)
        if spoiled is None:
            txn.delete(database, key)
        else:
            txn.put(database, key, spoiled)
    seen[f"{database}: {how}"] += 1


def step(world, rng, seen):
    place = {
        "which": rng.choice([0, 0, 1]),
        "base": rng.randint(0, 20),
        "share": rng.choice([0.3, 0.6, 0.8, 1, 1]),
        "tail": rng.choices([0, 0, 1, 2**40], k=rng.choice([0, 1, 3, 6, 12, 28])),
    }
    kind = rng.choices(["snapshot", "lookup", "damage", "repair", "reopen"], [35, 45, 8, 4, 4])[0]
    if kind == "snapshot":
        prefill, boundary = rng.randint(1, LONGEST), rng.choice(BOUNDARIES)
        world.snapshot(**place, prefill=prefill, boundary=boundary, shorter=0, wait=False)
    elif kind == "lookup":
        place["tail"] = place["tail"][:6]
        world.lookup(**place)
    elif kind == "damage":
        damage(world.store, rng, seen)
        world.evicted = True
    elif kind == "repair":
        world.store.repair()
        assert not world.store.verify().problems
    else:
        world.reopen()
    seen[kind] += 1


def test_whatever_is_damaged_no_wrong_bit_is_served(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 1)
    monkeypatch.setattr("kvkeep.prefixstore.writer.ONE_TRANSACTION", 12_000)
    caplog.set_level(logging.CRITICAL, "kvkeep")
    counts: Counter[str] = Counter()
    hits.clear()
    for seed in range(SEQUENCES):
        rng = random.Random(seed)
        names = rng.sample(sorted(SHAPES), 2)
        world = World(tmp_path / str(seed), rng.choice([ROOMY, ROOMY, TIGHT]), names)
        try:
            for _ in range(25):
                step(world, rng, counts)
            world.store.repair()
            assert not world.store.verify().problems
        except Exception as error:
            error.add_note(f"seed {seed}: {', '.join(names)}")
            raise
        finally:
            world.store.close()
    assert hits["hits"] > 5 * SEQUENCES
    assert hits["bytes compared"] > 100_000
    assert sum(n for name, n in counts.items() if ": " in name) > SEQUENCES
    assert sum(": " in name for name in counts) == 3 * len(HARM)
