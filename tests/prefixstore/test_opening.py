"""What may be opened as a store, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import json
import os
import stat

import pytest

import kvkeep
from kvkeep.errors import (
    KvkeepError,
    NotAStore,
    StoreClosed,
    StoreReadOnly,
    StoreTooNew,
)
from tests.prefixstore.shapes import make, problem

TOKENS = list(range(30))


def filled(path):
    with kvkeep.open(path, max_bytes="1GB") as store:
        space = store.space(identity={}, layout=make("plain", ()))
        assert space.snapshot(TOKENS, make("plain", TOKENS)).stored
    return path


def listing(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "lock.mdb"}


def marked(path, **changes):
    file = path / "store.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in (fields | changes).items() if v is not None}))


GARBAGE = {
    "not JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"1",
    "no version": b'{"map_bytes": 68719476736, "budget": 1000}',
    "no sizes": b'{"kvkeep": 1}',
    "a size that is none": b'{"kvkeep": 1, "map_bytes": "x", "budget": 1000}',
    "no address space is that large": b'{"kvkeep": 1, "map_bytes": 1e30, "budget": 1000}',
    "a map below the budget": b'{"kvkeep": 1, "map_bytes": 10, "budget": 1000}',
    "infinite": b'{"kvkeep": 1, "map_bytes": Infinity, "budget": 1}',
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_marker_that_describes_no_store_is_refused(tmp_path, what):
    path = filled(tmp_path / "store")
    (path / "store.json").write_bytes(GARBAGE[what])
    before = listing(path)
    with pytest.raises(NotAStore):
        kvkeep.open(path)
    assert listing(path) == before


@pytest.mark.parametrize("changes", [{}, {"map_bytes": None, "budget": None}, {"budget": "large"}])
def test_a_newer_store_is_refused_whatever_else_it_says(tmp_path, changes):
    path = filled(tmp_path / "store")
    marked(path, kvkeep=2, **changes)
    before = listing(path)
    with pytest.raises(StoreTooNew, match="format 2"):
        kvkeep.open(path)
    assert listing(path) == before


def test_folders_that_hold_something_else_are_refused_and_left_alone(tmp_path):
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    with pytest.raises(NotAStore, match="other files"):
        kvkeep.open(folder)
    with pytest.raises(NotAStore):
        kvkeep.open(folder / "letter.txt")
    with pytest.raises(NotAStore):
        kvkeep.open(folder / "letter.txt" / "below")
    assert listing(folder) == {"letter.txt": b"dear"}


def test_data_of_another_kind_under_our_marker_is_refused(tmp_path):
    path = filled(tmp_path / "store")
    (path / "data.mdb").write_bytes(b"this was once a database" * 1000)
    before = listing(path)
    with pytest.raises(KvkeepError):
        kvkeep.open(path)
    assert listing(path)["data.mdb"] == before["data.mdb"]


def test_a_new_store_is_private_and_only_made_for_writing(tmp_path):
    with pytest.raises(NotAStore):
        kvkeep.open(tmp_path / "store", read_only=True)
    assert not (tmp_path / "store").exists()
    path = filled(tmp_path / "deep" / "store")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in path.iterdir()} == {0o600}


def test_what_an_interrupted_opening_left_is_no_obstacle(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    (path / "store.json.new-123").write_text("{")
    filled(path)
    with kvkeep.open(path) as store:
        assert store.conversations()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    path = filled(tmp_path / "store")
    for file in path.iterdir():
        file.chmod(0o400)
    path.chmod(0o500)
    try:
        with pytest.raises(StoreReadOnly):
            kvkeep.open(path)
        with kvkeep.open(path, read_only=True) as store:
            assert store.conversations()
    finally:
        path.chmod(0o700)


def test_a_store_that_is_only_read_serves_and_never_writes(tmp_path):
    path = filled(tmp_path / "store")
    before = listing(path)
    with kvkeep.open(path, read_only=True) as store:
        space = store.space(identity={}, layout=make("plain", ()))
        hit = space.resume([*TOKENS, 1])
        assert hit.offset == 30
        assert not problem("plain", TOKENS, hit.caches)
        receipt = space.snapshot([*TOKENS, 1], make("plain", [*TOKENS, 1]))
        assert (receipt.stored, receipt.bytes_written) == (False, 0)
        assert "reading only" in receipt.reason
        for change in (store.repair, lambda: store.evict(to=0)):
            with pytest.raises(StoreReadOnly):
                change()
        assert not store.verify().problems
        assert space.resume([*TOKENS, 1, 2]).offset == 30
    assert listing(path) == before


def test_the_budget_is_kept_unless_another_is_given(tmp_path):
    path = filled(tmp_path / "store")
    with kvkeep.open(path) as store:
        assert store.max_bytes == 10**9
        used = store.used_bytes
    with kvkeep.open(path, max_bytes=used - 1) as store:
        assert store.used_bytes == 0
    with kvkeep.open(path) as store:
        assert store.max_bytes == used - 1
    with pytest.raises(KvkeepError, match="laid out"):
        kvkeep.open(path, max_bytes="100TB")


def test_a_closed_store_says_so_and_closing_twice_is_fine(tmp_path):
    path = filled(tmp_path / "store")
    store = kvkeep.open(path)
    space = store.space(identity={}, layout=make("plain", ()))
    store.close()
    store.close()
    uses = [
        store.flush,
        store.verify,
        store.repair,
        store.report,
        store.conversations,
        store.spaces,
        lambda: store.used_bytes,
        lambda: store.evict(to=0),
        lambda: store.space(identity={}, layout=make("plain", ())).resume(TOKENS),
        lambda: space.resume(TOKENS),
        lambda: space.explain(TOKENS),
        lambda: space.snapshot(TOKENS, make("plain", TOKENS)),
        store.__enter__().flush,
    ]
    for use in uses:
        with pytest.raises(StoreClosed, match=r"kvkeep\.open"):
            use()
    with kvkeep.open(path) as again:
        assert again.conversations()
