"""Damage in every region of a store's files: a miss or a named error, never a crash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import kvkeep
from kvkeep.errors import Damaged
from tests.faults import torn
from tests.faults.worker import open_spaces


@pytest.mark.slow
def test_damage_is_a_miss_or_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.prefixstore.recipe.CHUNK_BYTES", 8 << 10)
    seen = torn.run(tmp_path, each=2, seed=11)
    told: Counter[str] = Counter()
    for (_, _, what), count in seen.items():
        told[what] += count
    assert {what.split(":")[0] for what in told} <= {"used", "used, then told", "refused"}, told
    assert told["refused: Damaged"] >= 5
    assert told["used"] >= 20
    assert seen["file", "cut", "refused: Damaged"] == 2
    assert {region for region, _, _ in seen} == {
        "file", "meta", "branch", "leaf", "value, first page", "value, other pages", "lock file",
    }  # fmt: skip


def test_verify_names_damaged_pages_and_repair_refuses_them(tmp_path: Path) -> None:
    torn.make(tmp_path / "store")
    file = tmp_path / "store" / "data.mdb"
    data = file.read_bytes()
    # The first page of a value is not looked at when a store is opened.
    page = next(p for p in torn.regions(data)["value, first page"] if in_use(tmp_path, data, p))
    torn_data = bytearray(data)
    torn_data[page * torn.PAGE : (page + 1) * torn.PAGE] = bytes(torn.PAGE)
    file.write_bytes(torn_data)
    with kvkeep.open(tmp_path / "store", disk_reserve=1) as store:
        audit = store.verify()
        assert audit.damaged
        assert [(p.what, p.where) for p in audit.problems] == [("damaged", "data.mdb")]
        assert f"page {page}" in audit.problems[0].detail
        with pytest.raises(Damaged, match="Remove the folder"):
            store.repair()
        # What does not need that page is still served.
        space = open_spaces(store)["plain"]
        hits = [space.resume(torn.tokens_of(c, 601)).offset for c in range(torn.CONVERSATIONS)]
        assert sum(offset > 0 for offset in hits) >= torn.CONVERSATIONS - 4


def in_use(folder: Path, data: bytes, page: int) -> bool:
    """Whether a damaged first page of a value is one that something refers to."""
    from kvkeep.persistence.pages import check_pages

    probe = folder / "probe"
    probe.write_bytes(data[: page * torn.PAGE] + b"\xff" + data[page * torn.PAGE + 1 :])
    return bool(check_pages(probe, deep=True).faults)
