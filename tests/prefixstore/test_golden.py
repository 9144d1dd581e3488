"""Stores of every earlier version are read bit for bit, and go on."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvkeep
from kvkeep.persistence.frame import HEAD, VERSION
from tests.prefixstore import make_golden
from tests.prefixstore.make_golden import TOKENS, TURNS, boundary_of, space_of
from tests.prefixstore.shapes import SHAPES, make, problem

VERSIONS = range(1, VERSION + 1)


@pytest.fixture(params=VERSIONS)
def store(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the golden store of each version."""
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 1)
    with zipfile.ZipFile(make_golden.FOLDER / f"store-{request.param}.zip") as archive:
        archive.extractall(tmp_path / "store")
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as opened:
        assert versions(opened) == {request.param}
        yield opened


def versions(store: kvkeep.Store) -> set[int]:
    """The versions of all frames of a store."""
    with store.env.begin() as txn:
        return {HEAD.unpack_from(data)[1] for _, data in txn.items("chunks")}


def test_there_is_one_golden_store_for_each_version() -> None:
    found = {path.name for path in make_golden.FOLDER.glob("*.zip")}
    assert found == {f"store-{version}.zip" for version in VERSIONS}


def test_every_turn_comes_back_bit_for_bit(store: Any) -> None:
    resumed = 0
    for shape in SHAPES:
        for stop in TURNS:
            hit = space_of(store, shape).resume([*TOKENS[:stop], 999])
            assert (hit.offset, str(hit.decision.reason)) == (stop, "full"), shape
            boundary = boundary_of(shape)
            assert not problem(shape, TOKENS[:stop], hit.caches, boundary), shape
            resumed += 1
    assert resumed == len(SHAPES) * len(TURNS)
    assert not store.verify().problems


def test_a_turn_more_and_another_branch_are_stored_beside_it(store: Any) -> None:
    before, resumed = versions(store), 0
    for shape in SHAPES:
        space, boundary = space_of(store, shape), boundary_of(shape)
        # Leaves the stored tokens within a chunk, which is cut there.
        parted = [*TOKENS[:41], *(t + 1 for t in TOKENS[41:70])]
        for tokens in (TOKENS, parted):
            assert space.snapshot(tokens, make(shape, tokens, boundary=boundary)).wait()
            hit = space.resume([*tokens, 999])
            assert hit.offset == len(tokens), shape
            assert not problem(shape, tokens, hit.caches, boundary), shape
            resumed += 1
    assert resumed == 2 * len(SHAPES)
    assert versions(store) == before | {VERSION}
    assert not store.verify().problems


def test_golden_stores_are_never_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_golden, "FOLDER", tmp_path)
    (tmp_path / f"store-{VERSION}.zip").write_bytes(b"kept")
    assert make_golden.main() == 1
    assert (tmp_path / f"store-{VERSION}.zip").read_bytes() == b"kept"
