"""What is purged is gone: from answers, from listings, and from the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvkeep
from kvkeep.errors import KvkeepError
from kvkeep.prefixstore.space import Space
from tests.faults.rows import KINDS, bits_of, caches, tokens_of, wrong
from tests.faults.sigkill import recount


def opened(folder: Path) -> kvkeep.Store:
    return kvkeep.open(folder, max_bytes="50MB", disk_reserve=1, event_tokens=8)


def space_of(store: kvkeep.Store, salt: str | None, kind: str) -> Space:
    return store.space(identity={"model": kind}, layout=caches(kind, ()), salt=salt)


def marked(mark: int, conversation: int, length: int) -> np.ndarray:
    """Tokens that no other tenant's prompts hold."""
    return tokens_of(conversation, length) + 100_000 * mark


def fill(store: kvkeep.Store, salt: str, mark: int, conversations: int = 6) -> None:
    for kind in KINDS:
        space = space_of(store, salt, kind)
        for number in range(conversations):
            tokens = marked(mark, number, 150 + 40 * number)
            assert space.snapshot(tokens, caches(kind, tokens)).stored
            space.resume(np.append(tokens, 5))
    store.flush()


def traces(store: kvkeep.Store, mark: int, conversations: int = 6) -> int:
    """How many pieces of a tenant's tokens and rows the data file holds."""
    data = (store.path / "data.mdb").read_bytes()
    found = 0
    for number in range(conversations):
        tokens = marked(mark, number, 150 + 40 * number)
        for start in range(0, len(tokens) - 8, 8):
            found += tokens[start : start + 8].astype("<i4").tobytes() in data
        for plane in ("keys", "values"):
            rows = bits_of(getattr(caches("plain", tokens)[0], plane)).tobytes()
            found += sum(rows[at : at + 32] in data for at in range(0, len(rows) - 32, 1024))
    return found


def serves(store: kvkeep.Store, salt: str, mark: int, conversations: int = 6) -> int:
    """How many of a tenant's prompts are resumed to their ends, bit for bit."""
    found = 0
    for kind in KINDS:
        for number in range(conversations):
            tokens = np.append(marked(mark, number, 150 + 40 * number), 5)
            hit = space_of(store, salt, kind).resume(tokens, record=False)
            if hit.caches is not None:
                assert not wrong(kind, tokens, hit.offset, hit.caches)
                found += hit.offset == len(tokens) - 1
    return found


def sound(store: kvkeep.Store) -> None:
    assert store.verify().problems == []
    assert store.used_bytes == recount(store)


def test_a_tenant_is_gone_and_the_others_are_not(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        fill(store, "red", 1)
        fill(store, "blue", 2)
        red = {space_of(store, "red", kind).id for kind in KINDS}
        assert traces(store, 1) > 100
        gone = store.purge(salt="red")
        assert gone.spaces == len(KINDS)
        assert min(gone.nodes, gone.tokens, gone.bytes, gone.events, gone.wiped) > 0
        assert traces(store, 1) == 0
        assert serves(store, "red", 1) == 0
        assert serves(store, "blue", 2) == 6 * len(KINDS)
        assert traces(store, 2) > 100
        sound(store)
        # Nothing tells that red was ever there.
        assert not red & {bytes.fromhex(info.id) for info in store.spaces()}
        assert not {key.hex() for key in red} & set(store.report().by_space)
        data = (store.path / "data.mdb").read_bytes()
        assert not any(key in data for key in red)
        digest = space_of(store, "red", KINDS[0]).identity.salt.encode()
        assert digest not in data
        assert store.purge(salt="red").nodes == 0
        # The tenant may come back.
        fill(store, "red", 1)
        assert serves(store, "red", 1) == 6 * len(KINDS)
        assert red <= {bytes.fromhex(info.id) for info in store.spaces()}
        sound(store)


def test_evicting_is_not_purging(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        fill(store, "red", 1)
        store.evict(to=0)
        assert store.used_bytes == 0
        assert traces(store, 1) > 100
        assert store.purge(salt="red").events > 0
        assert traces(store, 1) == 0
        sound(store)


def test_of_a_conversation_what_others_share_stays(tmp_path: Path) -> None:
    kind = "plain"
    with opened(tmp_path / "store") as store:
        space = space_of(store, None, kind)
        for number in (0, 1, 8):
            tokens = tokens_of(number, 300)  # the first two share 150 tokens, all share 64
            assert space.snapshot(tokens, caches(kind, tokens)).stored
        listed = {c.id: store.conversation_tokens(c.id) for c in store.conversations()}
        (mine,) = [c for c, ids in listed.items() if ids == tokens_of(1, 300).tolist()]
        gone = store.purge(conversation=mine)
        assert (gone.nodes, gone.tokens, gone.spaces) == (1, 150, 0)
        offsets = [space.resume(tokens_of(c, 301), record=False).offset for c in (0, 1, 8)]
        assert offsets == [300, 150, 300]
        (alone,) = [c for c, ids in listed.items() if ids == tokens_of(8, 300).tolist()]
        assert store.purge(conversation=alone).tokens == 300 - 64
        assert space.resume(tokens_of(8, 301), record=False).offset == 64
        sound(store)
        # The last conversation takes with it what only it still needs.
        (last,) = [c.id for c in store.conversations()]
        assert store.purge(conversation=last).tokens == 300
        assert store.used_bytes == 0
        assert store.purge(conversation=last).nodes == 0
        sound(store)


def test_damaged_records_are_purged_as_well(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        fill(store, "red", 1)
        fill(store, "blue", 2)
        mine = space_of(store, "red", "plain")
        with store.env.begin(write=True) as txn:
            nodes = list(txn.items("nodes", prefix=mine.id))
            for key, value in nodes[-2:]:
                txn.put("nodes", key, bytes(value)[:-1] + b"\xff")
        # A frame that was found to be damaged, and that no node leads to any longer.
        space = space_of(store, "red", "recurrent")
        with store.env.begin(write=True) as txn:
            for key, value in list(txn.items("chunks")):
                if space.id in bytes(value[:2000]):
                    txn.put("chunks", key, bytes(value)[:-1] + b"\xff")
        assert serves(store, "red", 1) < 6 * len(KINDS)
        assert store.verify().damaged
        store.purge(salt="red")
        assert traces(store, 1) == 0
        assert serves(store, "blue", 2) == 6 * len(KINDS)
        assert store.repair().problems == []
        sound(store)


def test_readers_keep_what_they_hold_and_the_next_purge_finishes(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        fill(store, "red", 1)
        with store.env.begin() as txn:
            held = {bytes(k): v.tobytes() for k, v in txn.items("chunks")}
            store.purge(salt="red")
            assert {bytes(k): v.tobytes() for k, v in txn.items("chunks")} == held
            assert len(held) > 10
        assert traces(store, 1) > 0
        store.purge(salt="red")
        assert traces(store, 1) == 0
        sound(store)


def test_what_to_purge_must_be_said(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        fill(store, "red", 1, 1)
        with pytest.raises(KvkeepError, match="exactly one"):
            store.purge()
        with pytest.raises(KvkeepError, match="exactly one"):
            store.purge(salt="red", space="00")
        assert store.purge(salt="").nodes == 0, "an empty salt means none, not all"
        assert serves(store, "red", 1, 1) == len(KINDS)
        space = space_of(store, "red", "plain")
        assert store.purge(space=space).spaces == 1
        assert store.purge(space=space.id.hex()).spaces == 0
        assert serves(store, "red", 1, 1) == len(KINDS) - 1
