"""The check of LMDB's pages: sound files pass, whatever LMDB wrote; damage is named."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import Damaged, NotAStore
from kvkeep.persistence.environment import Environment
from kvkeep.persistence.opening import OPENING_PAGES
from kvkeep.persistence.pages import check_pages

MIB = 1 << 20
PAGE = 4096
NAMES = ["meta", "nodes", "chunks", "empty"]


def opened(folder: Path) -> Environment:
    return Environment(folder, map_size=256 * MIB, databases=NAMES)


def churn(env: Environment, seed: int, transactions: int) -> None:
    """Random puts and deletes, small values and ones with pages of their own."""
    rng = random.Random(seed)
    for _ in range(transactions):
        with env.begin(write=True) as txn:
            for _ in range(rng.randint(1, 40)):
                key = rng.randrange(2000).to_bytes(8, "big") * rng.choice((1, 2, 30))
                if rng.random() < 0.4:
                    txn.delete("nodes", key)
                    txn.delete("chunks", key)
                else:
                    txn.put("nodes", key, rng.randbytes(rng.randint(1, 1900)))
                    txn.put("chunks", key, rng.randbytes(rng.choice((10, 5000, 70_000))))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The data file of a store with several levels, freed pages and all sizes of values."""
    folder = tmp_path_factory.mktemp("pages") / "store"
    with opened(folder) as env:
        churn(env, 5, 40)
    return (folder / "data.mdb").read_bytes()


def test_what_lmdb_writes_is_sound(tmp_path: Path) -> None:
    file = tmp_path / "store" / "data.mdb"
    with opened(tmp_path / "store") as env:
        assert check_pages(file, deep=True).complete
        depth = pages = 0
        for seed in range(12):
            churn(env, seed, 8)
            found = check_pages(file, deep=True)
            assert (found.faults, found.complete, found.short) == ([], True, False)
            assert env.check() == found
            pages = max(pages, found.pages)
            depth = max(depth, found.transaction or 0)
        assert pages > 100
        assert depth >= 12 * 8


