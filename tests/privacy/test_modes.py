"""Files are this user's own, and a store that others can change is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import StoreExposed
from tests.faults.rows import caches, tokens_of
from tests.faults.worker import open_spaces


def modes(folder: Path) -> dict[str, int]:
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    return {".": stat.S_IMODE(folder.stat().st_mode), **found}


def fill(folder: Path, **options: object) -> None:
    with kvkeep.open(folder, disk_reserve=1, max_bytes="50MB", **options) as store:  # type: ignore[arg-type]
        tokens = tokens_of(1, 80)
        receipt = open_spaces(store)["plain"].snapshot(tokens, caches("plain", tokens))
        assert receipt.stored, receipt


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_store_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        fill(tmp_path / "deep" / "store")
    finally:
        os.umask(before)
    assert modes(tmp_path / "deep" / "store") == {
        ".": 0o700, "store.json": 0o600, "data.mdb": 0o600, "lock.mdb": 0o600,
    }  # fmt: skip


def test_a_parent_that_all_may_write_is_fine_and_an_empty_folder_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "store").mkdir(mode=0o777)
    (tmp_path / "store").chmod(0o777)
    fill(tmp_path / "store")
    assert modes(tmp_path / "store")["."] == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_store_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "store"
    fill(folder)
    data = (folder / "data.mdb").read_bytes()
    folder.chmod(mode)
    for read_only in (False, True):
        with pytest.raises(StoreExposed, match="Others may write") as caught:
            kvkeep.open(folder, read_only=read_only)
        assert "allow_shared=True" in caught.value.remedy
    assert (folder / "data.mdb").read_bytes() == data
    assert stat.S_IMODE(folder.stat().st_mode) == mode, "a refusal changes nothing"


def test_others_who_may_only_read_lose_that(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    (tmp_path / "store").chmod(0o755)
    (tmp_path / "store" / "data.mdb").chmod(0o644)
    fill(tmp_path / "store")
    assert modes(tmp_path / "store")["."] == 0o700
    assert modes(tmp_path / "store")["data.mdb"] == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_store_of_another_user_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    os.chown(tmp_path / "store", 65534, -1)
    with pytest.raises(StoreExposed, match="belongs to user 65534"):
        kvkeep.open(tmp_path / "store")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_shared_store_is_for_the_group(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"allow_shared": True} if by == "argument" else {}
    if by == "environment":
        monkeypatch.setenv("KVKEEP_ALLOW_SHARED", "1")
    before = os.umask(0)
    try:
        fill(tmp_path / "store", **options)
    finally:
        os.umask(before)
    assert modes(tmp_path / "store") == {
        ".": 0o770, "store.json": 0o660, "data.mdb": 0o660, "lock.mdb": 0o660,
    }  # fmt: skip
    fill(tmp_path / "store", **options)
    assert modes(tmp_path / "store")["."] == 0o770, "nothing is tightened"
    with pytest.raises(StoreExposed):
        kvkeep.open(tmp_path / "store", allow_shared=False)
