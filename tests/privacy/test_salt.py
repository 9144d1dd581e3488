"""Tenants under different salts learn nothing of each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvkeep
from kvkeep.prefixstore.space import Space
from tests.faults.rows import caches, tokens_of

KIND = "recurrent"


def space_of(store: kvkeep.Store, salt: str | None, model: str = "m") -> Space:
    return store.space(identity={"model": model}, layout=caches(KIND, ()), salt=salt)


def test_bytes_answers_and_reports_are_apart(tmp_path: Path) -> None:
    prompt = tokens_of(3, 200)
    with kvkeep.open(tmp_path / "store", max_bytes="50MB", disk_reserve=1) as store:
        red, blue, none = (space_of(store, salt) for salt in ("red", "blue", None))
        assert red.snapshot(prompt[:150], caches(KIND, prompt[:150])).stored
        assert red.resume(prompt).offset == 150

        # Whatever the others ask, they are answered as if red's prompts were not there.
        alone = tmp_path / "alone"
        with kvkeep.open(alone, max_bytes="50MB", disk_reserve=1) as other:
            for salt, space in (("blue", blue), (None, none)):
                for other_model in ("m", "n"):
                    mine = space_of(store, salt, other_model)
                    theirs = space_of(other, salt, other_model)
                    assert mine.explain(prompt) == theirs.explain(prompt)
                    hit, theirs_hit = mine.resume(prompt), theirs.resume(prompt)
                    assert hit.caches is None
                    assert hit.decision == theirs_hit.decision
                assert space.resume(prompt).decision.reason is kvkeep.Reason.NO_PREFIX

        # Blue stores the same prompt: every row again, none shared.
        receipt = blue.snapshot(prompt[:150], caches(KIND, prompt[:150]))
        assert receipt.stored
        assert (receipt.tokens_new, receipt.tokens_known) == (150, 0)
        frames = chunks_by_space(store)
        assert not set(frames[red.id]) & set(frames[blue.id])

        reports = {salt: store.report(salt=salt) for salt in ("red", "blue", "green")}
        assert [reports[s].total.snapshots for s in ("red", "blue", "green")] == [1, 1, 0]
        assert reports["red"].total.lookups == 1
        assert set(reports["red"].by_space) == {red.id.hex()}
        assert red.id.hex() not in str(reports["blue"])
        whole = store.report()
        assert whole.total.snapshots == 2, "the folder's owner sees all of it"


def chunks_by_space(store: kvkeep.Store) -> dict[bytes, list[int]]:
    from kvkeep.persistence.frame import Frame

    found: dict[bytes, list[int]] = {}
    with store.env.begin() as txn:
        for key, data in txn.items("chunks"):
            found.setdefault(Frame.open(data).extra["space"], []).append(int.from_bytes(key, "big"))
    assert len(found) == 2
    return found


def test_a_lookup_that_is_not_recorded_writes_nothing(tmp_path: Path) -> None:
    prompt = tokens_of(3, 200)
    folder = tmp_path / "store"
    with kvkeep.open(folder, max_bytes="50MB", disk_reserve=1, event_tokens=8) as store:
        space = space_of(store, "red")
        assert space.snapshot(prompt[:150], caches(KIND, prompt[:150])).stored
        store.flush()
        before = (folder / "data.mdb").read_bytes()
        other = np.concatenate([prompt[:150], [77_777] * 40])
        for tokens in (prompt, other, tokens_of(9, 100)):
            hit = space.resume(tokens, record=False)
            assert hit.offset == space.explain(tokens).offset
        assert space.resume(prompt, record=False).offset == 150
        store.flush()
        assert (folder / "data.mdb").read_bytes() == before
        assert store.report().total.lookups == 0
    assert (folder / "data.mdb").read_bytes() == before, "nor does closing the store write"
    with kvkeep.open(folder, disk_reserve=1, event_tokens=8) as store:
        space_of(store, "red").resume(prompt)
        store.flush()
        assert (folder / "data.mdb").read_bytes() != before, "an ordinary one is recorded"
        assert store.report().total.lookups == 1