def test_lmdbs_own_verifier_agrees(sound: bytes, tmp_path: Path) -> None:
    verify = pytest.importorskip("lmdb.verify", reason="py-lmdb before 3 has no verifier")
    file = tmp_path / "data.mdb"
    rng = random.Random(3)
    both = neither = 0
    for _ in range(60):
        damaged = bytearray(sound)
        if rng.random() < 0.8:
            page = rng.choice(structural(sound))
            damaged[page * PAGE + rng.randrange(64)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        ours = bool(check_pages(file, deep=True).faults)
        theirs = not verified(verify, file)
        assert theirs or not ours, "what LMDB's verifier takes as sound must not be refused"
        both += ours and theirs
        neither += not ours and not theirs
    assert both > 10
    assert neither > 5


def verified(verify: Any, file: Path) -> bool:
    try:
        return not verify.verify(str(file))
    except verify.VerifyError:
        return False


def structural(data: bytes) -> list[int]:
    """Branch and leaf pages of a file."""
    heads = ((p, *struct.unpack_from("<QHH", data, p * PAGE)) for p in range(2, len(data) // PAGE))
    return [page for page, number, _, kind in heads if page == number and kind in (1, 2)]


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 5000, 8192, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_is_refused_and_not_touched(
    sound: bytes, tmp_path: Path, length: float
) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    cut = sound[: int(len(sound) * length) if isinstance(length, float) else length]
    (folder / "data.mdb").write_bytes(cut)
    if length == 0:
        opened(folder).close()  # an empty file is a new store
        return
    for read_only in (True, False):
        with pytest.raises((Damaged, NotAStore)) as caught:
            Environment(folder, map_size=256 * MIB, databases=NAMES, read_only=read_only)
        assert caught.type is Damaged or length < 200
    assert (folder / "data.mdb").read_bytes() == cut


@pytest.mark.parametrize("what", ["zero", "random", "another"])
def test_every_structural_page_is_looked_at(sound: bytes, tmp_path: Path, what: str) -> None:
    file = tmp_path / "data.mdb"
    live = 0
    pages = structural(sound)
    for page in pages[:: max(1, len(pages) // 40)]:
        other = bytes(sound[8 * PAGE : 9 * PAGE] if page != 8 else sound[9 * PAGE : 10 * PAGE])
        content = {"zero": bytes(PAGE), "random": random.Random(page).randbytes(PAGE)}
        replaced = content.get(what, other)
        file.write_bytes(sound[: page * PAGE] + replaced + sound[(page + 1) * PAGE :])
        live += bool(check_pages(file).faults)
    assert live > 12, "most of these pages are in use; freed ones may hold anything"


def test_pages_that_are_used_twice_or_free_are_found(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "data.mdb"
    # The first value with pages of its own claims one page more than it has.
    page = next(
        p
        for p in range(2, len(sound) // PAGE)
        if struct.unpack_from("<QHH", sound, p * PAGE) == (p, 0, 4) and in_use(sound, tmp_path, p)
    )
    damaged = bytearray(sound)
    (count,) = struct.unpack_from("<I", sound, page * PAGE + 12)
    struct.pack_into("<I", damaged, page * PAGE + 12, count + 1)
    file.write_bytes(damaged)
    assert not check_pages(file).faults
    assert "used twice" in check_pages(file, deep=True).faults[0]


def in_use(data: bytes, folder: Path, page: int) -> bool:
    """Whether a damaged first page of a value is noticed."""
    damaged = bytearray(data)
    damaged[page * PAGE] ^= 1
    (folder / "probe").write_bytes(damaged)
    return bool(check_pages(folder / "probe", deep=True).faults)


def test_a_limit_is_kept_unless_the_file_is_short(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "data.mdb"
    file.write_bytes(sound)
    found = check_pages(file, 10)
    assert (found.pages, found.complete) == (10, False)
    file.write_bytes(sound[:-PAGE])
    assert check_pages(file, 10).short
    assert check_pages(file, 10).pages > 10


def test_pages_that_were_never_written_are_no_damage(tmp_path: Path) -> None:
    """Values that were put and deleted in one transaction leave the file short."""
    folder = tmp_path / "store"
    with opened(folder) as env:
        churn(env, 1, 3)  # leaves free pages, so that the next tree pages are not the last ones
        with env.begin(write=True) as txn:
            txn.put("chunks", b"kept", bytes(10_000))
            txn.put("chunks", b"gone", bytes(MIB))
            txn.delete("chunks", b"gone")
    file = folder / "data.mdb"
    before = file.stat().st_size
    found = check_pages(file)
    assert (found.faults, found.complete, found.short) == ([], True, True)
    with opened(folder) as env, env.begin() as txn:
        assert len(txn.get("chunks", b"kept") or b"") == 10_000
    assert file.stat().st_size >= before + MIB, "opening gives those pages their place"
    assert not check_pages(file).short


def test_another_format_is_left_to_lmdb(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "data.mdb"
    newer = bytearray(sound)
    for page in (0, 1):
        newer[page * PAGE + 20] = 9
    for content in (b"", b"x" * 100, b"garbage!" * 4096, bytes(newer)):
        file.write_bytes(content)
        found = check_pages(file)
        assert (found.faults, found.complete) == ([], False)


def test_a_busy_store_is_never_called_damaged(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as env:
        churn(env, 1, 10)
        done = threading.Event()

        def write() -> None:
            churn(env, 2, 120)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        checked = whole = 0
        while not done.is_set():
            for found in (check_pages(env.folder / "data.mdb", deep=True), env.check()):
                assert not found.faults
                checked += 1
                whole += found.complete
        thread.join()
        assert checked > 4
        assert env.check().complete


def test_leaves_far_from_the_roots_are_looked_at_before_lmdb_is(tmp_path: Path) -> None:
    """LMDB ends the process on a leaf that was zeroed."""
    folder = tmp_path / "store"
    with opened(folder) as env, env.begin(write=True) as txn:
        for number in range(12_000):
            txn.put("nodes", number.to_bytes(8, "big"), bytes(300))
    file = folder / "data.mdb"
    data = file.read_bytes()
    whole = check_pages(file)
    assert whole.complete
    assert whole.pages > 1.5 * OPENING_PAGES
    skimmed = check_pages(file, OPENING_PAGES, skim=1 << 16)
    assert (skimmed.faults, skimmed.pages, skimmed.complete) == ([], whole.pages, False)
    assert check_pages(file, OPENING_PAGES, skim=100).pages == OPENING_PAGES + 100
    page = (whole.pages + OPENING_PAGES) // 2  # pages were appended in the order of the keys
    for content in (bytes(PAGE), data[(page - 1) * PAGE : page * PAGE]):
        file.write_bytes(data[: page * PAGE] + content + data[(page + 1) * PAGE :])
        assert not check_pages(file, OPENING_PAGES).faults, "it is not near the roots"
        for read_only in (True, False):
            with pytest.raises(Damaged, match=f"page {page} "):
                Environment(folder, map_size=256 * MIB, databases=NAMES, read_only=read_only)
